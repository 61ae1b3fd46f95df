"""A bundle with the draft adapter beside the stock model's own, on held-out chat: whether the text is the
same, tokens a forward, and tokens a second. The settings take turns on each row."""

from __future__ import annotations

import argparse
from pathlib import Path

from mars_export import GenerationConfig, Session
from mars_export.calibration.tasks import tasks

CHAT = Path(__file__).parents[1] / "default-checkpoint" / "data" / "chat.test.jsonl"
# Topics and wordings that no training prompt has.
LONGER = (
    "Describe a day in the life of a lighthouse keeper.",
    "Plan a weekend for a family with two small children.",
    "How would you teach a friend to play the trumpet?",
    "Compare trains with airplanes for a long trip.",
    "Tell the story of a boy who finds an old map.",
    "What happens in the body when a person runs for an hour?",
    "Write an email that asks a landlord to repair the heating.",
    "Give a recipe for vegetable soup and explain every step.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stock", type=Path, help="bundle of the stock model (--no-masks)")
    parser.add_argument("gated", type=Path, help="bundle of the same precision with the draft adapter")
    parser.add_argument("--rows", type=int, default=105, help="rows of chat.test.jsonl")
    parser.add_argument("--longer", type=int, default=8, help="longer answers")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--masks", default="auto,1,2", help="of the gated bundle")
    args = parser.parse_args()
    stock, gated = (
        Session.open(path, threads=args.threads, cache_bytes=0) for path in (args.stock, args.gated)
    )
    settings = {"stock, one token": (stock, {}), "stock, prompt lookup 3": (stock, {"prompt_lookup": 3})}
    settings["drafts, one token"] = (gated, {"tau": 1.0})
    for name in args.masks.split(","):
        masks = int(name) if name.isdecimal() else name
        settings[f"drafts, masks {name}"] = (gated, {"masks": masks})
    settings["drafts, masks auto, prompt lookup 3"] = (gated, {"prompt_lookup": 3})
    chat = [(stock.encode(row.prompt), row.max_new_tokens) for row in tasks.load(str(CHAT))[: args.rows]]
    longer = [(stock.encode([{"role": "user", "content": text}]), 128) for text in LONGER[: args.longer]]
    print(f"{'rows':8}{'setting':32}{'same text':>10}{'tokens':>8}{'tokens/forward':>16}{'tokens/s':>10}")
    for title, rows in (("chat", chat), ("longer", longer)):
        sums = {name: [0, 0, 0, 0, 0.0] for name in settings}  # same, tokens, forwards, timed tokens, seconds
        order = [*settings]
        for turn, (prompt, limit) in enumerate(rows * args.rounds):
            answers = {}
            for name in [*order[turn % len(order) :], *order[: turn % len(order)]]:
                session, options = settings[name]
                answers[name] = session.generate(prompt, GenerationConfig(max_new_tokens=limit, **options))
            for name, answer in answers.items():
                same = answer.token_ids == answers[order[0]].token_ids
                stats = answer.stats
                add = (same, stats.tokens, stats.forwards, stats.tokens_after_first, stats.decode_time)
                sums[name] = [a + b for a, b in zip(sums[name], add, strict=True)]
        for name, (same, tokens, forwards, timed, seconds) in sums.items():
            print(
                f"{title:8}{name:32}{same:>10}{tokens:>8}{tokens / forwards:>16.3f}{timed / seconds:>10.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
