"""The C++ examples, as built: the README's program, and the HTTP service under many clients and attacks."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import pytest
from support.cabi import build
from support.fixtures import Named
from support.paths import ROOT

from mars_export.runtime import GenerationConfig, Session
from mars_export.runtime.bundle.open import open_bundle, write_manifest

ASK = {"messages": [{"role": "user", "content": "the onion"}], "max_new_tokens": 24, "window": "full"}
LONG = {"prompt": "the onion " * 400, "tau": 1, "max_new_tokens": 1000}  # much work for a small model


def start(bundle: Path, *options: str) -> tuple[subprocess.Popen[str], int]:
    program = build() / "examples/cpp_service/service"
    process = subprocess.Popen([program, bundle, "0", "1", *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r":(\d+)$", process.stdout.readline().strip())
    assert found is not None, "the service did not start"
    return process, int(found[1])


@pytest.fixture(scope="module")
def service(bundles: Named) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process, number = start(bundles("llama"))
    yield process, number
    process.terminate()
    assert process.wait(60) == 0


@pytest.fixture(scope="module")
def port(service: tuple[subprocess.Popen[str], int]) -> int:
    return service[1]


@pytest.fixture(scope="module")
def endless(bundles: Named, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a long context, whose answers never end by themselves."""
    directory = tmp_path_factory.mktemp("endless") / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    manifest = open_bundle(directory).manifest
    write_manifest(
        directory,
        replace(
            manifest,
            model=replace(manifest.model, context_length=8192),
            tokens=replace(manifest.tokens, eos=()),
        ),
    )
    return directory


def post(port: int, body: Any) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/generate", body if isinstance(body, (bytes, str)) else json.dumps(body))
    response = connection.getresponse()
    status, text = response.status, response.read().decode()
    connection.close()
    return status, text


def test_the_readme_shows_the_program_that_is_built(
    bundles: Named, sessions: Callable[[str], Session]
) -> None:
    (snippet,) = re.findall(
        r"^```cpp\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S | re.M
    )
    assert snippet == (ROOT / "examples/cpp_embed/embed.cpp").read_text(encoding="utf-8")
    program = build() / "examples/cpp_embed/embed"
    config = GenerationConfig(max_new_tokens=32)
    for request in (f"light {i}" for i in range(300)):
        wanted = sessions("llama").generate([{"role": "user", "content": request}], config)
        if len(wanted.text) > 3:
            break
    else:
        raise AssertionError("no request is answered")
    done = subprocess.run(
        [program, bundles("llama"), request], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    text, figure = done.stdout.rsplit("\n", 2)[:2]
    assert text == wanted.text  # in every window
    assert re.fullmatch(r"[\d.]+ tokens/forward", figure)
    assert (
        subprocess.run(
            [program, "/no/such/bundle", "x"], capture_output=True, check=False, timeout=60
        ).returncode
        == 1
    )


def test_answers_of_several_clients_at_once(port: int, sessions: Callable[[str], Session]) -> None:
    wanted = {
        t: sessions("llama").generate(ASK["messages"], GenerationConfig(tau=t, max_new_tokens=24))
        for t in (0.3, 1.0, None)
    }

    def ask(tau: float | None) -> None:
        knob = {"exact": True} if tau is None else {"tau": tau}
        status, text = post(port, {**ASK, **knob})
        answer = json.loads(text)
        assert status == 200
        assert (answer["text"], answer["forwards"]) == (wanted[tau].text, wanted[tau].stats.forwards)
        status, text = post(port, {**ASK, **knob, "stream": True})
        *events, last = [json.loads(line) for line in text.splitlines()]
        assert "".join(event["text"] for event in events) == last["text"] == wanted[tau].text

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, [0.3, 1.0, None] * 4))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("{", 400, "the body must be a JSON object"),
        (b"\xff\xfe", 400, "the body must be a JSON object"),
        ("[]", 400, "the body must be a JSON object"),
        ({}, 400, "give either prompt or messages"),
        ({"prompt": "a", "messages": []}, 400, "give either prompt or messages"),
        ({"prompt": 1}, 400, "prompt has a wrong type: 1"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": "a", "temprature": 1}, 400, "unknown field temprature"),
        ({"prompt": "a", "tau": "high"}, 400, "tau has a wrong type"),
        ({"prompt": "a", "tau": -1}, 400, "tau must be a number of 0 or more"),
        ({"prompt": "a", "tau": 0.5, "exact": True}, 400, "exact and tau exclude each other"),
        ({"prompt": "a", "exact": 1}, 400, "exact has a wrong type"),
        ({"prompt": "a", "max_new_tokens": 10**6}, 400, "max_new_tokens is at most"),
        ({"prompt": "a" * 5000}, 400, "this bundle's context holds"),
        ({"messages": [{"role": "user"}]}, 400, "list of {role, content}"),
        ({"prompt": "a", "window": 0}, 400, "window must be auto, full or an integer of 1 or more, not 0"),
        ({"prompt": "a", "window": ["full"]}, 400, "not a list"),
        ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop: at most 16 here"),
        ({"prompt": "a", "stop": [1]}, 400, "stop has a wrong type: 1"),
        ({"prompt": "a" * 2_000_000}, 413, "larger than 1048576 bytes"),
    ],
)
def test_mistakes_of_a_client(port: int, body: Any, status: int, message: str) -> None:
    try:
        made, text = post(port, body)
    except (BrokenPipeError, ConnectionResetError):
        assert status == 413  # it hung up before the whole body was sent
        return
    assert made == status
    assert message in text


def test_a_client_that_goes_away_and_one_that_says_nothing(port: int) -> None:
    for text in (b"", b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(text)
    assert post(port, ASK)[0] == 200


def raw(port: int, data: bytes, timeout: float = 60) -> bytes:
    """What the service sends back for these bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as client:
        with suppress(ConnectionError):  # it may have answered and hung up before all was sent
            client.sendall(data)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionError):
        while piece := client.recv(65536):
            data += piece
    return data


def health(port: int, timeout: float = 5) -> dict[str, int]:
    """What the service says of itself."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert response.status == 200
    return json.loads(response.read())  # type: ignore[no-any-return]


def memory(process: subprocess.Popen[str]) -> int:
    """The most memory that a process has had, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


DEEP = b"[" * 400_000 + b"]" * 400_000


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        b"[" * 1_000_000,
        b'{"tau": ' + DEEP + b', "prompt": "a"}',
        b'{"prompt": ' + DEEP + b"}",
        b'{"messages": ' + DEEP + b"}",
        b'{"messages": [{"role": "user", "content": ' + DEEP + b"}]}",
        b'{"stop": ' + DEEP + b', "prompt": "a"}',
        b'{"a":' * 150_000 + b"1" + b"}" * 150_000,
    ],
    ids=["lists", "open", "tau", "prompt", "messages", "content", "stop", "objects"],
)
def test_deeply_nested_bodies(port: int, body: bytes) -> None:
    status, text = post(port, body)
    assert (status, json.loads(text)["error"]["message"]) == (400, "lists nested too deep")
    assert health(port)["status"] == "ok"


HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + b"x" * 2**20 + b"\r\n") * 64, 411),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n" + b"x" * 9, 415),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", 413),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (HEAD + b"A: b\r\n" * 101 + b"\r\n", 431),
        (HEAD + b"A: b\r\n" * 500_000, 431),
        (HEAD + b"A: " + b"b" * 2**25, 431),
        (HEAD + b": b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n" + b"Range: bytes=0-1,0-1,0-1\r\n" * 90 + b"\r\n", 200),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /generate HTTP/1.1\r\n\r\n", 405),
        (b"DELETE /health HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01" + bytes(200) + b"\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /health HTTP/2.0\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_requests_that_attack(service: tuple[subprocess.Popen[str], int], data: bytes, status: int) -> None:
    process, port = service
    before = memory(process)
    answer = raw(port, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert len(answer) < 1000
    assert memory(process) < before + 2**24
    assert post(port, ASK)[0] == 200


def test_a_client_that_waits_for_100_continue_and_one_without_chunks(port: int) -> None:
    body = json.dumps({**ASK, "stream": True}).encode()
    head = b"POST /generate HTTP/1.%d\r\nContent-Length: %d\r\n%s\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(head % (1, len(body), b"Expect: 100-continue\r\n"))
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        chunked = read_all(client)
    assert b"Transfer-Encoding: chunked" in chunked and chunked.endswith(b"}\n\r\n0\r\n\r\n")
    plain = raw(port, head % (0, len(body), b"") + body)
    assert b"Transfer-Encoding" not in plain
    lines = plain.partition(b"\r\n\r\n")[2].splitlines()
    assert json.loads(lines[-1])["text"] == "".join(json.loads(line)["text"] for line in lines[:-1])


def test_an_answer_that_nobody_waits_for_is_not_computed(endless: Path) -> None:
    process, port = start(endless)
    whole = json.loads(post(port, LONG)[1])["tokens"]
    assert whole == 1000
    for stream in (False, True):
        before = health(port)["tokens"]
        body = json.dumps({**LONG, "stream": stream}).encode()
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        sleep(0.5)
        quiet = health(port)
        assert (quiet["running"], quiet["waiting"]) == (0, 0)
        sleep(1)
        assert health(port) == quiet  # it is over
        assert quiet["tokens"] - before < whole  # of four
    process.terminate()
    assert process.wait(60) == 0


def test_silent_and_slow_clients_take_nothing_from_the_others(bundles: Named) -> None:
    process, port = start(bundles("llama"))
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(400)
        ]
        dripping = Event()

        def drip() -> None:
            for i in range(10**6):
                for client in clients[::4]:
                    with suppress(OSError):
                        client.sendall(HEAD[i % len(HEAD) :][:1])
                if dripping.wait(0.2):
                    return

        thread = Thread(target=drip)
        thread.start()
        try:
            for _ in range(5):
                begun = monotonic()
                assert health(port)["status"] == "ok"
                assert post(port, ASK)[0] == 200
                assert monotonic() - begun < 5
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            dripping.set()
            thread.join()


def test_more_clients_than_there_are_places(endless: Path) -> None:
    process, port = start(endless)
    with ThreadPoolExecutor(65) as pool:
        asked = [pool.submit(post, port, LONG) for _ in range(64)]
        sleep(0.2)
        begun = monotonic()
        assert health(port)["status"] == "ok"
        assert monotonic() - begun < 2
        answers = [one.result() for one in asked]
    texts = {json.loads(text)["text"] for status, text in answers if status == 200}
    assert len(texts) == 1
    statuses = [status for status, _ in answers]
    # 8 compute, 16 wait, the others are told at once; rows that are not yet taken are free all the same.
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 24
    assert statuses.count(429) > 0
    refused = [json.loads(text)["error"] for status, text in answers if status == 429]
    assert {error["type"] for error in refused} == {"rate_limit_error"}
    assert health(port)["refused"] == len(refused)
    assert post(port, ASK)[0] == 200
    process.terminate()
    assert process.wait(60) == 0


def test_addresses_take_turns_where_there_are_no_keys(endless: Path) -> None:
    process, port = start(endless, "--rows", "2", "--rows-per-client", "1", "--waiting", "3")
    never_ends = json.dumps({"prompt": "the onion", "tau": 1, "max_new_tokens": 1000, "stream": True})

    def ask(address: str, body: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60, source_address=(address, 0))
        connection.request("POST", "/generate", body)
        return connection

    flood = [ask("127.0.0.2", never_ends) for _ in range(4)]
    until = monotonic() + 20
    while (now := health(port))["running"] + now["waiting"] < 4:
        assert monotonic() < until
        sleep(0.01)
    assert ask("127.0.0.2", json.dumps(ASK)).getresponse().status == 429, "the other row is none of its"
    other = ask("127.0.0.3", json.dumps(ASK)).getresponse()
    assert other.status == 200 and json.loads(other.read())["tokens"] > 0
    now = health(port)
    assert (now["running"], now["waiting"]) == (1, 3), "nobody of the others has ended"
    for connection in flood:
        connection.close()
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_under_load_end_every_answer_properly(number: int, endless: Path) -> None:
    process, port = start(endless, "--grace", "0", "--waiting", "32")
    head = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s"
    with ExitStack() as stack:
        clients = []
        for i in range(20):  # 8 run, the others wait in line
            body = json.dumps({**LONG, "stream": i % 2 == 0}).encode()
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            client.sendall(head % (len(body), body))
            clients.append(client)
        assert clients[0].recv(1)  # the first answer has begun
        process.send_signal(number)
        answers = [read_all(client) for client in clients]
    assert process.wait(30) == 0
    answers[0] = b"H" + answers[0]
    reasons = []
    for answer in answers:
        if answer.startswith(b"HTTP/1.1 503"):
            assert b"Retry-After: 1\r\n" in answer
            continue
        assert answer.startswith(b"HTTP/1.1 200"), answer[:100]
        if b"chunked" in answer:
            assert answer.endswith(b"\r\n0\r\n\r\n")
            answer = answer[: -len(b"\r\n0\r\n\r\n")]
        reasons.append(json.loads(answer.splitlines()[-1])["finish_reason"])
    assert "cancelled" in reasons


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it_gracefully(number: int, bundles: Named) -> None:
    process, port = start(bundles("llama"))
    assert post(port, ASK)[0] == 200
    process.send_signal(number)
    assert process.wait(60) == 0
