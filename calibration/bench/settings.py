"""The settings that a benchmark compares, and its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Annotated, Any

from ...runtime.decode.config import GenerationConfig, Window
from ...runtime.errors import CalibrationError, MarsError
from ...runtime.rules import broken, integer
from ...runtime.session.session import Commit

Count = Annotated[int, integer(1, "1 or more")]
MIN_ROWS = 16
WAVES = 4  # rows of a slice, as a multiple of the largest batch; with fewer, a batch is seldom full


@dataclass(frozen=True, slots=True)
class Setting:
    """Rows at once, a tau (None: exact mode), a window, the cache loop, and in exact mode the draft adapter
    (None: the first). Raises MarsError for invalid values."""

    batch: Count
    tau: float | None = 1.0
    window: Window = "auto"
    commit: Commit = field(default_factory=Commit)
    draft: str | None = None

    def __post_init__(self) -> None:
        if wrong := broken(self):
            raise CalibrationError("; ".join(wrong.values()))
        self.config(1)

    @property
    def one_token(self) -> bool:
        return self.config(1).one_token

    @property
    def is_baseline(self) -> bool:
        """One-token mode with cursor commit, with which the others at the same batch are compared."""
        return self.one_token and self.commit.kind == "cursor"

    @property
    def baseline(self) -> Setting:
        return Setting(self.batch)

    @property
    def commit_name(self) -> str:
        return "cursor" if self.commit.kind == "cursor" else f"block {self.commit.cache_block}"

    @property
    def is_exact(self) -> bool:
        return self.tau is None

    @property
    def mode(self) -> str:
        """How tokens are accepted: exact and the draft adapter, or the tau."""
        exact = "exact" if self.draft is None else f"exact, {self.draft}"
        return exact if self.tau is None else f"tau {self.tau:g}"

    @property
    def name(self) -> str:
        """Different for different settings."""
        return f"batch {self.batch}, {self.mode}, window {self.window}, commit {self.commit_name}"

    def config(self, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=max_new_tokens, tau=self.tau, window=self.window, draft=self.draft
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"commit": self.commit_name}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to compare: every tau, window and commit at every batch, with one-token mode and, with `exact`,
    exact mode at every window with every one of `drafts`. Exact mode needs cursor commit.

    Raises CalibrationError that lists every bad value.
    """

    taus: tuple[float, ...] = (0.95,)
    batches: tuple[int, ...] = (1,)
    windows: tuple[Window, ...] = ("auto",)
    commits: tuple[str, ...] = ("cursor",)
    cache_block: int = 32
    rounds: Count = 3  # how often each setting decodes the rows
    limit: Annotated[int | None, integer(1, "1 or more")] = (
        None  # most rows; 16, or four times the largest batch
    )
    cursor: Count = 256  # final KV entries of a row when the cost of a step is measured
    exact: bool = True
    drafts: tuple[str | None, ...] = (None,)  # draft adapters

    def __post_init__(self) -> None:
        lists: dict[str, tuple[object, ...]] = {"batch": self.batches, "window": self.windows}
        lists["commit"] = self.commits
        if not self.exact:  # exact mode alone can be compared with one-token mode
            lists["tau"] = self.taus
        problems = [f"give at least one {name}" for name, values in lists.items() if not values]
        # One value at a time, so that each bad value is named once.
        problems += _refusals(lambda batch: Setting(batch), self.batches)
        problems += _refusals(lambda tau: Setting(1, tau=tau), self.taus)
        problems += _refusals(lambda window: Setting(1, window=window), self.windows)
        problems += _refusals(lambda kind: Commit(kind, self.cache_block), self.commits)
        problems += broken(self).values()
        if problems:
            raise CalibrationError("; ".join(dict.fromkeys(problems)))

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Every setting once: at each batch one-token mode first, then exact mode."""
        settings: list[Setting] = []
        for batch in self.batches:
            settings.append(Setting(batch))
            exact = product(self.windows, self.drafts) if self.exact else ()
            settings += [Setting(batch, None, window, draft=draft) for window, draft in exact]
            for kind, window, tau in product(self.commits, self.windows, self.taus):
                commit = Commit(kind, self.cache_block) if kind == "block" else Commit()
                setting = Setting(batch, tau, window, commit)
                # One-token mode has no window, and with cursor commit it is already in the list.
                settings.append(Setting(batch, commit=commit) if setting.one_token else setting)
        return tuple(dict.fromkeys(settings))

    @property
    def slice_rows(self) -> int:
        """Rows that a setting decodes before the next setting."""
        return max(MIN_ROWS, WAVES * max(self.batches))

    @property
    def most_rows(self) -> int:
        return self.limit or self.slice_rows


def _refusals(make: Callable[[Any], object], values: tuple[Any, ...]) -> Iterator[str]:
    for value in values:
        try:
            make(value)
        except MarsError as error:
            yield str(error)
