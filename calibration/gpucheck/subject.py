"""What is checked: a bundle on a device, the prompts that it answers, and a look at the device's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ...runtime import Completion, GenerationConfig, Session
from ...runtime.decode.backend import Backend, Cache, StepOutput
from ...runtime.device.cuda import memory_used
from ...runtime.device.name import DeviceName
from ...runtime.errors import CalibrationError
from ..rows import make_plan
from ..tasks.tasks import builtin_names, find, load

MOST_TOKENS = 64
RANDOM_PROMPTS = (5, 90, 17, 41, 230, 64, 9, 128)  # lengths, for a bundle without a tokenizer
MIN_CAPACITY = 64


@dataclass
class Subject:
    """A bundle on `device`, opened when it is first needed. `rows`: prompts for what is compared; `requests`:
    how many the check of growth sends."""

    path: Path
    device: str = "cuda"
    threads: int | None = None
    variant: str | None = None
    rows: int = 24
    requests: int = 2000

    @cached_property
    def session(self) -> Session:
        return self.open()

    @cached_property
    def on_cpu(self) -> Session:
        """The bundle's graph on the CPU: what the device's tokens are held against."""
        return Session.open(self.path, "cpu", variant="model", cache_bytes=0)

    def open(self, cache_bytes: int = 0, options: dict[str, str] | None = None) -> Session:
        return Session.open(
            self.path,
            self.device,
            threads=self.threads,
            variant=self.variant,
            cache_bytes=cache_bytes,
            options=options,
        )

    @cached_property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids: rows of the built-in tasks, by turns; random ones where there is no tokenizer, or the
        rows do not fit."""
        try:
            each = -(-self.rows // len(builtin_names()))
            plans = [make_plan(self.session, load(find(name)), each) for name in builtin_names()]
            found = [
                task.prompt_ids or ()
                for turn in zip(*(p.tasks for p in plans), strict=False)
                for task in turn
            ]
        except CalibrationError:
            found = []
        return tuple(found[: self.rows]) or self._random_prompts()

    def _random_prompts(self) -> tuple[tuple[int, ...], ...]:
        random, manifest = np.random.default_rng(1), self.session.bundle.manifest
        most = max(1, self.session.backend.max_capacity - MIN_CAPACITY)
        lengths = [min(RANDOM_PROMPTS[i % len(RANDOM_PROMPTS)], most) for i in range(self.rows)]
        high = min(manifest.model.vocab_size, manifest.tokens.mask)
        return tuple(tuple(int(t) for t in random.integers(0, high, length)) for length in lengths)

    @property
    def config(self) -> GenerationConfig:
        """Answers without an early end, so that there is something to compare."""
        room = self.session.backend.max_capacity - max(map(len, self.prompts)) - 2 * self.block
        return GenerationConfig(max_new_tokens=max(1, min(MOST_TOKENS, room)))

    def answers(self, session: Session, settings: GenerationConfig) -> list[Completion]:
        """One row at a time."""
        return [session.generate(prompt, settings) for prompt in self.prompts]

    @property
    def block(self) -> int:
        return self.session.bundle.manifest.block

    def most_rows(self, wanted: int) -> int:
        """Rows of one batch, at most `wanted`: an engine is built for so many."""
        engine = self.session.variant.engine
        return wanted if engine is None else min(wanted, engine.max_rows)

    @property
    def is_exact_arithmetic(self) -> bool:
        """Whether tokens must be equal, and not merely mostly so: fp32 has ties, too, but next to none."""
        return self.session.variant.precision == "float32"

    @contextmanager
    def memory(self) -> Iterator[dict[str, int]]:
        """Bytes of the device in use before and after what is done inside; empty where nobody says."""
        seen: dict[str, int] = {}
        name = DeviceName.of(self.device)
        if name.kind == "cuda" and (used := memory_used(name.ordinal)) is not None:
            seen["before"] = used
        yield seen
        if "before" in seen and (used := memory_used(name.ordinal)) is not None:
            seen["after"] = used


@dataclass
class Clocked:
    """A backend that notes the seconds inside its steps: what is left of an answer's time is the host's."""

    backend: Backend
    seconds: float = 0.0
    steps: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def step(
        self,
        cache: Cache,
        first: int,
        input_ids: np.ndarray,
        kv_length: np.ndarray,
        output_index: np.ndarray,
        want_logits: bool,
    ) -> StepOutput:
        began = perf_counter()
        try:
            return self.backend.step(cache, first, input_ids, kv_length, output_index, want_logits)
        finally:
            self.seconds += perf_counter() - began
            self.steps += 1


def same(one: list[Completion], other: list[Completion]) -> int:
    """How many answers are the same tokens."""
    return sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True))
