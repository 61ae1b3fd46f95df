"""A peer for the tests of benchmarks/peers: answers with the prompt's own tokens, or misbehaves as the first
request tells it to.
"""

from __future__ import annotations

import os
import time
from typing import Any

from peers.protocol import Answer, Reply, Request, serve


def load(options: dict[str, Any]) -> tuple[Answer, str]:
    os.write(1, b"a library that prints to stdout\n")
    if options.get("fails") == "load":
        raise FileNotFoundError("no model\nat all")

    def answer(request: Request) -> Reply:
        if options.get("fails") == "exit":
            os._exit(3)
        if options.get("fails") == "sleep":
            time.sleep(60)
        if options.get("fails") == "answer":
            raise ValueError("a bad prompt")
        made = [prompt[:limit] for prompt, limit in zip(request.prompts, request.limits, strict=True)]
        return Reply(made, 2.0, 0.5, len(made), sum(map(len, made)))

    return answer, "fake 1"


if __name__ == "__main__":
    serve(load)
