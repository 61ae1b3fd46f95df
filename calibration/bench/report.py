"""The report of a benchmark: its figures in words and tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..rounds import Percentiles, busy_note, percent
from .compare import Comparison
from .settings import BenchOptions, Setting
from .steps import CostCurve

SCHEMA = 3
COMPUTED = ("curves", "compared", "options")  # fields that are written in another form


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The figures of a report. `machine` describes the machine, `load` what else was running on it, `stored`
    is the name of the profile that was stored.
    """

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
    cursor: int
    capacity: int
    curves: tuple[CostCurve, ...]
    compared: tuple[Comparison, ...]
    stored: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `bench --json` prints; docs/bench.md describes it."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in COMPUTED}
        even = [{"batch": b, "window": w, "tokens_per_forward": k} for b, w, k in self.break_evens]
        return {
            "schema": SCHEMA,
            **plain,
            "options": asdict(self.options),
            "notes": self.notes,
            "curves": [curve.to_dict() for curve in self.curves],
            "break_even": even,
            "compared": [line.to_dict() for line in self.compared],
        }

    @property
    def headline(self) -> str:
        """The fastest setting in one sentence."""
        best = max(self.compared, key=lambda line: line.speed_up.median)
        if best.setting.is_baseline:
            return f"{self.task}: no setting was faster than one-token mode."
        plain = next(line for line in self.compared if line.setting == best.setting.baseline)
        return (
            f"{self.task}, batch {best.setting.batch}: {best.setting.mode} is {best.speed_up.median:.2f}"
            f" times as fast as one-token mode ({_speed(best)} against {_speed(plain)} tokens/s), score"
            f" {_score(best)} against {_score(plain)} %.{self._beside(best)}"
        )

    def _beside(self, best: Comparison) -> str:
        """The fastest setting in exact mode at the batch of `best`, if that has a tau."""
        exact = [o for o in self.compared if o.setting.is_exact and o.setting.batch == best.setting.batch]
        if best.setting.is_exact or not exact:
            return ""
        one = max(exact, key=lambda line: line.speed_up.median)
        return f" Exact mode, which gives the one-token text: {one.speed_up.median:.2f} times."

    @property
    def break_evens(self) -> list[tuple[int, int, float | None]]:
        """(batch, window, tokens per forward below which nothing is gained) for each curve."""
        sizes = [self.window_size(line.setting) for line in self.compared]
        windows = dict.fromkeys([self.block, *(size for size in sizes if size is not None)])
        return [
            (curve.batch, window, curve.break_even(window)) for curve in self.curves for window in windows
        ]

    def window_size(self, setting: Setting) -> int | None:
        """Predictions of a full step with cursor commit. None for one-token mode, block commit, exact mode
        (whose steps also verify), and a window that is chosen while decoding."""
        if (
            setting.one_token
            or setting.is_exact
            or setting.commit.kind != "cursor"
            or setting.window == "auto"
        ):
            return None
        return self.block if setting.window == "full" else min(int(setting.window), self.block)

    @property
    def facts(self) -> list[str]:
        """The conditions of the figures, and what they mean, in sentences."""
        rounds = f"{self.options.rounds} round{'s' if self.options.rounds > 1 else ''}"
        low, high = self.prompt_tokens
        return [
            *(_break_even_line(batch, window, k) for batch, window, k in self.break_evens),
            *self._adapter_line,
            f"{self.num_rows} rows, {rounds}, judged by {self.judges}; prompts of {low} to {high} tokens",
            f"{self.bundle}, variant {self.variant}, {self.precision}, block {self.block}; {self.machine}",
            *(f"note: {note}" for note in self.notes),
        ]

    @property
    def fastest_adapter(self) -> Comparison | None:
        """The fastest setting that names a draft adapter."""
        lines = (line for line in self.compared if line.setting.draft is not None)
        return max(lines, key=lambda line: line.speed_up.median, default=None)

    @property
    def _adapter_line(self) -> list[str]:
        """The draft adapter to choose."""
        best = self.fastest_adapter
        if best is None:
            return []
        name, gain, option = best.setting.draft, best.tokens_per_forward, f"--draft {best.setting.draft}"
        if self.stored is not None:
            option = f"--profile {self.stored}, which was stored"
        elif best.speed_up.median <= 1:
            option += "; it is not faster than one-token mode"
        return [f"fastest draft adapter: {name} ({gain:.2f} tokens/forward); choose it with {option}"]

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
        if any(line.peak_memory is None for line in self.compared):
            notes.append("this system does not report the peak memory of a part of a run")
        largest = max(self.options.batches)
        if self.num_rows < 2 * largest:
            short = f"{self.num_rows} rows keep a batch of {largest} full only for a short time"
            notes.append(f"{short}; use more with --limit")
        return notes

    # --- tables: column names, then a line of cells each ---

    @property
    def speed_table(self) -> list[tuple[str, ...]]:
        cells = [
            (
                *_names(line.setting),
                _speed(line),
                str(line.speed_up),
                f"{line.tokens_per_forward:.2f}",
                _score(line),
                "-" if line.peak_memory is None else f"{line.peak_memory / 1e6:.0f}",
            )
            for line in self.compared
        ]
        return _table(("tokens/s", "speed-up", "tok/fwd", "score, %", "MB"), cells)

    @property
    def latency_table(self) -> list[tuple[str, ...]]:
        """Milliseconds."""
        cells = [
            (*_names(line.setting), *_times(line.ttft), *_times(line.itl), *_times(line.tpot))
            for line in self.compared
        ]
        return _table(("TTFT", "p99", "ITL", "p99", "TPOT", "p99"), cells)

    @property
    def load_table(self) -> list[tuple[str, ...]]:
        """Requests a second of a batch that is always full, and the time to the whole answer in seconds."""
        cells = [
            (
                *_names(line.setting),
                f"{line.requests_per_second.median:.2f}",
                "-" if line.answer_p95 is None else f"{line.answer_p95:.2f}",
            )
            for line in self.compared
        ]
        return _table(("requests/s", "answer p95, s"), cells)

    @property
    def cost_table(self) -> list[tuple[str, ...]]:
        """The cost of a step by its slots, in milliseconds and in steps of one slot."""
        lines: list[tuple[str, ...]] = [("slots", *(str(slots) for slots in self.curves[0].slots))]
        for curve in self.curves:
            lines.append((f"batch {curve.batch}, ms", *(_short(p.median) for p in curve.milliseconds)))
            lines.append(("x one slot", *(f"{p.median:.2f}" for p in curve.relative)))
        return lines


def _names(setting: Setting) -> Iterator[str]:
    yield str(setting.batch)
    yield setting.mode.removeprefix("tau ")
    yield "-" if setting.one_token else str(setting.window)
    yield setting.commit_name


def _table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A head and lines that begin with batch, tau, window and commit; the last two only if one is unusual."""
    default: list[set[str]] = [set(), set(), {"-", "auto"}, {"cursor"}]
    columns = [i for i in range(4) if not {line[i] for line in lines} <= default[i]]
    columns += range(4, 4 + len(head))
    table = [("batch", "tau", "window", "commit", *head), *lines]
    return [tuple(line[i] for i in columns) for line in table]


def _break_even_line(batch: int, window: int, k: float | None) -> str:
    where = f"batch {batch}, window {window}"
    if k is None:
        return f"{where}: no number of tokens/forward gains anything on this device"
    return f"{where}: below {k:.2f} tokens/forward this device gains nothing"


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
