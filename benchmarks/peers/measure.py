"""Results of rounds: medians of rates, and whether the answers are the expected ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from peers.protocol import Reply

Ids = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over a task's rows: the answers, and sums over its requests.

    `first_seconds` holds one time for each request.
    """

    answers: Ids
    tokens: int
    seconds: float
    first_seconds: tuple[float, ...]
    first_tokens: int
    forwards: int | None

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> Round:
        answers = tuple(tuple(ids) for reply in replies for ids in reply.token_ids)
        known = [reply.forwards for reply in replies if reply.forwards is not None]
        return cls(
            answers,
            sum(map(len, answers)),
            sum(reply.seconds for reply in replies),
            tuple(reply.first_seconds for reply in replies),
            sum(reply.first_tokens for reply in replies),
            sum(known) if len(known) == len(replies) else None,
        )

    @property
    def tokens_per_second(self) -> float:
        """End to end, the prompt's time included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """What came after the first tokens, over the time after them."""
        seconds = self.seconds - sum(self.first_seconds)
        return (self.tokens - self.first_tokens) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over rounds.

    `accuracy` and `equal` are shares of the rows, `equal` those answered as the reference did.
    """

    label: str
    kind: str
    task: str
    batch: int
    rounds: int
    tokens_per_second: float
    decode_tokens_per_second: float
    ttft_ms: float
    tokens_per_forward: float | None
    mean_tokens: float
    accuracy: float
    equal: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    label: str,
    kind: str,
    task: str,
    batch: int,
    rounds: Sequence[Round],
    accuracy: float,
    reference: Ids | None,
) -> Summary:
    """`rounds` must not be empty; answers are those of the first round (a system that answers greedily
    repeats itself).
    """
    first = rounds[0]
    return Summary(
        label,
        kind,
        task,
        batch,
        len(rounds),
        median(r.tokens_per_second for r in rounds),
        median(r.decode_tokens_per_second for r in rounds),
        1000 * median(seconds for r in rounds for seconds in r.first_seconds),
        first.tokens / first.forwards if first.forwards else None,
        first.tokens / len(first.answers),
        accuracy,
        None
        if reference is None
        else sum(a == b for a, b in zip(first.answers, reference, strict=True)) / len(reference),
    )


def table(summaries: Sequence[Summary]) -> str:
    """Markdown, a block for each task and batch, the fastest line first."""
    blocks = []
    for key in dict.fromkeys((s.task, s.batch) for s in summaries):
        rows = sorted((s for s in summaries if (s.task, s.batch) == key), key=lambda s: -s.tokens_per_second)
        lines = [
            f"{key[0]}, batch {key[1]}",
            "",
            "| system | tokens/s | decode tokens/s | TTFT ms | tokens/forward | tokens/answer | right |"
            " as ours fp32 tau 1 |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for s in rows:
            per_forward = "-" if s.tokens_per_forward is None else f"{s.tokens_per_forward:.2f}"
            equal = "-" if s.equal is None else f"{s.equal:.0%}"
            lines.append(
                f"| {s.label} | {s.tokens_per_second:.1f} | {s.decode_tokens_per_second:.1f} |"
                f" {s.ttft_ms:.0f} | {per_forward} | {s.mean_tokens:.1f} | {s.accuracy:.0%} | {equal} |"
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
