"""Continuous batching, one step at a time: rows join and leave at any step. Knows rows and the device; no threads, no text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from ..errors import SessionError
from .backend import Backend, StepOutput
from .batch import Batch, Window, commit, fits, window_of, windows_of
from .policy import Policy
from .row import Accepted, Row


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once. Raises SessionError for values below 1.

    max_rows: sequences in one forward; KV memory is allocated for as many, each as long as the longest needs. max_waiting:
    requests that may wait for a row. prefill_tokens: prompt tokens that are prefilled between two decode steps, at most:
    more lets a new request answer sooner, less disturbs the running ones less.
    """

    max_rows: int = 8
    max_waiting: int = 64
    prefill_tokens: int = 128

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be 1 or more, not {getattr(self, name)!r}"
            for name in self.__slots__
            if getattr(self, name) < 1
        ]
        if wrong:
            raise SessionError("; ".join(wrong))


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that could not go on, and why. The other rows are not touched."""

    row: Row
    error: Exception


class Schedule:
    """Rows that run, in neighbouring KV rows: the decoding ones first, then at most one whose prompt is being prefilled."""

    def __init__(
        self, backend: Backend, block: int, mask_id: int, limits: Limits, policy: Policy | None = None
    ) -> None:
        self.backend, self.block, self.mask_id, self.limits, self.policy = (
            backend,
            block,
            mask_id,
            limits,
            policy,
        )
        self.waiting: deque[Row] = deque()
        self._batch = Batch(backend, limits.max_rows, mask_id)
        self._num_decoding = 0
        self._began: dict[int, float] = {}  # when each row was added, by its index

    @property
    def num_running(self) -> int:
        return len(self._batch.active)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._batch.active

    def add(self, row: Row) -> None:
        """Queue a row; rows get their turn in the order in which they were added."""
        self._began[row.index] = perf_counter()
        self.waiting.append(row)

    def step(self) -> tuple[list[Accepted], list[Failure]]:
        """Prefill a little, then one forward over all decoding rows: what each accepted, and which rows failed.

        A row whose finish_reason was set from outside leaves before anything else happens.
        """
        accepted: list[Accepted] = []
        failures: list[Failure] = []
        self._sweep()
        self._prefill(accepted, failures)
        self._decode(accepted, failures)
        self._sweep()
        if not self._batch.active and self._batch.cache.capacity:
            self._batch = Batch(
                self.backend, self.limits.max_rows, self.mask_id
            )  # gives the KV memory of the longest row back
        return accepted, failures

    # --- the parts of a step ---

    def _prefill(self, accepted: list[Accepted], failures: list[Failure]) -> None:
        left = min(self.limits.prefill_tokens, self.backend.max_slots or self.limits.prefill_tokens)
        while left > 0 and (row := self._next_to_prefill()) is not None:
            chunk = min(left, row.num_pending)
            left -= chunk
            if not self._guard([row], failures, partial(self._prefill_chunk, row, chunk, accepted)):
                return

    def _prefill_chunk(self, row: Row, chunk: int, accepted: list[Accepted]) -> None:
        if chunk < row.num_pending:
            self._batch.forward(self._num_decoding, [Window(chunk, 0)])
            row.cursor += chunk
            row.stats.prefill_forwards += 1
            return
        window = window_of(self._batch, row, self.block)
        output = self._batch.forward(self._num_decoding, [window])
        self._num_decoding += 1
        accepted.append(commit(row, window, output, 0))
        row.stats.prefill_time = row.stats.time_to_first_token = perf_counter() - self._began[row.index]

    def _next_to_prefill(self) -> Row | None:
        active = self._batch.active
        if self._num_decoding == len(active) and self.waiting and len(active) < self.limits.max_rows:
            active.append(self.waiting.popleft())
        return active[-1] if self._num_decoding < len(active) else None

    def _decode(self, accepted: list[Accepted], failures: list[Failure]) -> None:
        for row in self._batch.active[: self._num_decoding]:
            if row.finish_reason is None and not fits(self._batch, row):
                accepted.append(row.finish("capacity"))
        self._sweep()
        rows = self._batch.active[: self._num_decoding]
        if not rows:
            return
        made: list[tuple[list[Window], StepOutput]] = []
        if not self._guard(rows, failures, lambda: made.append(self._forward(rows))):
            return
        windows, output = made[0]
        for i, (row, window) in enumerate(zip(rows, windows, strict=True)):
            self._guard([row], failures, partial(self._commit, row, window, output, i, accepted))

    def _forward(self, rows: list[Row]) -> tuple[list[Window], StepOutput]:
        windows = windows_of(self._batch, rows, self.block, self.policy)
        return windows, self._batch.forward(0, windows)

    def _commit(self, row: Row, window: Window, output: StepOutput, i: int, accepted: list[Accepted]) -> None:
        accepted.append(commit(row, window, output, i))
        row.stats.decode_time = perf_counter() - self._began[row.index] - row.stats.time_to_first_token

    def _guard(self, rows: list[Row], failures: list[Failure], work: Callable[[], None]) -> bool:
        """Do `work`; an exception ends these rows and no others."""
        try:
            work()
        except Exception as error:  # whatever a backend or a stop condition raises belongs to these rows
            for row in rows:
                row.finish_reason = row.finish_reason or "cancelled"
                failures.append(Failure(row, error))
            self._sweep()
            return False
        return True

    def _sweep(self) -> None:
        """Let finished rows go, and close the gaps: decoding rows stay first and neighbours."""
        self.waiting = deque(row for row in self.waiting if not self._is_over(row))
        active = self._batch.active
        for i in reversed(range(len(active))):
            if not self._is_over(active[i]):
                continue
            if i < self._num_decoding:
                self._num_decoding -= 1
                self._move(self._num_decoding, i)
                i = self._num_decoding
            self._move(len(active) - 1, i)
            active.pop()

    def _is_over(self, row: Row) -> bool:
        if row.finish_reason is None:
            return False
        self._began.pop(row.index, None)
        return True

    def _move(self, source: int, target: int) -> None:
        if source != target:
            row = self._batch.active[source]
            self._batch.cache.move(source, target, row.cursor)
            self._batch.active[target] = row
