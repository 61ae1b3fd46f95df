"""The demo: the default checkpoint exported once, then a few requests answered at two settings of tau."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ..runtime import GenerationConfig, Session, Stats
from ..runtime.bundle.manifest import MANIFEST_FILE
from .checkpoint import default as embedded
from .checkpoint.open import open_checkpoint
from .checkpoint.tensors import read_json
from .export import ExportOptions, Progress, export_onnx, producer

TAUS = (1.0, 0.95)
TOOLS = "Reply with tool calls."
REQUESTS = (
    (TOOLS, "turn on the kitchen light and set a timer for 12 minutes"),
    (TOOLS, "text Maria that I will be late"),
    (TOOLS, "set the heating in the bedroom to 19 degrees and lock the front door"),
    (None, "Tom has 12 apples. He buys 5 more and gives 4 away. How many apples are left?"),
    (None, "What is the capital of France?"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request answered at one tau; `seconds` is wall clock of the whole answer, prefill included."""

    request: str
    tau: float
    text: str
    seconds: float
    stats: Stats

    def to_dict(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "tau": self.tau,
            "text": self.text,
            "seconds": self.seconds,
            "stats": self.stats.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """All requests at one tau.

    `tokens_per_second` is wall clock with prefill, `speed_up` is relative to the first tau.
    """

    tau: float
    tokens: int
    forwards: int
    tokens_per_forward: float
    tokens_per_second: float
    speed_up: float


def prepare(output: Path | None, progress: Progress | None = None) -> Path:
    """Export the default checkpoint to `output` (the cache by default), unless the same is there."""
    target = output or embedded.cache_directory() / "default.bundle"
    identity = embedded.adapter_digest()
    if (target / MANIFEST_FILE).is_file():
        manifest = read_json(target / MANIFEST_FILE)
        if manifest.get("producer") == producer() and manifest.get("revision") == identity:
            return target
    export_onnx(open_checkpoint(None), target, ExportOptions(), force=output is None, progress=progress)
    return target


def answers(bundle: Path, threads: int | None) -> Iterator[Answer]:
    """Answer each request at each tau, after one unmeasured run that warms everything up."""
    session = Session.open(bundle, threads=threads, cache_bytes=0)
    session.generate("warm up", GenerationConfig(max_new_tokens=16, tau=0.0))
    for system, request in REQUESTS:
        messages = ([{"role": "system", "content": system}] if system else []) + [
            {"role": "user", "content": request}
        ]
        for tau in TAUS:
            begun = perf_counter()
            done = session.generate(messages, GenerationConfig(tau=tau, max_new_tokens=128))
            yield Answer(request, tau, done.text, perf_counter() - begun, done.stats)


def summarize(answers: Sequence[Answer]) -> list[Summary]:
    """One line for each tau, in the order of TAUS."""
    lines: list[Summary] = []
    for tau in TAUS:
        same_tau = [a for a in answers if a.tau == tau]
        tokens, forwards = sum(a.stats.tokens for a in same_tau), sum(a.stats.forwards for a in same_tau)
        speed = tokens / sum(a.seconds for a in same_tau)
        lines.append(
            Summary(
                tau,
                tokens,
                forwards,
                tokens / forwards,
                speed,
                speed / lines[0].tokens_per_second if lines else 1.0,
            )
        )
    return lines
