"""The report of a benchmark: its figures in words and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..rounds import Percentiles, busy_note, percent
from .compare import Comparison
from .settings import BenchOptions, Setting

SCHEMA = 4


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The figures of a report. `machine` describes the machine, `load` what else was running on it."""

    task: str
    bundle: str
    variant: str
    precision: str
    block: int
    machine: str
    load: float | None
    date: str
    options: BenchOptions
    num_rows: int
    judges: str
    too_long: tuple[int, ...]
    prompt_tokens: tuple[int, int]
    compared: tuple[Comparison, ...]

    def to_dict(self) -> dict[str, Any]:
        """The output of `bench --json` (docs/bench.md)."""
        return {"schema": SCHEMA, **asdict(self), "notes": self.notes}

    @property
    def headline(self) -> str:
        """The fastest setting in one sentence."""
        best = max(self.compared, key=lambda line: line.speed_up.median)
        if best.setting.one_token:
            return f"{self.task}: no setting was faster than one-token mode."
        plain = next(line for line in self.compared if line.setting == Setting(best.setting.batch))
        return (
            f"{self.task}, batch {best.setting.batch}: {best.setting.mode} is {best.speed_up.median:.2f}"
            f" times as fast as one-token mode ({_speed(best)} against {_speed(plain)} tokens/s), score"
            f" {_score(best)} against {_score(plain)} %.{self._exact_beside(best)}"
        )

    def _exact_beside(self, best: Comparison) -> str:
        """The fastest setting in exact mode at the batch of `best`, if that has a tau."""
        exact = [o for o in self.compared if o.setting.tau is None and o.setting.batch == best.setting.batch]
        if best.setting.tau is None or not exact:
            return ""
        one = max(exact, key=lambda line: line.speed_up.median)
        return f" Exact mode, which gives the one-token text: {one.speed_up.median:.2f} times."

    @property
    def facts(self) -> list[str]:
        """The conditions of the figures, and what they mean, in sentences."""
        rounds = f"{self.options.rounds} round{'s' if self.options.rounds > 1 else ''}"
        low, high = self.prompt_tokens
        return [
            f"{self.num_rows} rows, {rounds}, judged by {self.judges}; prompts of {low} to {high} tokens",
            f"{self.bundle}, variant {self.variant}, {self.precision}, block {self.block}; {self.machine}",
            *(f"note: {note}" for note in self.notes),
        ]

    @property
    def notes(self) -> list[str]:
        """Warnings for readers of the figures."""
        notes = [note] if (note := busy_note(self.load)) else []
        if self.too_long:
            notes.append(
                f"{len(self.too_long)} rows were left out, their prompts are longer than the context"
            )
        if cut := max(line.cut_short for line in self.compared):
            notes.append(f"up to {cut} answers of a setting ended because the context was full")
        if unsteady := max(line.unsteady for line in self.compared):
            notes.append(f"up to {unsteady} answers of a setting were not the same in all rounds")
        if forced := max(line.forced for line in self.compared):
            notes.append(
                f"grammars gave up to {percent(forced)} of a setting's tokens: these count in tok/fwd, and no"
                " rule accepted them"
            )
        largest = max(self.options.batches)
        if self.num_rows < 2 * largest:
            short = f"{self.num_rows} rows keep a batch of {largest} full only for a short time"
            notes.append(f"{short}; use more with --limit")
        return notes

    # --- tables: column names, then a line of cells each ---

    @property
    def speed_table(self) -> list[tuple[str, ...]]:
        head = ("tokens/s", "speed-up", "tok/fwd", "score, %")
        lines = [
            (_speed(line), str(line.speed_up), f"{line.tokens_per_forward:.2f}", _score(line))
            for line in self.compared
        ]
        return self._table(head, lines)

    @property
    def latency_table(self) -> list[tuple[str, ...]]:
        """Milliseconds."""
        head = ("TTFT", "p99", "ITL", "p99", "TPOT", "p99")
        lines = [(*_times(line.ttft), *_times(line.itl), *_times(line.tpot)) for line in self.compared]
        return self._table(head, lines)

    @property
    def load_table(self) -> list[tuple[str, ...]]:
        """Requests a second of a batch that is always full, and the time to the whole answer in seconds."""
        lines = [
            (
                f"{line.requests_per_second.median:.2f}",
                "-" if line.answer_p95 is None else f"{line.answer_p95:.2f}",
            )
            for line in self.compared
        ]
        return self._table(("requests/s", "answer p95, s"), lines)

    def _table(self, head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """A head and lines, each after the batch and tau of its setting, and the masks if they is given."""
        named = self.options.masks != ("auto",)
        names = [_names(line.setting) for line in self.compared]
        table = [(("batch", "tau", "masks"), head), *zip(names, lines, strict=True)]
        return [(*(name if named else name[:2]), *cells) for name, cells in table]


def _names(setting: Setting) -> tuple[str, str, str]:
    masks = "-" if setting.one_token else str(setting.masks)
    return str(setting.batch), setting.mode.removeprefix("tau "), masks


def _speed(line: Comparison) -> str:
    return _short(line.tokens_per_second.median)


def _score(line: Comparison) -> str:
    """A score with its interval."""
    low, high = line.score_interval
    return f"{percent(line.score)[:-2]} ({100 * low:.0f}-{100 * high:.0f})"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(value: Percentiles | None) -> tuple[str, str]:
    return ("-", "-") if value is None else (_short(1000 * value.p50), _short(1000 * value.p99))
