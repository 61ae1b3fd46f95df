"""Hostile clients of the C++ service, together with normal ones. There must be no crash, normal answers must
be right and nearly as fast, and memory must not grow.

python benchmarks/attack/service.py BUNDLE --requests 2000     # needs build/cpp/release; prints a JSON line

The normal clients run alone first, then together with each of KINDS in turn. It needs a quiet machine,
because `--most-slower` is a bound on times.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import random
import re
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build/cpp/release/examples/cpp_service/service"
PATHS = ("/v1/chat/completions", "/v1/completions")
CHAT, TEXT = PATHS
TIMEOUT = 60.0
ANSWERS = {200, 400, 404, 405, 408, 411, 413, 415, 429, 431, 503}

Kind = Callable[[int, random.Random], bytes]
"""(port, dice) -> the first bytes of what came back, if anything did"""


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode("latin-1")


def whole(path: str, body: bytes, *lines: str) -> bytes:
    return head(path, f"Content-Length: {len(body)}", *lines) + body


def told(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """What comes back for these bytes, until the service closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as client:
        with suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
                sleep(pause)
        seen = b""
        with suppress(ConnectionError):
            while piece := client.recv(65536):
                seen = (seen + piece)[:4096]
        return seen


def left(port: int, data: bytes, *, abruptly: bool, after: int = 0) -> bytes:
    """A client that goes: before an answer, or behind its first bytes; with a reset, where it is abrupt."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as client:
        client.sendall(data)
        with suppress(ConnectionError):
            seen = client.recv(after) if after else b""
        if abruptly:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return seen


def asked(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "the onion"}], **fields}


def body(**fields: Any) -> bytes:
    return json.dumps(asked(**fields)).encode()


def deep(dice: random.Random) -> bytes:
    left_side, right = dice.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = dice.choice([33, 1000, 100_000])
    inner = left_side * depth + b"1" + right * depth
    return dice.choice([inner, b'{"messages": ' + inner + b"}", b'{"stop": ' + inner + b', "prompt": "a"}'])


LONG = {"max_tokens": 400, "ignore_eos": True, "tau": 1.0}
WRONG = ["x" * 300, -1, 1e308, True, [], {}, [[]], "\ud800", 2**63]
FIELDS = ("max_tokens", "tau", "temperature", "stop", "stream", "n", "seed", "messages", "model", "window")

LIES = ("Content-Length: -1", "Content-Length: 9e9", "Content-Length: 5\r\nContent-Length: 7")


def changed(data: bytes, dice: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(dice.randint(1, 6)):
        made[dice.randrange(len(made))] = dice.randrange(256)
    return bytes(made) + b"\r\n\r\n"


def posted(port: int, data: bytes, path: str = CHAT) -> bytes:
    return told(port, whole(path, data))


def spelled(dice: random.Random) -> bytes:
    return b'{"messages": [{"role": "user", "content": "' + dice.randbytes(200) + b'"}]}'


def steered(port: int, dice: random.Random) -> bytes:
    name, text = "x" * dice.choice([1, 5000]), dice.choice([b"{}", b'{"tau": -1}', b"["])
    return posted(port, text, "/v1/mars/streams/" + name)


ENDLESS = json.dumps({"prompt": "the onion " * 20_000}).encode()
BOMB = gzip.compress(b" " * 10_000_000)
RANGES = "Range: bytes=" + ",".join(["0-1"] * 1000)
CHUNKS = [b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 64
FOREVER = body(**LONG)
FOREVER_STREAMED = body(**LONG, stream=True)

KINDS: dict[str, Kind] = {
    "deep JSON": lambda port, dice: posted(port, deep(dice), dice.choice(PATHS)),
    "a chunked flood": lambda port, _: told(port, head(CHAT, "Transfer-Encoding: chunked"), *CHUNKS),
    "gzip": lambda port, _: told(port, whole(CHAT, BOMB, "Content-Encoding: gzip")),
    "a slow head": lambda port, _: told(port, *[bytes([b]) for b in head(CHAT)[:20]], pause=0.02),
    "a slow body": lambda port, _: told(port, head(CHAT, "Content-Length: 100"), *[b" "] * 20, pause=0.02),
    "silence": lambda port, _: left(port, b"", abruptly=False),
    "a huge header": lambda port, _: told(port, head(CHAT, "A: " + "b" * 2**20)),
    "headers without end": lambda port, _: told(port, head(CHAT, *["A: b"] * 20_000)),
    "ranges": lambda port, _: told(port, head("/health", RANGES, method="GET")),
    "invalid UTF-8": lambda port, dice: posted(port, spelled(dice)),
    "wrong types": lambda port, dice: posted(port, body(**{dice.choice(FIELDS): dice.choice(WRONG)})),
    "too many tokens": lambda port, dice: posted(port, body(max_tokens=dice.choice([10**9, 2**70]))),
    "a prompt beyond the context": lambda port, _: posted(port, ENDLESS, TEXT),
    "a body beyond the limit": lambda port, _: posted(port, b"x" * 2**22, TEXT),
    "lengths that lie": lambda port, dice: told(port, head(CHAT, dice.choice(LIES))),
    "no HTTP": lambda port, dice: told(port, dice.randbytes(300) + b"\r\n\r\n"),
    "a stream that is left": lambda port, dice: left(
        port, whole(CHAT, FOREVER_STREAMED), abruptly=dice.random() < 0.5, after=200
    ),
    "an answer that is left": lambda port, dice: left(
        port, whole(CHAT, FOREVER), abruptly=dice.random() < 0.5
    ),
    "many answers at once": lambda port, _: posted(port, body(n=16, max_tokens=8, temperature=1.0)),
    "steering of nobody": steered,
    "bytes of a request, changed": lambda port, dice: told(
        port, changed(whole(CHAT, body(max_tokens=4)), dice)
    ),
}  # fmt: skip


@contextmanager
def service(bundle: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The running service and its port. Ends it, and sees that it ends well."""
    process = subprocess.Popen([PROGRAM, bundle, "0", "1", *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)$", process.stdout.readline().strip())
        assert found is not None, "the service did not start"
        yield process, int(found[1])
        process.terminate()
        assert process.wait(30) == 0, f"it ended with {process.returncode}"
    finally:
        process.kill()
        process.wait()


def resident(process: subprocess.Popen[str]) -> int:
    """Bytes of memory that it has now."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def honest(
    port: int, number: int, rounds: int, is_over: Callable[[], bool]
) -> tuple[list[float], Counter[str]]:
    """One client that asks at least `rounds` times, and until it is over; where there is no room, again.

    Returns how long each answer took from its first try on, and what it got.
    """
    seconds: list[float] = []
    outcomes = Counter[str]()
    text = json.dumps(asked(max_tokens=24, tau=1.0, stream=number % 2 == 0))
    while len(seconds) < rounds or not is_over():
        began = monotonic()
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
            try:
                connection.request("POST", CHAT, text)
                response = connection.getresponse()
                status, data = response.status, response.read().decode()
            except OSError as error:
                outcomes[type(error).__name__] += 1
                sleep(0.05)
                continue
            finally:
                connection.close()
            outcomes[str(status)] += 1
            if status == 200:
                break
            assert status in (429, 503) and response.headers["retry-after"], (status, data)
            sleep(0.05)
        outcomes["words " + answer_of(data)] += 1
        seconds.append(monotonic() - began)
    return seconds, outcomes


def answer_of(data: str) -> str:
    """The text of an answer, whole or streamed."""
    if not data.startswith("data: "):
        return str(json.loads(data)["choices"][0]["message"]["content"])
    *events, done, _ = data.split("\n\n")
    assert done == "data: [DONE]", done
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: ")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def p95(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))]


def ask_all(
    port: int, clients: int, rounds: int, is_over: Callable[[], bool]
) -> tuple[list[float], Counter[str]]:
    seconds: list[float] = []
    outcomes = Counter[str]()
    with ThreadPoolExecutor(clients) as pool:
        for some, what in pool.map(lambda i: honest(port, i, rounds, is_over), range(clients)):
            seconds += some
            outcomes += what
    return seconds, outcomes


def attack(
    bundle: Path, requests: int, clients: int = 16, at_once: int = 12, rounds: int = 6, seed: int = 1
) -> dict[str, Any]:
    """What was seen; raises AssertionError for an answer that is none."""
    statuses = Counter[str]()
    names = list(KINDS)

    def strike(number: int) -> None:
        name, dice = names[number % len(names)], random.Random(seed * 10**6 + number)
        try:
            seen = KINDS[name](port, dice)
        except OSError as error:  # it may be told to go before it has said all
            statuses[f"{name}: {type(error).__name__}"] += 1
            return
        status = int(seen[9:12]) if seen.startswith(b"HTTP/1.1 ") else 0
        assert status == 0 or status in ANSWERS, (name, seen[:300])
        statuses[f"{name}: {status}"] += 1

    with service(bundle, "--waiting", "64") as (process, port):
        ask_all(port, clients, 2, lambda: True)  # warm
        quiet, wanted = ask_all(port, clients, rounds, lambda: True)
        before, over = resident(process), Event()
        thread = Thread(target=lambda: found.append(ask_all(port, clients, rounds, over.is_set)))
        found: list[tuple[list[float], Counter[str]]] = []
        thread.start()
        try:
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(strike, range(requests)))
        finally:
            over.set()
            thread.join()
        [(disturbed, got)] = found
        assert process.poll() is None, f"the service ended with {process.returncode}"
        sleep(1)
        after = resident(process)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        connection.request("GET", "/health")
        state = json.loads(connection.getresponse().read())
        connection.close()
    words = {key for key in wanted if key.startswith("words ")}
    return {
        "requests": requests,
        "kinds": len(KINDS),
        "honest": len(disturbed),
        "wrong answers": sum(n for key, n in got.items() if key.startswith("words ") and key not in words),
        "p95 quiet": round(p95(quiet), 4),
        "p95 disturbed": round(p95(disturbed), 4),
        "slower": round(p95(disturbed) / p95(quiet), 3),
        "memory": round(after / before, 3),
        "left running": state["running"] + state["waiting"],
        "honest outcomes": {k: n for k, n in got.items() if not k.startswith("words ")},
        "hostile outcomes": dict(sorted(statuses.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--honest", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-slower", type=float, default=3.0)
    parser.add_argument("--most-memory", type=float, default=1.2)
    given = parser.parse_args()
    seen = attack(given.bundle, given.requests, given.honest, seed=given.seed, rounds=20)
    print(json.dumps(seen, ensure_ascii=False))
    good = seen["slower"] <= given.most_slower and seen["memory"] <= given.most_memory
    good = good and seen["wrong answers"] == 0 and seen["left running"] == 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
