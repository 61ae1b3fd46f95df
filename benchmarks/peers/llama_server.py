"""llama.cpp's own server (llama-server), with or without n-gram speculation: greedy, each prompt as token ids
and read anew.
"""

from __future__ import annotations

import atexit
import http.client
import json
import socket
import subprocess
import sys
import time
from time import perf_counter
from typing import Any

from peers.protocol import Answer, Reply, Request, serve

SECONDS_TO_START = 60


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    threads = str(options["threads"])
    command = [options["server"], "-m", options["model"], "-c", str(options["context"]), "-np", "1"]
    command += ["-t", threads, "-tb", threads, "--host", "127.0.0.1", "--no-webui", *options["flags"]]
    server = Server(command)
    seen: set[tuple[int, ...]] = set()

    def answer(request: Request) -> Reply:
        nonlocal server
        prompt, limit = request.prompt, request.limit
        if tuple(prompt) in seen:  # n-grams of an earlier round would be this round's whole answers
            server.close()
            server = Server(command)
            seen.clear()
        seen.add(tuple(prompt))
        body = {"prompt": prompt, "n_predict": limit, "temperature": 0, "top_k": 1, "repeat_penalty": 1}
        body |= {"cache_prompt": False, "stream": True, "return_tokens": True}
        begun = perf_counter()
        new: list[int] = []
        first_seconds = 0.0
        for line in server.post("/completion", body):
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                first_seconds = first_seconds or perf_counter() - begun
                new += event["tokens"] if not event["stop"] else []
        return Reply(new, perf_counter() - begun, first_seconds, 1, None)

    shown = subprocess.run(
        [options["server"], "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout  # CUDA's lines may be before it
    return answer, next(line for line in shown.splitlines() if line.startswith("version"))


class Server:
    """A running llama-server."""

    def __init__(self, command: list[str]) -> None:
        """Raises RuntimeError if it is not ready in time."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.child = subprocess.Popen([*command, "--port", str(self.port)], stdout=sys.stderr)
        atexit.register(self.close)
        deadline = time.monotonic() + SECONDS_TO_START
        while not self.is_ready():
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("llama-server did not start; see the log")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def close(self) -> None:
        self.child.kill()
        self.child.wait()


if __name__ == "__main__":
    serve(load)
