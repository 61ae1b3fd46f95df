"""The step graph of a hybrid as a backend of the decoding loop, which stays as it is."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from mars_export.runtime.decode.backend import Cache, StepOutput, bucket

from .graph import Shape

MAX_SLOTS = 256


class HybridCache:
    """KV entries, and for each linear layer a state, and a ring of entries that the state may lack.

    The states hold the first `state_length` tokens of each row. A step brings them to its cursor: what lies
    between became final in the last step. A cursor behind the state is that of another text, from 0.
    """

    def __init__(self, shape: Shape, num_rows: int) -> None:
        self.shape, self.num_rows, self.capacity = shape, num_rows, 0
        self.ring = MAX_SLOTS + shape.kernel - 1
        self.state_length = np.zeros(num_rows, np.int64)
        self.arrays: dict[str, np.ndarray] = {}
        for i in range(len(shape.linear)):
            for name, sizes in shape.memory(i, num_rows, 0, self.ring).items():
                self.arrays[name] = np.zeros(sizes, np.float32)

    def reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        more = bucket(capacity, self.capacity) - self.capacity
        self.capacity += more
        for name in self.arrays:
            if name.endswith(("key", "value")):
                self.arrays[name] = np.pad(self.arrays[name], ((0, 0), (0, 0), (0, more), (0, 0)))

    def begin(self, first: int, cursors: np.ndarray) -> None:
        """Before a step: states of earlier texts are zeroed."""
        for row, cursor in enumerate(cursors.tolist(), first):
            if cursor < self.state_length[row]:
                assert cursor == 0, "a state cannot go back"
                self.state_length[row] = 0
                for name, array in self.arrays.items():
                    if name.endswith("state"):
                        array[row] = 0

    def move(self, source: int, target: int, length: int) -> None:  # noqa: ARG002
        """The whole row: a state has no entries."""
        self.state_length[target] = self.state_length[source]
        for array in self.arrays.values():
            array[target] = array[source]


class HybridBackend:
    """`steps`: slots, and slots of the catch-up, of each forward."""

    outputs = ("token_ids", "confidence")
    max_slots, max_outputs, reproducible_slots, kv_device = MAX_SLOTS, None, None, "cpu"

    def __init__(self, model: bytes, shape: Shape, max_capacity: int, threads: int = 2) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.shape, self.max_capacity = shape, max_capacity
        self.steps: list[tuple[int, int]] = []

    def new_cache(self, num_rows: int) -> HybridCache:
        return HybridCache(self.shape, num_rows)

    def step(
        self,
        cache: Cache,
        first: int,
        input_ids: np.ndarray,
        kv_length: np.ndarray,
        output_index: np.ndarray,
        want_logits: bool,
    ) -> StepOutput:
        assert isinstance(cache, HybridCache) and not want_logits
        cache.begin(first, kv_length)
        rows = slice(first, first + len(input_ids))
        behind = kv_length - cache.state_length[rows]
        feeds = {"input_ids": input_ids, "kv_length": kv_length, "state_length": cache.state_length[rows]}
        catch_up = max(1, int(behind.max()))
        feeds["catch_up"] = np.array([catch_up])
        names = list(cache.arrays)
        feeds |= {f"past.{name}": cache.arrays[name][rows] for name in names}
        wanted = ["token_ids", "confidence", *(f"present.{name}" for name in names)]
        tokens, confidence, *memory = self.session.run(wanted, feeds)
        for name, array in zip(names, memory, strict=True):
            cache.arrays[name][rows] = array
        cache.state_length[rows] = kv_length
        self.steps.append((input_ids.shape[1], catch_up))
        chosen = [np.take_along_axis(a, output_index, 1) for a in (tokens, confidence)]
        return StepOutput(chosen[0], chosen[1])
