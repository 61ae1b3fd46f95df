"""`mars-export serve` as a process: how it begins, what signals do, what it says to whom."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Named
from support.missing import need
from support.shell import run

from mars_export import MarsError

need("uvicorn", "serve")

from mars_export.runtime.serve import ServeOptions  # noqa: E402

BODY = json.dumps({"messages": [{"role": "user", "content": "open sesame"}], "max_tokens": 8})
LONG = json.dumps(json.loads(BODY) | {"tau": 1.0, "stream": True, "ignore_eos": True, "max_tokens": 480})


class Process:
    """The command, and what it wrote so far."""

    def __init__(self, *arguments: str) -> None:
        words = [sys.executable, "-m", "mars_export.cli", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def said(self, words: str) -> re.Match[str] | None:
        return re.search(words, "".join(self.lines))

    def wait_for(self, words: str) -> re.Match[str]:
        until = time.monotonic() + 60
        while (found := self.said(words)) is None:
            assert self.process.poll() is None and time.monotonic() < until, self.lines
            time.sleep(0.01)
        return found

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def started(*arguments: str) -> Iterator[tuple[Process, int]]:
    """A server that is ready, and its port."""
    process = Process(*arguments)
    try:
        port = int(process.wait_for(r"http://127\.0\.0\.1:(\d+)")[1])
        process.wait_for("ready")
        yield process, port
    finally:
        process.process.kill()
        process.end()


def call(port: int, path: str, body: str | None = None, key: str = "") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("GET" if body is None else "POST", path, body, headers)
    return connection.getresponse()


def chat(port: int, body: str, key: str = "") -> http.client.HTTPResponse:
    return call(port, "/v1/chat/completions", body, key)


def test_it_answers_drains_and_ends(bundles: Named) -> None:
    with started(str(bundles(MAIN)), "--log-format", "json", "--threads", "1") as (process, port):
        answer = chat(port, BODY)
        assert answer.status == 200 and json.loads(answer.read())["model"] == MAIN
        answer = chat(port, LONG)
        assert answer.readline().startswith(b"data: ")
        process.process.send_signal(signal.SIGTERM)
        process.wait_for("closing")
        rest = answer.read()
        assert rest.endswith(b"data: [DONE]\n\n") and b'"length"' in rest, "what ran was finished"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        assert process.end() == 0
        lines: list[Any] = [json.loads(line) for line in process.lines if line.startswith("{")]
        assert {"ready: " + MAIN, "answer"} <= {line["message"] for line in lines}
        assert not process.said("sesame|Traceback")


def test_it_has_the_name_and_the_key_that_were_chosen(
    bundles: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARS_API_KEY", "one two")
    arguments = ("--served-model-name", "org/my-model", "--threads", "1", "--max-body", "1M")
    with started(str(bundles(MAIN)), *arguments) as (process, port):
        process.process.send_signal(signal.SIGHUP)
        process.wait_for("no --api-key-file to read again")
        assert chat(port, BODY).status == 401
        listed = json.loads(call(port, "/v1/models", key="two").read())["data"]
        assert [model["id"] for model in listed] == ["org/my-model"]
        for name in ("org/my-model", "org%2Fmy-model"):
            assert json.loads(call(port, f"/v1/models/{name}", key="two").read())["id"] == "org/my-model"
    assert run("serve", bundles(MAIN), "--served-model-name", "a", "--served-model-name", "b").returncode == 2


def test_sighup_reads_the_keys_again(bundles: Named, tmp_path: Path) -> None:
    """New keys are accepted and old ones are not; a file that cannot be used changes nothing."""
    keys = tmp_path / "keys"
    keys.write_text("alpha\nbeta\n")
    with started(str(bundles(MAIN)), "--threads", "1", "--api-key-file", str(keys)) as (process, port):
        assert [call(port, "/v1/models", key=key).status for key in ("alpha", "gamma")] == [200, 401]
        for text, said, statuses in (
            ("gamma\n", "1 API keys", [401, 200]),
            ("# none\n", "API keys are unchanged: .*no key in it", [401, 200]),
            ("alpha\ngamma\n", "2 API keys", [200, 200]),
        ):
            keys.write_text(text)
            process.process.send_signal(signal.SIGHUP)
            process.wait_for(said)
            assert [call(port, "/v1/models", key=key).status for key in ("alpha", "gamma")] == statuses
        assert call(port, "/health/live").status == call(port, "/health/ready").status == 200
        assert not process.said("alpha|gamma"), "keys are not logged"


def test_options_come_from_the_command_line_then_variables_then_the_file(
    bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mars.toml"
    file.write_text(
        f"bundles = ['{bundles(MAIN)}']\nthreads = 1\nmax-new-tokens = 2\nserved-model-name = 'file'\n"
        "api-key = ['one', 'two']\nsafe = true\nkv-bytes = '64M'\nlog-format = 'json'\n"
    )
    monkeypatch.setenv("MARS_SERVED_MODEL_NAME", "variable")
    monkeypatch.setenv("MARS_MAX_NEW_TOKENS", "3")
    with started("--config", str(file), "--max-new-tokens", "4") as (process, port):
        [entry] = json.loads(call(port, "/v1/models", key="two").read())["data"]
        assert entry["id"] == "variable" and call(port, "/v1/models").status == 401
        answer = chat(port, json.dumps({**json.loads(BODY), "max_tokens": 5}), "one")
        assert answer.status == 400 and b"4" in answer.read(), "of the command line"
        assert any(line.startswith("{") for line in process.lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_rows = 3\nprot = 1", "unknown max_rows, prot; keys are names of options"),
        ("config = 'other.toml'", "unknown config"),
        ("[limits]\nmax-rows = 3", "unknown limits"),
        ("port = 'x'", "Invalid value for '--port'"),
        ("port = [1, 2]", "Invalid value for '--port'"),
        ("port = true", "Invalid value for '--port'"),
        ("port = 80.5", "Invalid value for '--port'"),
        ("safe = 'perhaps'", "Invalid value for '--safe"),
        ("kv-bytes = '4X'", "not '4X'"),
        ("log-level = {}", "--log-level"),
        ("api-key = []", "api-key: the value is empty"),
        ("cors-origin = ['']", "Invalid value for '--cors-origin': the value is empty"),
        ("port 80", "not a TOML file"),
        ("\udcff", "not a TOML file"),
    ],
)
def test_mistakes_in_the_file_are_told(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mars.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = run("serve", tmp_path / "none", "--config", file)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.replace("│", " ").split()), done.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("API_KEY", " "), ("API_KEY_FILE", ""), ("CORS_ORIGIN", " "), ("PORT", "")]
)
def test_an_empty_variable_is_an_error(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MARS_API_KEY=${UNSET} would open the server to everybody."""
    monkeypatch.setenv(f"MARS_{name}", value)
    done = run("serve", "none")
    assert done.returncode == 2 and f"the variable MARS_{name} is empty" in done.stderr


def test_a_second_signal_is_the_end(bundles: Named) -> None:
    with started(str(bundles(MAIN)), "--threads", "1", "--drain-timeout", "50") as (process, port):
        answer = chat(port, LONG)
        assert answer.readline().startswith(b"data: ")
        process.process.send_signal(signal.SIGTERM)
        process.wait_for("closing")
        process.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.end() in (0, 128 + signal.SIGTERM)  # the answer may have been quicker
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{bundle}", "--port", "{taken}"], "(Address already in use); choose another --port"),
        (["{empty}", "--host", "0.0.0.0"], "anyone who can reach 0.0.0.0:0 can use this server"),
        (["{bundle}", "{bundle}"], "have the same name"),
        (["{bundle}", "--request-timeout", "0"], "request_timeout must be"),
        (["{bundle}", "--api-key-file", "{empty}"], "no key in it"),
        (["{empty}"], "not a bundle"),
        (["hub:me"], "hub:OWNER/NAME is expected"),
        (["hub:../../x/y"], "hub:OWNER/NAME is expected"),
    ],
)
def test_mistakes_are_told_at_once(arguments: list[str], words: str, bundles: Named, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"bundle": str(bundles(MAIN)), "taken": str(taken.getsockname()[1]), "empty": str(empty)}
        done = run("serve", "--port", "0", *(word.format(**known) for word in arguments))
    is_option = any(part in words for part in ("same name", "request_timeout", "no key"))
    assert done.returncode == (2 if is_option else 1), done.stderr
    assert words in done.stderr, done.stderr


def test_replicas_need_ray(bundles: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to --ray is refused without it, and --ray says what is missing."""
    path = str(bundles("llama"))
    assert run("serve", path, "--replicas", "2").returncode == 2
    assert run("serve", path, "--ray", "--replicas", "2:1").returncode == 2
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run("serve", path, "--ray", "--port", "0")
    assert done.returncode == 1
    assert "pip install 'mars-export[ray]'" in " ".join(done.stderr.split())


def test_a_directory_of_bundles_is_served(bundles: Named, tmp_path: Path) -> None:
    for name in (MAIN, "qwen2"):
        (tmp_path / f"{name}.bundle").symlink_to(bundles(name))
    (tmp_path / "notes").mkdir()
    with started(str(tmp_path), "--max-models", "1", "--threads", "1") as (process, port):
        for name in (MAIN, "qwen2", MAIN):
            answer = chat(port, json.dumps({"model": name, **json.loads(BODY)}))
            assert (answer.status, json.loads(answer.read())["model"]) == (200, name)
        assert process.said(f"closing {MAIN}")


@pytest.mark.more
def test_traces(bundles: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    """A span of each request, without its text."""
    need("opentelemetry.instrumentation.asgi", "traces")
    sent: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        with started(str(bundles(MAIN)), "--traces") as (process, port):
            assert chat(port, BODY).read() and call(port, "/health").status == 200
            process.process.send_signal(signal.SIGTERM)
            assert process.end() == 0
        collector.shutdown()
    spans = b"".join(sent)
    assert b"/v1/chat/completions" in spans and b"/health" not in spans and b"sesame" not in spans


def test_only_the_default_number_of_rows_gives_way_to_an_engine_s(
    bundles: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ServeOptions] = []

    def new_app(_: Any, options: ServeOptions) -> None:
        given.append(options)
        raise MarsError("enough")

    monkeypatch.setattr("mars_export.runtime.serve.app", new_app)
    for words in ((), ("--max-rows", "8"), ("--max-rows", "3")):
        run("serve", bundles(MAIN), "--port", "0", *words)
    assert [(o.limits.max_rows, o.fits_rows) for o in given] == [(8, True), (8, False), (3, False)]
