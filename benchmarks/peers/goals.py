"""The ratios that were set as goals, from what was measured; one whose parts are absent is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peers.measure import Summary

PAPER = {
    4: 1.71,
    8: 1.60,
    16: 1.34,
}  # MARS over one-token mode with KV cache at each batch, by the paper's table of wall clock
Choice = Callable[[Summary], bool]


@dataclass(frozen=True, slots=True)
class Goal:
    """`ratio` of end-to-end tokens/s between the two systems named, against what was wanted."""

    task: str
    batch: int
    what: str
    ours: str
    theirs: str
    ratio: float
    wanted: float

    @property
    def met(self) -> bool:
        return self.ratio >= self.wanted

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


def goals(summaries: Sequence[Summary]) -> list[Goal]:
    """All goals of every task.

    They were set for the assistant task, at tau 0.95 and for exact mode; the others are reported beside it.
    """
    found: list[Goal] = []
    for task in dict.fromkeys(s.task for s in summaries):
        single = [s for s in summaries if s.task == task and s.batch == 1]
        found += _single(task, single)
        for batch in dict.fromkeys(s.batch for s in summaries if s.task == task and s.batch > 1):
            rows = [s for s in summaries if (s.task, s.batch) == (task, batch)]
            for name in dict.fromkeys(_bundle(s) for s in rows):
                found += _batch(task, batch, [s for s in rows if _bundle(s) == name])
    return found


def _bundle(summary: Summary) -> str:
    """Which bundle of ours it was: the words before the mode."""
    return " ".join(summary.label.split()[:2])


def _single(task: str, rows: Sequence[Summary]) -> list[Goal]:
    def mars(*names: str) -> Choice:
        return lambda s: s.label in {f"ours {name} tau 0.95" for name in names}

    def exact(name: str) -> Choice:
        return lambda s: s.label == f"ours {name} exact"

    quantized, fp32 = mars("w8a8", "int4"), mars("fp32")
    wanted: list[tuple[str, Choice, Choice, float]] = [
        (
            "quantized MARS over our fastest one-token mode",
            quantized,
            lambda s: s.kind == "ours" and s.label.endswith("tau 1"),
            2.0,
        ),
        (
            "quantized MARS over the fastest 4-bit peer",
            quantized,
            lambda s: s.label in ("genai int4", "llama.cpp q4_0"),
            2.0,
        ),
        ("fp32 MARS over our one-token mode in fp32", fp32, lambda s: s.label == "ours fp32 tau 1", 2.2),
        ("fp32 MARS over transformers", fp32, lambda s: s.label == "transformers fp32", 3.0),
        (
            "fp32 MARS over the authors' cached sampler",
            fp32,
            lambda s: s.label.startswith("MARSCachedSampler"),
            4.0,
        ),
        *(
            (f"{name} exact mode over {name} tau 0.95", exact(name), mars(name), 0.95)
            for name in ("fp32", "w8a8")
        ),
    ]
    return [
        goal
        for what, ours, theirs, least in wanted
        if (goal := _ratio(task, 1, what, rows, ours, theirs, least))
    ]


def _batch(task: str, batch: int, rows: Sequence[Summary]) -> list[Goal]:
    def cursor(s: Summary) -> bool:
        return " cursor" in s.label

    block = _ratio(
        task,
        batch,
        "cursor commit over the best block commit",
        rows,
        cursor,
        lambda s: " block " in s.label,
        1.15,
    )
    single = _ratio(
        task,
        batch,
        "cursor commit over one-token mode",
        rows,
        cursor,
        lambda s: s.label.endswith("tau 1"),
        PAPER[batch],
    )
    exact = _ratio(
        task, batch, "exact mode over tau 0.95", rows, lambda s: s.label.endswith(" exact"), cursor, 0.9
    )
    return [goal for goal in (block, single, exact) if goal]


def _ratio(
    task: str, batch: int, what: str, rows: Sequence[Summary], ours: Choice, theirs: Choice, wanted: float
) -> Goal | None:
    """The fastest of ours over the fastest of theirs."""
    mine, other = ([s for s in rows if choice(s)] for choice in (ours, theirs))
    if not mine or not other:
        return None
    best, rival = (max(group, key=lambda s: s.tokens_per_second) for group in (mine, other))
    ratio = best.tokens_per_second / rival.tokens_per_second if rival.tokens_per_second else 0.0
    return Goal(task, batch, what, best.label, rival.label, ratio, wanted)


def lines(found: Sequence[Goal]) -> str:
    """Markdown, one line a goal."""
    head = ["| task | batch | goal | wanted | measured | met | |", "|---|---|---|---|---|---|---|"]
    return "\n".join(
        [
            *head,
            *(
                f"| {g.task} | {g.batch} | {g.what} | {g.wanted:.2f} | {g.ratio:.2f} |"
                f" {'yes' if g.met else 'no'} | {g.ours} / {g.theirs} |"
                for g in found
            ),
        ]
    )
