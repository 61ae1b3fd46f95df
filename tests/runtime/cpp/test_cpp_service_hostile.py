"""Requests that attack the C++ example of a service: refused in few bytes and little memory."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.cpp_service import ASK, HEAD, health, post, raw


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
    assert (status, json.loads(text)["error"]["message"]) == (400, "the body has lists nested too deep")
    assert health(port)["status"] == "ok"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + b"x" * 2**20 + b"\r\n") * 64, 411),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n" + b"x" * 9, 415),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", 413),
        (HEAD + b"Content-Length: 2000000\r\n\r\n" + b"a" * 2_000_000, 413),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (HEAD + b"A: b\r\n" * 101 + b"\r\n", 431),
        (HEAD + b"A: b\r\n" * 500_000, 431),
        (HEAD + b"A: " + b"b" * 2**25, 431),
        (HEAD + b": b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n" + b"Range: bytes=0-1,0-1,0-1\r\n" * 90 + b"\r\n", 200),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /v1/completions HTTP/1.1\r\n\r\n", 405),
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
