"""What a benchmark found, in words and tables, and the folder of its report. Measures nothing and prints nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...runtime.errors import CalibrationError
from ..tau.report import percent, require_matplotlib
from ..tau.setting import BenchOptions, Setting
from .comparison import Compared
from .cost_curve import CostCurve
from .spread import Percentiles, Rounds

SCHEMA = 1
JSON_FILE, PICTURE_FILE = "bench.json", "bench.png"
BUSY = 0.5  # running programs for each core, before the benchmark itself began


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything that a report shows. `machine` and `load` say where it was measured, and beside how many other programs."""

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
    compared: tuple[Compared, ...]
    no_picture: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The contents of bench.json; docs/bench.md describes them."""
        plain = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("curves", "compared", "options", "no_picture")
        }
        return {
            "schema": SCHEMA,
            **plain,
            "options": asdict(self.options),
            "notes": self.notes,
            "curves": [curve.to_dict() for curve in self.curves],
            "break_even": [
                {"batch": b, "window": w, "tokens_per_forward": k} for b, w, k in self.break_evens
            ],
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
            f"{self.task}, batch {best.setting.batch}: tau {best.setting.tau:g} is {best.speed_up.median:.2f} times as fast as one-token mode"
            f" ({_speed(best)} against {_speed(plain)} tokens/s), score {percent(best.score)} against {percent(plain.score)}."
        )

    @property
    def break_evens(self) -> list[tuple[int, int, float | None]]:
        """(batch, window, tokens per forward below which nothing is gained) of each curve, for the full window and those asked for."""
        windows = dict.fromkeys(
            [
                self.block,
                *(size for line in self.compared if (size := self.window_size(line.setting)) is not None),
            ]
        )
        return [
            (curve.batch, window, curve.break_even(window)) for curve in self.curves for window in windows
        ]

    def window_size(self, setting: Setting) -> int | None:
        """Predictions of a full step with cursor commit; None where it is not known: one-token mode and block commit aside, a
        window that is chosen while decoding."""
        if (
            setting.config(1).one_token
            or setting.commit.kind != "cursor"
            or not isinstance(setting.window, int)
        ):
            return None
        return min(setting.window, self.block)

    @property
    def facts(self) -> list[str]:
        """What the figures rest on, and what they mean, in sentences."""
        rounds = f"{self.options.rounds} round{'s' if self.options.rounds > 1 else ''}"
        found = [
            *(_break_even_line(batch, window, k) for batch, window, k in self.break_evens),
            f"{self.num_rows} rows, {rounds}, judged by {self.judges}; prompts of {self.prompt_tokens[0]} to {self.prompt_tokens[1]} tokens",
            f"{self.bundle}, variant {self.variant}, {self.precision}, block {self.block}; {self.machine}",
        ]
        return found + [f"note: {note}" for note in self.notes]

    @property
    def notes(self) -> list[str]:
        """What a reader should know before quoting a figure."""
        cores, notes = os.cpu_count() or 1, []
        if self.load is not None and self.load > BUSY * cores:
            notes.append(
                f"the machine was busy (load {self.load:g} on {cores} cores before the start): trust ratios more than speeds"
            )
        if self.too_long:
            notes.append(
                f"{len(self.too_long)} rows were left out, their prompts are longer than the context"
            )
        if cut := max(line.cut_short for line in self.compared):
            notes.append(f"up to {cut} answers of a setting ended because the context was full")
        if unsteady := max(line.unsteady for line in self.compared):
            notes.append(f"up to {unsteady} answers of a setting were not the same in all rounds")
        if any(line.peak_memory is None for line in self.compared):
            notes.append("this system does not tell the peak memory of a part of a run")
        largest = max(self.options.batches)
        if self.num_rows < 2 * largest:
            notes.append(
                f"{self.num_rows} rows keep a batch of {largest} full for a short time only; --limit gives more"
            )
        if self.no_picture is not None:
            notes.append(f"no picture: {self.no_picture}")
        return notes

    # --- tables: column names, then a line of cells each ---

    @property
    def speed_table(self) -> list[tuple[str, ...]]:
        cells = [(*_names(line.setting), _speed(line), _ratio(line.speed_up), f"{line.tokens_per_forward:.2f}", percent(line.score),
                  "-" if line.peak_memory is None else f"{line.peak_memory / 1e6:.0f}") for line in self.compared]  # fmt: skip
        return _table(("tokens/s", "speed-up", "tok/fwd", "score", "MB"), cells)

    @property
    def latency_table(self) -> list[tuple[str, ...]]:
        """Milliseconds."""
        cells = [
            (*_names(line.setting), *_times(line.ttft), *_times(line.itl), *_times(line.tpot))
            for line in self.compared
        ]
        return _table(("TTFT", "p99", "ITL", "p99", "TPOT", "p99"), cells)

    @property
    def cost_table(self) -> list[tuple[str, ...]]:
        """Milliseconds of a step by its slots, and in steps of one slot."""
        lines: list[tuple[str, ...]] = [("slots", *(str(slots) for slots in self.curves[0].slots))]
        for curve in self.curves:
            lines.append(
                (f"batch {curve.batch}, ms", *(_short(point.median) for point in curve.milliseconds))
            )
            lines.append(("x one slot", *(f"{point.median:.2f}" for point in curve.relative)))
        return lines


def write(report: BenchReport, folder: Path) -> BenchReport:
    """Write bench.json and, with matplotlib, bench.png into `folder`; returns the report as written."""
    from . import figure as bench_figure

    try:
        require_matplotlib()
        bench_figure.save_png(report, folder / PICTURE_FILE)
    except CalibrationError as error:
        report = replace(report, no_picture=str(error))
    text = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
    (folder / JSON_FILE).write_text(text + "\n", encoding="utf-8")
    return report


def _names(setting: Setting) -> Iterator[str]:
    one = setting.config(1).one_token
    yield str(setting.batch)
    yield f"{setting.tau:g}"
    yield "-" if one else setting.window_name
    yield setting.commit_name


def _table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A head and lines that begin with batch, tau, window and commit; the last two are left out where all have the usual one."""
    usual: list[set[str]] = [set(), set(), {"-", "auto"}, {"cursor"}]
    shown = [i for i in range(4) if not {line[i] for line in lines} <= usual[i]] + list(
        range(4, 4 + len(head))
    )
    return [tuple(line[i] for i in shown) for line in [("batch", "tau", "window", "commit", *head), *lines]]


def _break_even_line(batch: int, window: int, k: float | None) -> str:
    where = f"batch {batch}, window {window}"
    if k is None:
        return f"{where}: no number of tokens/forward gains anything on this device"
    return f"{where}: below {k:.2f} tokens/forward this device gains nothing"


def _speed(line: Compared) -> str:
    return _short(line.tokens_per_second.median)


def _ratio(value: Rounds) -> str:
    return (
        f"{value.median:.2f}x"
        if value.low == value.high
        else f"{value.median:.2f}x ({value.low:.2f}-{value.high:.2f})"
    )


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(value: Percentiles | None) -> tuple[str, str]:
    return ("-", "-") if value is None else (_short(1000 * value.p50), _short(1000 * value.p99))
