"""CUDA graphs of ONNX Runtime's CUDA provider: which steps are captured, under which number, and whether what
they say is right. Names no library.

With `enable_cuda_graph` the provider captures the kernels of a run under the number that the run's options
give, and replays them for later runs of that number: with the addresses and shapes of the capture, and with
what operators on the CPU had computed then. So a number stands for one set of addresses and shapes, and
numbers are few, because captured steps are kept as long as the session. Whether replays see all of a step's
inputs is tried when a session is opened, on rows of nobody: a wrong one may write anywhere in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..decode.backend import StepOutput
from .binding import Binding, StepInput
from .filling import least
from .lost import is_lasting

OPTION, NUMBER, PLAIN = "enable_cuda_graph", "gpu_graph_id", -1
ON = ("1", "true", "True")
MOST = 128  # captured steps of a session
MOST_SEEN = 4096  # shapes that are remembered to have come once
CLOSE = {"float32": 1e-3, "float16": 1e-2}  # how far confidences of two equal steps may lie apart


@dataclass(slots=True)
class Captured:
    """A step of one shape on one memory: bound for good, as its capture is."""

    binding: Binding
    number: int
    runs: int = 0


class Graphs:
    """The captured steps of one session. `run_options` makes ONNX Runtime's options of a run from entries."""

    def __init__(self, block: int, kv_dtype: str, run_options: Callable[[Mapping[str, str]], Any]) -> None:
        # A captured step of few slots takes as long as one of a few more, and each size has its own.
        self.sizes = sorted({1, block, 2 * block - 1})
        self._close, self._run_options = CLOSE[kv_dtype], run_options
        self.plain = run_options({NUMBER: str(PLAIN)})
        self._options: dict[int, Any] = {}
        self._steps: dict[Hashable, Captured] = {}
        self._seen: set[Hashable] = set()
        self.reason: str | None = None
        """Why no step is replayed any more."""

    @property
    def count(self) -> int:
        """Steps that were captured."""
        return sum(step.runs > 0 for step in self._steps.values())

    def fill(self, given: StepInput) -> StepInput | None:
        """The step in one of the sizes, filled up with slots and predictions that nobody asked for; None for
        a step that is wider than all of them.
        """
        (rows, slots), asked = given.input_ids.shape, given.output_index.shape[1]
        wide, count = least(self.sizes, slots), least(self.sizes, asked)
        if wide > self.sizes[-1] or count > self.sizes[-1]:
            return None
        ids, index = np.zeros((rows, wide), np.int64), np.zeros((rows, count), np.int64)
        ids[:, :slots], index[:, :asked] = given.input_ids, given.output_index
        return StepInput(ids, given.kv_length, index)

    def find(self, key: Hashable, bind: Callable[[], Binding]) -> Captured | None:
        """The step of this key. None for one that is to run plainly: it never came before, or there are as
        many as there may be.
        """
        if key in self._steps:
            return self._steps[key]
        if key not in self._seen:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
            return None
        if len(self._steps) >= MOST:
            return None
        number = len(self._steps) + 1  # 0 is the provider's own
        self._options[number] = self._run_options({NUMBER: str(number)})
        step = self._steps[key] = Captured(bind(), number)
        return step

    def run(self, step: Captured) -> None:
        """Run a step whose inputs are written. Where the provider fails to capture or replay it nothing is
        replayed from then on, and the step runs plainly.
        """
        try:
            step.binding.run(self._options[step.number])
            step.runs += 1
        except Exception as error:  # onnxruntime raises its own classes, and plain RuntimeError
            if is_lasting(str(error)):
                raise
            self.give_up(f"a step could not be captured or replayed: {error}")
            step.binding.run(self.plain)

    def agree(self, found: StepOutput, right: StepOutput) -> bool:
        """Whether two steps with the same inputs said the same."""
        return np.array_equal(found.token_ids, right.token_ids) and np.allclose(
            found.confidence, right.confidence, rtol=0, atol=self._close
        )

    def give_up(self, reason: str) -> None:
        self.reason = reason.strip().splitlines()[0]
        self._steps.clear()
        self._seen.clear()


def run_options(ort: Any, entries: Mapping[str, str]) -> Any:
    """ONNX Runtime's options of a run."""
    options = ort.RunOptions()
    for name, value in entries.items():
        options.add_run_config_entry(name, value)
    return options
