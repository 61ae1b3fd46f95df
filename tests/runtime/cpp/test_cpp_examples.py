"""The C++ examples, as built: the README's program, and the HTTP service under several clients and bad input."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.cabi import ROOT, build
from support.fixtures import Named

from mars_export.runtime import GenerationConfig, Session

ASK = {"messages": [{"role": "user", "content": "the onion"}], "max_new_tokens": 24}


def start(bundle: Path) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [build() / "examples/cpp_service/service", bundle, "0", "1"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = re.search(r":(\d+)$", process.stdout.readline().strip())
    assert found is not None, "the service did not start"
    return process, int(found[1])


@pytest.fixture(scope="module")
def port(bundles: Named) -> Iterator[int]:
    process, number = start(bundles("llama"))
    yield number
    process.terminate()
    assert process.wait(60) == 0


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
    done = subprocess.run(
        [program, bundles("llama"), "the onion"], capture_output=True, text=True, check=False, timeout=120
    )
    wanted = sessions("llama").generate(ASK["messages"], GenerationConfig(tau=0.95, max_new_tokens=32))  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(wanted.text + "\n")
    assert (
        subprocess.run(
            [program, "/no/such/bundle", "x"], capture_output=True, check=False, timeout=60
        ).returncode
        == 1
    )


def test_answers_of_several_clients_at_once(port: int, sessions: Callable[[str], Session]) -> None:
    wanted = {
        t: sessions("llama").generate(ASK["messages"], GenerationConfig(tau=t, max_new_tokens=24))
        for t in (0.3, 1.0)
    }  # type: ignore[arg-type]

    def ask(tau: float) -> None:
        status, text = post(port, {**ASK, "tau": tau})
        answer = json.loads(text)
        assert status == 200
        assert (answer["text"], answer["forwards"]) == (wanted[tau].text, wanted[tau].stats.forwards)
        status, text = post(port, {**ASK, "tau": tau, "stream": True})
        *events, last = [json.loads(line) for line in text.splitlines()]
        assert "".join(event["text"] for event in events) == last["text"] == wanted[tau].text

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, [0.3, 1.0] * 6))


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
        ({"prompt": "a", "max_new_tokens": 10**6}, 400, "max_new_tokens is at most"),
        ({"prompt": "a" * 5000}, 400, "this bundle's context holds"),
        ({"messages": [{"role": "user"}]}, 400, "list of {role, content}"),
        ({"prompt": "a" * 2_000_000}, 413, ""),
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it_gracefully(number: int, bundles: Named) -> None:
    process, port = start(bundles("llama"))
    assert post(port, ASK)[0] == 200
    process.send_signal(number)
    assert process.wait(60) == 0
