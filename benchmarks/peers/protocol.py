"""The adapter's side of the line protocol: one JSON object a line, requests in, replies out.

On stdin and stdout. Standard library only.

A request has the fields of Request: the first one loads a model, later ones answer prompts. A reply has the
fields of Reply, or `error`. Output of libraries to stdout goes to stderr, so that it cannot be mistaken for a
reply.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Request:
    """A prompt to answer greedily: token ids, the most new tokens, the ids that end an answer, the model's
    mask. With the setting `logits`, a path: no answer, but the prompt's logits [tokens, vocab] in that file.
    Ours, with the setting `slots`: no answer, but the seconds of such a step after 128 tokens.
    """

    prompt: list[int]
    limit: int
    eos: list[int]
    mask: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """New token ids, an end token included. Times in seconds from the request's start.

    `first_seconds` is when the first `first_tokens` tokens were there; `forwards` None: not known.
    """

    token_ids: list[int]
    seconds: float
    first_seconds: float
    first_tokens: int
    forwards: int | None = None


Answer = Callable[[Request], Reply]


def serve(load: Callable[[dict[str, Any]], tuple[Answer, str]]) -> None:
    """Answer requests until stdin ends.

    `load` gets the first request and returns what answers, and the versions that do.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = (json.loads(line) for line in sys.stdin)
    for reply in _replies(load, requests):
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _replies(
    load: Callable[[dict[str, Any]], tuple[Answer, str]], requests: Iterator[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    answer: Answer | None = None
    for request in requests:
        try:
            if answer is None:
                begun = perf_counter()
                answer, versions = load(request)
                yield {"versions": versions, "seconds": perf_counter() - begun}
            else:
                yield asdict(answer(Request(**request)))
        except Exception as error:  # whatever a library raises must reach the driver as one line
            traceback.print_exc()
            detail = (str(error).strip().splitlines() or [""])[0]
            yield {"error": f"{type(error).__name__}: {detail}"}
