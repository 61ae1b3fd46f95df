"""What operators rely on: places, deadlines, clients that leave, the end of a server, its log."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fake_cuda import FakeDevice
from support.fake_engine import MODEL, FakeEngine, engine_info, engine_variant
from support.missing import need
from support.stalling import Paced, behind_a_gate

need("uvicorn", "serve")

from support.served import HELLO, Answer, Serving, digest, serving, talking, until  # noqa: E402

from mars_export import Limits, Session, SessionError  # noqa: E402
from mars_export.runtime.device.trt.backend import TrtBackend  # noqa: E402
from mars_export.runtime.errors import DeviceLost  # noqa: E402
from mars_export.runtime.serve import ServeOptions  # noqa: E402
from mars_export.runtime.serve.server import Lines, Reports  # noqa: E402

NARROW = Limits(max_rows=1, max_waiting=1)


def ended(server: Serving) -> tuple[int, int, int]:
    """Requests accepted, finished and cancelled so far. The first one warms the server up."""
    counts = server.batcher.counts
    return counts.accepted, counts.finished, counts.cancelled


# --- places and time ---


def test_the_queue_is_full(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with serving({"tiny": session}, ServeOptions(NARROW)) as server, ThreadPoolExecutor(2) as pool:
        pace.hold()
        first = pool.submit(server.chat, max_tokens=3)
        until(lambda: pace.is_waiting)
        second = pool.submit(server.chat, max_tokens=3)
        until(lambda: server.batcher.num_waiting == 1)
        third = server.chat(max_tokens=3)
        assert third.status == 429 and int(third.headers["retry-after"]) >= 1
        assert third.json["error"]["type"] == "rate_limit_error"
        several = server.chat(max_tokens=3, n=2)
        assert several.status == 429
        pace.open()
        assert first.result().status == second.result().status == 200
        assert server.metric("mars_requests_total", model="", outcome="overloaded") == 2


def test_several_answers_take_all_their_places_or_none(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with serving({"tiny": session}, ServeOptions(NARROW)) as server, ThreadPoolExecutor(1) as pool:
        pace.hold()
        first = pool.submit(server.chat, max_tokens=3)
        until(lambda: pace.is_waiting)
        assert server.chat(max_tokens=3, n=2, temperature=1.0).status == 429
        pace.open()
        assert first.result().status == 200
        # What had come in went again. A request is counted a moment after its reader has the answer.
        until(lambda: ended(server) == (3, 2, 1))
        for asked, param in (({"n": 3}, "n"), ({"prompt": ["a"] * 3}, "prompt")):
            path = "/v1/completions" if param == "prompt" else "/v1/chat/completions"
            never = server.call(path, {"messages": HELLO, **asked} if param == "n" else asked)
            error = never.json["error"]
            assert (never.status, error["code"], error["param"]) == (400, "limit_exceeded", param)
            assert server.batcher.counts.accepted == 3, "nothing of it ran"


def test_nobody_waits_for_ever(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    options = ServeOptions(Limits(max_rows=1, max_waiting=2), queue_timeout=0.3)
    with serving({"tiny": session}, options) as server, ThreadPoolExecutor(1) as pool:
        pace.hold()
        first = pool.submit(server.chat, max_tokens=3)
        until(lambda: pace.is_waiting)
        for stream in (False, True):
            refused = server.chat(max_tokens=3, stream=stream)
            assert refused.status == 429 and "no row was free" in refused.json["error"]["message"]
            assert "retry-after" in refused.headers
        pace.open()
        assert first.result().status == 200, "what has a row may take its time"


def test_an_answer_has_a_deadline(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with serving({"tiny": session}, ServeOptions(request_timeout=0.5)) as server:
        pace.hold()
        late = server.chat(max_tokens=3)
        assert late.status == 504 and late.json["error"]["code"] == "timeout"
        pace.let(1)  # the step that hung
        until(lambda: not server.batcher.num_running)
        pace.let(3)
        cut = server.chat(max_tokens=300, tau=1.0)
        assert cut.status == 200 and cut.json["choices"][0]["finish_reason"] == "length"
        assert cut.json["mars"]["finish_reason"] == "deadline"
        assert cut.json["usage"]["completion_tokens"] == 3
        until(lambda: server.batcher.counts.expired == 2)
        pace.open()


def test_a_timeout_keeps_what_was_generated(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    options = ServeOptions(Limits(max_rows=1), request_timeout=1.0)
    with serving({"tiny": session}, options) as server:
        pace.hold()
        pace.let(2)
        asked = {"prompt": ["hi there", "who is"], "max_tokens": 2, "tau": 1.0}
        some = server.call("/v1/completions", asked)
        pace.open()
        assert some.status == 200, some.json
        first, second = some.json["choices"]
        assert first["text"] and (second["text"], second["finish_reason"]) == ("", "length")
        assert some.json["mars"]["finish_reason"] == ["length", "deadline"]


@pytest.mark.parametrize("way", ["in a stream", "by closing", "by closing its side"])
def test_a_client_that_leaves_gives_its_row_back(way: str, slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with serving({"tiny": session}, ServeOptions(NARROW)) as server:
        pace.hold()
        pace.let(2 if way == "in a stream" else 1)
        if way == "in a stream":
            with talking(server, max_tokens=400, tau=1.0) as answer:
                assert answer.readline().startswith(b"data: ")
                until(lambda: pace.is_waiting)
        else:
            body = json.dumps({"messages": HELLO})
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
                connection.sendall((head + body).encode())
                until(lambda: pace.is_waiting)
                if way == "by closing its side":
                    connection.shutdown(socket.SHUT_WR)
                    assert connection.recv(1) == b"", "the server closes the other side"
        until(lambda: server.batcher.counts.cancelled == 1)  # while its step still hangs
        pace.let(1)
        until(lambda: server.batcher.num_running == 0)
        assert server.metric("mars_requests_total", model="tiny", outcome="cancelled") == 1


def test_silence_is_broken_by_pings(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with serving({"tiny": session}, ServeOptions(ping=0.05)) as server:
        pace.hold()
        with talking(server, max_tokens=3) as answer:
            lines = [answer.readline() for _ in range(6)]
            assert lines[2:] == [b": ping\n", b"\n"] * 2, lines
            pace.open()
            rest = answer.read()
            assert rest.endswith(b"data: [DONE]\n\n")


# --- its life ---


def test_health_says_when_it_is_warm(session: Session) -> None:
    cold, gate = behind_a_gate(session)
    with serving({"tiny": cold}, warm=False) as server:
        health = server.call("/health")
        assert health.status == 503 and health.json == {"status": "not ready"}
        assert server.call("/health/live").status == 200 and server.call("/health/ready").status == 503
        early = server.chat(max_tokens=1)
        assert early.status == 503 and "retry-after" in early.headers
        assert server.call("/v1/models").status == 200
        gate.gate.set()
        until(lambda: server.call("/health").status == 200)
        assert server.chat(max_tokens=1).status == 200


def test_a_drain_lets_running_answers_finish(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with serving({"tiny": session}) as server:
        pace.hold()
        pace.let(1)
        with talking(server, max_tokens=9) as answer:
            closing = threading.Thread(target=server.door.service.models.close, args=(20,))
            closing.start()
            until(lambda: not server.batcher.alive)
            assert server.call("/health").status == 503 and server.call("/health/live").status == 200
            late = server.chat(max_tokens=1)
            assert late.status == 503 and late.json["error"]["code"] == "closing"
            pace.open()
            assert answer.read().endswith(b"[DONE]\n\n")
        closing.join(10)
        assert not closing.is_alive() and server.batcher.counts.cancelled == 0


def test_a_drain_ends(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with serving({"tiny": session}) as server, ThreadPoolExecutor(1) as pool:
        pace.hold()
        pace.let(1)
        with talking(server, max_tokens=9) as answer:
            whole = pool.submit(server.chat, max_tokens=3)
            until(lambda: server.batcher.counts.accepted == 3)
            closing = threading.Thread(target=server.door.service.models.close, args=(0.1,))
            closing.start()
            said = [line for line in answer.read().decode().split("\n\n") if line]
            assert json.loads(said[-1].removeprefix("data: "))["error"]["code"] == "closing"
            cut: Answer = whole.result()
            assert cut.status == 503 and cut.json["error"]["code"] == "closing"
            pace.open()
        closing.join(10)


def test_a_gpu_that_has_failed_for_good_is_said_by_health_and_in_the_log(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine on the fake GPU: one step breaks it, and every later call fails, as CUDA's does."""
    device, info = FakeDevice(size=1 << 22), engine_info(8, 4, 16)
    engine = FakeEngine(device, info, lambda known, masks: (1 + len(known) % 9, 0.9))
    variant = engine_variant(info, 64)
    backend = TrtBackend(engine, variant, MODEL, device)  # type: ignore[arg-type]
    on_gpu = Session(session.bundle, session.variant, backend, session.text)
    with serving({"tiny": on_gpu}) as server, caplog.at_level(logging.CRITICAL):
        assert server.call("/health").status == 200
        assert (
            server.call("/v1/completions", {"model": "tiny", "prompt": [1, 2], "max_tokens": 2}).status == 200
        )
        engine.breaks = True
        failed = server.call("/v1/completions", {"model": "tiny", "prompt": [1, 2], "max_tokens": 2})
        assert failed.status == 500
        until(lambda: not server.batcher.alive)
        health = server.call("/health")
        assert (health.status, health.json) == (503, {"status": "failed"})
        assert server.call("/health/live").status == 503
        late = server.call("/v1/completions", {"model": "tiny", "prompt": [1, 2], "max_tokens": 2})
        assert (late.status, late.json["error"]["code"]) == (503, "failed")
        faults = server.door.service.models.faults
        assert isinstance(faults["tiny"], DeviceLost), "with which the process ends, when it does"
    assert "this process cannot use the GPU any more: restart it" in caplog.text


# --- its log ---


@pytest.mark.parametrize("as_json", [True, False])
def test_the_log_has_numbers_and_no_secrets(
    as_json: bool, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    said = [{"role": "user", "content": "open sesame"}]
    with caplog.at_level(logging.DEBUG), serving({"tiny": session}, ServeOptions(keys=("k3y",))) as server:
        key = {"authorization": "Bearer k3y"}
        answer = server.chat(messages=said, max_tokens=8, headers=key)
        server.chat(messages=said, max_tokens=0, headers=key)
        server.chat(messages=[{"role": "open sesame", "content": "x"}], headers=key)
        server.chat(messages=said, max_tokens=8, regex="sesame(", headers=key)
        server.call("/v1/models?api_key=k3y", headers={"authorization": "Bearer sesame"})
        server.call("/v1/completions", {"prompt": [[1, 2], [3, 4, 5]], "n": 2, "temperature": 1}, headers=key)
        until(lambda: len([r for r in caplog.records if r.msg == "request"]) >= 6)
    lines = [Lines(as_json=as_json).format(record) for record in caplog.records]
    text = "\n".join(lines)
    for secret in ("sesame", "k3y", answer.json["choices"][0]["message"]["content"]):
        assert secret not in text, secret
    assert len(lines) == text.count("\n") + 1
    if as_json:
        told, several = [line for line in map(json.loads, lines) if line["message"] == "answer"]
        assert several["answers"] == 4 and several["prompt_tokens"] == 2 + 3, "as in usage"
        assert told["level"] == "info"
        assert told["tokens"] == 8 and told["outcome"] == "finished" and told["client"] == digest("k3y")
        statuses = [line["status"] for line in map(json.loads, lines) if line["message"] == "request"]
        assert statuses == [200, 400, 400, 400, 401, 200]


def test_a_line_of_the_log_stays_one_line() -> None:
    record = logging.LogRecord("mars_export", logging.INFO, "", 0, "a\nb \x1b[31m %s", ("\u2028",), None)
    record.fields = {"path": "/x\r\ny", "status": 200, "none": None}
    for as_json in (True, False):
        line = Lines(as_json=as_json).format(record)
        assert line.isascii() and line.isprintable() and "status" in line


def test_missing_file_descriptors_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio reports one moment without them about two thousand times."""
    loop, report = asyncio.new_event_loop(), Reports()
    error = OSError(errno.EMFILE, "Too many open files")
    for _ in range(2000):
        report(loop, {"message": "socket.accept() out of system resource", "exception": error})
    report(loop, {"message": "another problem"})
    loop.close()
    full = "no connection can be accepted (Too many open files); allow more open files"
    assert [record.getMessage() for record in caplog.records] == [full, "another problem"]


def test_options_say_what_is_wrong() -> None:
    with pytest.raises(SessionError, match=r"max_body.*\n?.*"):
        ServeOptions(max_body=0)
    for wrong in (
        {"request_timeout": 0}, {"ping": float("nan")}, {"drain_timeout": -1}, {"keys": ("",)},
        {"queue_timeout": True},
    ):  # fmt: skip
        with pytest.raises(SessionError):
            ServeOptions(**wrong)  # type: ignore[arg-type]
