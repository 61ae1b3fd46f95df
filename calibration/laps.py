"""The settings that a benchmark compares, and rows decoded at one as a service does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, product
from time import perf_counter
from typing import Annotated, Any

from ..runtime.batcher.batcher import Batcher
from ..runtime.decode.config import GenerationConfig, Masks
from ..runtime.decode.limits import Limits
from ..runtime.decode.stats import Stats
from ..runtime.errors import CalibrationError, MarsError
from ..runtime.rules import broken, integer
from ..runtime.session.session import Session
from .tasks.scores import Output
from .tasks.tasks import TaskRow

Count = Annotated[int, integer(1, "1 or more")]
MIN_ROWS = 16
WAVES = 4  # rows of a slice, as a multiple of the largest batch; with fewer, a batch is seldom full


@dataclass(frozen=True, slots=True)
class Setting:
    """Rows at once, a tau (None: exact mode), and the masks. Raises MarsError for invalid values."""

    batch: Count
    tau: float | None = 1.0
    masks: Masks = "auto"

    def __post_init__(self) -> None:
        if wrong := broken(self):
            raise CalibrationError("; ".join(wrong.values()))
        self.config(1)

    @property
    def one_token(self) -> bool:
        """One-token mode, with which the others at the same batch are compared."""
        return self.config(1).one_token

    @property
    def mode(self) -> str:
        """How tokens are accepted: exact, or the tau."""
        return "exact" if self.tau is None else f"tau {self.tau:g}"

    def config(self, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=max_new_tokens, tau=self.tau, masks=self.masks)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The compared settings: every tau and number of masks at every batch, one-token mode and, with `exact`,
    exact mode at every number of masks. Raises CalibrationError that lists every bad value.
    """

    taus: tuple[float, ...] = (0.95,)
    batches: tuple[int, ...] = (1,)
    masks: tuple[Masks, ...] = ("auto",)
    rounds: Count = 3  # how often each setting decodes the rows
    limit: Annotated[int | None, integer(1, "1 or more")] = (
        None  # most rows; 16, or four times the largest batch
    )
    exact: bool = True

    def __post_init__(self) -> None:
        lists: dict[str, tuple[object, ...]] = {"batch": self.batches, "masks": self.masks}
        if not self.exact:  # exact mode alone can be compared with one-token mode
            lists["tau"] = self.taus
        problems = [f"give at least one {name}" for name, values in lists.items() if not values]
        # One value at a time, so that each bad value is named once.
        problems += _refusals(lambda batch: Setting(batch), self.batches)
        problems += _refusals(lambda tau: Setting(1, tau=tau), self.taus)
        problems += _refusals(lambda masks: Setting(1, masks=masks), self.masks)
        problems += broken(self).values()
        if problems:
            raise CalibrationError("; ".join(dict.fromkeys(problems)))

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Every setting once: at each batch one-token mode first, then exact mode."""
        settings: list[Setting] = []
        for batch in self.batches:
            settings.append(Setting(batch))
            settings += [Setting(batch, None, masks) for masks in self.masks if self.exact]
            taus = [Setting(batch, tau, masks) for masks, tau in product(self.masks, self.taus)]
            settings += [setting for setting in taus if not setting.one_token]
        return tuple(dict.fromkeys(settings))

    @property
    def slice_rows(self) -> int:
        """Rows that a setting decodes before the next setting."""
        return max(MIN_ROWS, WAVES * max(self.batches))


def _refusals(make: Callable[[Any], object], values: tuple[Any, ...]) -> Iterator[str]:
    for value in values:
        try:
            make(value)
        except MarsError as error:
            yield str(error)


@dataclass(frozen=True, slots=True)
class Timeline:
    """An answer and its times in seconds, as its reader sees them.

    `ttft` is the time from the request to the first event with tokens; None if there was none. `gaps` are the
    times between events with tokens; an event brings all tokens that one step accepted.
    """

    output: Output
    stats: Stats
    finish_reason: str
    ttft: float | None
    gaps: tuple[float, ...]

    @classmethod
    def of(cls, output: Output, stats: Stats, reason: str, start: float, events: Sequence[float]) -> Timeline:
        """From the clock times of the request and of its `events` with tokens."""
        gaps = tuple(after - before for before, after in pairwise(events))
        return cls(output, stats, reason, events[0] - start if events else None, gaps)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.output.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def forwards(self) -> int:
        return self.stats.forwards

    @property
    def seconds(self) -> float | None:
        """From the request to the last event with tokens."""
        return None if self.ttft is None else self.ttft + sum(self.gaps)

    @property
    def tpot(self) -> float | None:
        """Time per output token: from the first event to the last, for all tokens but one; None for one."""
        return sum(self.gaps) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def serve(session: Session, tasks: Sequence[TaskRow], setting: Setting) -> list[Timeline]:
    """Decode all tasks with a Batcher that is kept full: as many clients as it has rows, each with one
    request at a time."""
    # The Batcher closes first, which ends running requests, so that an error or Ctrl-C waits for no client.
    with (
        ThreadPoolExecutor(setting.batch) as clients,
        Batcher(session, Limits(max_rows=setting.batch)) as service,
    ):
        waiting = [clients.submit(_ask, service, task, setting) for task in tasks]
        try:
            return [answer.result() for answer in waiting]
        except BaseException:
            clients.shutdown(wait=False, cancel_futures=True)
            raise


def _ask(service: Batcher, task: TaskRow, setting: Setting) -> Timeline:
    text, reason = "", "cancelled"
    token_ids: list[int] = []
    events: list[float] = []
    start = perf_counter()
    request = service.submit(task.source, task.config(setting.config(task.max_new_tokens)))
    for event in request:
        if event.token_ids:
            events.append(perf_counter())
        text += event.text
        token_ids += event.token_ids
        reason = event.finish_reason or reason
    return Timeline.of(Output(text, tuple(token_ids)), request.stats, reason, start, events)
