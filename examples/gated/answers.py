"""The stock model's own greedy answers, as token ids in a JSONL file; resumable by row."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import prompts

from mars_export import GenerationConfig, Session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="of the stock model (--no-masks)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", action="store_true", help="answer chat.test.jsonl instead")
    parser.add_argument("--count", type=int, default=3000, help="talks in the file when it is complete")
    parser.add_argument("--part", type=int, default=10**9, help="most talks to answer now")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--limit", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    done = len(args.out.read_text().splitlines()) if args.out.exists() else 0
    talks = prompts.held_out() if args.held_out else prompts.talks(args.count)
    talks = talks[done : done + args.part]
    asked = [[{"role": role, "content": text} for role, text in talk] for talk in talks]
    session = Session.open(args.bundle, device="cpu", threads=args.threads)
    config = GenerationConfig(max_new_tokens=args.limit)
    with args.out.open("a") as sink:
        for talk, row in zip(talks, session.generate_each(asked, config, batch=args.batch), strict=True):
            line = {"messages": talk, "tokens": [*row.token_ids], "finish": row.finish_reason}
            sink.write(json.dumps(line) + "\n")
            sink.flush()


if __name__ == "__main__":
    main()
