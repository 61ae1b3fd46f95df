"""Decodes task rows at one setting and keeps what each of them gave and cost. Judges and compares nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ...runtime import Completion, GenerationConfig
from ...runtime.decode.config import FULL_WINDOW
from ...runtime.session import Prompt
from ..tasks.scores import Output
from ..tasks.tasks import Task


class Generator(Protocol):
    """What decoding needs of a session."""

    def generate_each(
        self, prompts: Sequence[Prompt], config: Sequence[GenerationConfig], *, batch: int
    ) -> Iterator[Completion]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row decoded.

    With one row at a time `seconds` and `tokens_timed` leave out the prompt and its first step: the speed of decoding alone.
    In a batch rows start at different times: there `seconds` is the time since the row before, and only sums mean anything.
    """

    text: str
    token_ids: tuple[int, ...]
    forwards: int
    tokens_timed: int
    seconds: float
    finish_reason: str

    @property
    def output(self) -> Output:
        return Output(self.text, self.token_ids)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        return cls(**values | {"token_ids": tuple(values["token_ids"])})


def decode_rows(
    session: Generator, tasks: Sequence[Task], config: GenerationConfig, batch: int
) -> Iterator[Outcome]:
    """Decode the tasks, at most `batch` rows at a time, a row that ends making room for the next; yields outcomes in their order.

    With full windows unless `config` fixes a narrower one: what is judged must not depend on how fast this machine is.
    """
    configs = [
        config.with_values(max_new_tokens=task.max_new_tokens, window=config.window or FULL_WINDOW)
        for task in tasks
    ]
    began = time.perf_counter()
    for completion in session.generate_each([task.prompt for task in tasks], configs, batch=batch):
        ended = time.perf_counter()
        yield _outcome(completion, None if batch == 1 else ended - began)
        began = ended


def _outcome(done: Completion, share: float | None) -> Outcome:
    stats = done.stats
    timed = (stats.tokens_after_first, stats.decode_time) if share is None else (stats.tokens, share)
    return Outcome(done.text, done.token_ids, stats.forwards, *timed, done.finish_reason)
