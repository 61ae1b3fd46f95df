"""The C++ example of a service, started, and what its clients send and read."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from support.cabi import build

ASK = {"messages": [{"role": "user", "content": "the onion"}], "max_tokens": 24, "masks": "full"}
LONG = {"prompt": "the onion " * 400, "tau": 1, "max_tokens": 1000}  # much work for a small model
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def start(bundle: Path, *options: str) -> tuple[subprocess.Popen[str], int]:
    """The process, and the port that it found."""
    program = build() / "examples/cpp_service/service"
    process = subprocess.Popen([program, bundle, "0", "1", *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r":(\d+)$", process.stdout.readline().strip())
    assert found is not None, "the service did not start"
    return process, int(found[1])


def call(port: int, path: str, body: Any = None, timeout: float = 120) -> tuple[int, str]:
    """Status and body of an answer to GET, with a body to POST."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)) as connection:
        words = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, words)
        response = connection.getresponse()
        return response.status, response.read().decode()


def post(port: int, body: Any) -> tuple[int, str]:
    """Status and body of an answer: to a completion where the body has a prompt, else to a chat."""
    path = "/v1/completions" if isinstance(body, dict) and "prompt" in body else "/v1/chat/completions"
    return call(port, path, body)


def text_of(answer: str) -> str:
    """The text of an answer, complete or streamed."""
    if answer.startswith("{"):
        choice = json.loads(answer)["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]  # type: ignore[no-any-return]
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


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
    status, text = call(port, "/health", timeout=timeout)
    assert status == 200
    return json.loads(text)  # type: ignore[no-any-return]
