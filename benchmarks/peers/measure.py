"""Interleaved rounds, medians of their rates, and whether the answers are the expected ones.

Every system answers a row before the next row, so that a change of the machine's load affects all equally.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from peers.catalog import Entry
from peers.process import PeerError, Process
from peers.protocol import Reply, Request
from peers.rows import Prompts

Ids = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of an entry over a task's rows."""

    replies: tuple[Reply, ...]

    @property
    def answers(self) -> Ids:
        return tuple(tuple(reply.token_ids) for reply in self.replies)

    @property
    def tokens(self) -> int:
        return sum(len(reply.token_ids) for reply in self.replies)

    @property
    def seconds(self) -> float:
        return sum(reply.seconds for reply in self.replies)

    @property
    def forwards(self) -> int | None:
        known = [reply.forwards for reply in self.replies if reply.forwards is not None]
        return sum(known) if len(known) == len(self.replies) else None

    @property
    def tokens_per_second(self) -> float:
        """End to end, the prompt's time included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """What came after the first tokens, over the time after them."""
        seconds = self.seconds - sum(reply.first_seconds for reply in self.replies)
        first = sum(reply.first_tokens for reply in self.replies)
        return (self.tokens - first) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over rounds.

    `accuracy` and `equal` are shares of the rows, `equal` those answered as the reference did.
    """

    label: str
    kind: str
    task: str
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


def run_round(
    entries: Sequence[Entry],
    processes: Mapping[str, Process],
    prompts: Prompts,
    start: int,
    tell: Callable[[str], None],
) -> tuple[dict[str, Round], dict[str, str]]:
    """One pass over the rows: the rounds by label, and why an entry failed; that one is asked no more.

    Entry number `start` (modulo their count) begins, so that no one always comes after the same other.
    """
    replies: dict[str, list[Reply]] = {entry.label: [] for entry in entries}
    failed: dict[str, str] = {}
    order = [*entries[start % len(entries) :], *entries[: start % len(entries)]]
    for number, (row, ids) in enumerate(zip(prompts.rows, prompts.ids, strict=True)):
        for entry in order:
            if entry.label in failed:
                continue
            tell(f"row {number + 1}: {entry.label}")
            settings = dict(entry.settings)
            request = Request(list(ids), row.max_new_tokens, list(prompts.eos), prompts.mask, settings)
            try:
                replies[entry.label].append(processes[entry.program].answer(request))
            except PeerError as error:
                failed[entry.label] = str(error)
    return {label: Round(tuple(found)) for label, found in replies.items() if label not in failed}, failed


def summarize(
    entry: Entry, task: str, rounds: Sequence[Round], accuracy: float, reference: Ids | None
) -> Summary:
    """`rounds` must not be empty; answers are those of the first round (a system that answers greedily
    repeats itself).
    """
    first = rounds[0]
    equal = None if reference is None else sum(a == b for a, b in zip(first.answers, reference, strict=True))
    return Summary(
        entry.label,
        entry.kind,
        task,
        len(rounds),
        median(r.tokens_per_second for r in rounds),
        median(r.decode_tokens_per_second for r in rounds),
        1000 * median(reply.first_seconds for r in rounds for reply in r.replies),
        first.tokens / first.forwards if first.forwards else None,
        first.tokens / len(first.replies),
        accuracy,
        None if equal is None else equal / len(first.replies),
    )


def table(summaries: Sequence[Summary]) -> str:
    """Markdown, a block for each task, the fastest line first."""
    blocks = []
    for task in dict.fromkeys(s.task for s in summaries):
        lines = [
            task,
            "",
            "| system | tokens/s | decode tokens/s | TTFT ms | tokens/forward | tokens/answer | right |"
            " as ours fp32 tau 1 |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for s in sorted((s for s in summaries if s.task == task), key=lambda s: -s.tokens_per_second):
            per_forward = "-" if s.tokens_per_forward is None else f"{s.tokens_per_forward:.2f}"
            equal = "-" if s.equal is None else f"{s.equal:.0%}"
            lines.append(
                f"| {s.label} | {s.tokens_per_second:.1f} | {s.decode_tokens_per_second:.1f} |"
                f" {s.ttft_ms:.0f} | {per_forward} | {s.mean_tokens:.1f} | {s.accuracy:.0%} | {equal} |"
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
