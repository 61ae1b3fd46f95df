"""How many greedy texts of a server stay the same beside other requests, and with speculation.

    python benchmarks/lossless.py http://127.0.0.1:8000/v1 --way 'one token={"tau": 1}' --way 'exact={}'
    python benchmarks/lossless.py http://127.0.0.1:8080/v1 --save plain.json       any server with chats
    python benchmarks/lossless.py http://127.0.0.1:8080/v1 --against plain.json    with its speculation

Every prompt is asked at temperature 0, alone and among `--at-once` others. The first way, alone, is what the
others are compared with, or the texts of `--against`. A way is a name and JSON fields of its requests. A
server that is lossless and batch-invariant gives `equal` = `prompts` in each row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving.prompts import TASKS, chats

Texts = list[str]


def fetch(url: str, key: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that an address answers with, to a POST if there is a body. Raises OSError."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=600) as response:
        return json.load(response)


def ask(url: str, key: str, request: dict[str, Any]) -> str:
    """The text of a chat completion, its tool calls, and why it ended, as one string."""
    choice = fetch(f"{url}/chat/completions", key, request)["choices"][0]
    message = choice["message"]
    calls = [made["function"] for made in message.get("tool_calls") or ()]  # the ids are random
    return json.dumps([message.get("content"), calls, choice["finish_reason"]], ensure_ascii=False)


def answers(args: argparse.Namespace, fields: dict[str, Any], at_once: int) -> tuple[Texts, float]:
    """The texts of all prompts, and seconds."""
    common = {"model": args.model, "temperature": 0, **fields}
    requests = [{**common, **chat} for chat in chats(args.tasks, args.prompts, args.max_tokens)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        texts = list(pool.map(lambda request: ask(args.url, args.key, request), requests))
    return texts, time.perf_counter() - begun


def way(text: str) -> tuple[str, dict[str, Any]]:
    name, _, fields = text.partition("=")
    try:
        found = json.loads(fields or "{}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{fields!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{fields!r} is not a JSON object")
    return name, found


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("url", help="the API's address, up to /v1")
    parser.add_argument("--way", type=way, action="append", metavar="NAME=JSON")
    parser.add_argument("--model", help="by default the first that the server lists")
    parser.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", ""))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--save", type=Path, help="write the reference texts")
    parser.add_argument("--against", type=Path, help="compare with these instead")
    args = parser.parse_args()
    reference: Texts | None = json.loads(args.against.read_text("utf-8")) if args.against else None
    if reference is not None and len(reference) != args.prompts:
        parser.error(f"{args.against} has {len(reference)} texts, not {args.prompts}")
    args.url = args.url.rstrip("/")
    try:
        args.model = args.model or fetch(f"{args.url}/models", args.key)["data"][0]["id"]
    except OSError as error:
        sys.exit(f"error: {args.url}/models: {error}")
    print("| way | at once | equal | prompts | seconds |\n|---|---|---|---|---|", flush=True)
    for name, fields in args.way or [("default", {})]:
        for at_once in (1, args.at_once):
            try:
                texts, seconds = answers(args, fields, at_once)
            except OSError as error:
                sys.exit(f"error: {args.url}: {error}")
            reference = reference or texts
            equal = sum(a == b for a, b in zip(texts, reference, strict=True))
            print(f"| {name} | {at_once} | {equal} | {args.prompts} | {seconds:.1f} |", flush=True)
    if args.save:
        args.save.write_text(json.dumps(reference, ensure_ascii=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
