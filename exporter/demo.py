"""The demo: exports the default checkpoint once, then answers a few requests in three modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

from ..runtime.bundle.files import MANIFEST_FILE
from ..runtime.decode.config import GenerationConfig
from ..runtime.decode.stats import Stats
from ..runtime.session.session import Session
from .checkpoint import default as embedded
from .checkpoint.open import open_checkpoint
from .checkpoint.tensors import read_json
from .export import Progress, export_onnx, producer
from .export_options import ExportOptions

MOST_TOKENS = 128
TOOLS = "Reply with tool calls."
REQUESTS = (
    (TOOLS, "turn on the kitchen light and set a timer for 12 minutes"),
    (TOOLS, "text Maria that I will be late"),
    (TOOLS, "set the heating in the bedroom to 19 degrees and lock the front door"),
    (None, "Tom has 12 apples. He buys 5 more and gives 4 away. How many apples are left?"),
    (None, "What is the capital of France?"),
)


@dataclass(frozen=True, slots=True)
class Mode:
    """Settings of an answer, and the name they are shown by."""

    name: str
    config: GenerationConfig


# One token a step comes first, because the others are compared with it.
MODES = (
    Mode("one token", GenerationConfig(tau=1.0, max_new_tokens=MOST_TOKENS)),
    Mode("exact", GenerationConfig(max_new_tokens=MOST_TOKENS)),
    Mode("tau 0.95", GenerationConfig(tau=0.95, max_new_tokens=MOST_TOKENS)),
)


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One request answered in one mode; `seconds` is wall clock of the whole answer, prefill included.

    `same`: the text equals that of one token a step, which exact mode guarantees.
    """

    request: str
    mode: str
    tau: float | None
    text: str
    same: bool
    seconds: float
    stats: Stats

    @property
    def tokens_per_second(self) -> float:
        return self.stats.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"stats": self.stats.to_dict()}


@dataclass(frozen=True, slots=True)
class Summary:
    """All requests in one mode.

    `tokens_per_second` is wall clock with prefill, `speed_up` is relative to one token a step, and `same`
    counts the answers that have its text.
    """

    mode: str
    answers: int
    same: int
    tokens: int
    forwards: int
    tokens_per_second: float
    speed_up: float

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards


def prepare(output: Path | None, progress: Progress | None = None) -> Path:
    """Export the default checkpoint to `output` (by default in the cache), unless it is already there."""
    target = output or embedded.cache_directory() / "default.bundle"
    identity = embedded.adapter_digest()
    if (target / MANIFEST_FILE).is_file():
        manifest = read_json(target / MANIFEST_FILE)
        if manifest.get("producer") == producer() and manifest.get("revision") == identity:
            return target
    export_onnx(open_checkpoint(None), target, ExportOptions(), force=output is None, progress=progress)
    return target


def answers(bundle: Path, threads: int | None) -> Iterator[DemoAnswer]:
    """Answer each request in each mode, after one answer in each mode to warm up."""
    session = Session.open(bundle, threads=threads, cache_bytes=0)
    for mode in MODES:
        session.generate("warm up", mode.config.with_values(max_new_tokens=16))
    for system, request in REQUESTS:
        messages = ([{"role": "system", "content": system}] if system else []) + [
            {"role": "user", "content": request}
        ]
        expected: tuple[int, ...] | None = None
        for mode in MODES:
            start = perf_counter()
            completion = session.generate(messages, mode.config)
            seconds = perf_counter() - start
            expected = completion.token_ids if expected is None else expected
            same = completion.token_ids == expected
            tau = mode.config.tau
            yield DemoAnswer(request, mode.name, tau, completion.text, same, seconds, completion.stats)


def summarize(answers: Sequence[DemoAnswer]) -> list[Summary]:
    """One line for each mode, in the order of MODES."""
    lines: list[Summary] = []
    for mode in MODES:
        in_mode = [a for a in answers if a.mode == mode.name]
        tokens, forwards = sum(a.stats.tokens for a in in_mode), sum(a.stats.forwards for a in in_mode)
        speed = tokens / sum(a.seconds for a in in_mode)
        speed_up = speed / lines[0].tokens_per_second if lines else 1.0
        same = sum(a.same for a in in_mode)
        lines.append(Summary(mode.name, len(in_mode), same, tokens, forwards, speed, speed_up))
    return lines
