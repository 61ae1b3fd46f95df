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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threads = str(options["threads"])
    command = [options["server"], "-m", options["model"], "-c", str(options["context"]), "-np", "1"]
    command += ["-t", threads, "-tb", threads, "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    server = subprocess.Popen([*command, *options["flags"]], stdout=sys.stderr)
    atexit.register(server.kill)
    deadline = time.monotonic() + SECONDS_TO_START
    while not _healthy(port):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("llama-server did not start; see the log")
        time.sleep(0.1)

    def answer(request: Request) -> Reply:
        (prompt,), (limit,) = request.prompts, request.limits
        body = {"prompt": prompt, "n_predict": limit, "temperature": 0, "top_k": 1, "repeat_penalty": 1}
        body |= {"cache_prompt": False, "stream": True, "return_tokens": True}
        begun = perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        new: list[int] = []
        first_seconds = 0.0
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                first_seconds = first_seconds or perf_counter() - begun
                new += event["tokens"] if not event["stop"] else []
                if event.get("stop_type") == "eos":
                    new.append(request.eos[0])
        connection.close()
        return Reply([new], perf_counter() - begun, first_seconds, 1, None)

    version = subprocess.run([options["server"], "--version"], capture_output=True, text=True, check=False)
    return answer, (version.stderr or version.stdout).splitlines()[0]


def _healthy(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False


if __name__ == "__main__":
    serve(load)
