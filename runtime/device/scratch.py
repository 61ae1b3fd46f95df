"""What a session and its steps take besides the KV memory, weighed before they begin. Knows sizes, no
library.

Bounds from the model's dimensions. ONNX Runtime's arena takes as much again as it has when it grows: where a
limit stands already a session is opened without one, and where it comes later, that is reckoned with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import headroom, machine
from ..bundle.manifest import ModelInfo, Variant

LIBRARY, CODE = 16 << 20, 32 << 20  # what loading ONNX Runtime takes: 14 and 30 MB, on x86-64
GRAPH = 8 << 20  # of a session without weights: nodes, plans, small tensors
FIRST_GROWTH = 8 << 20  # of an arena, whatever is asked of it
FLOAT = 4  # bytes: activations are computed in so many, whatever the weights
BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int4": 0.5}  # of a weight; others have one
MOST_SIZES = 16

Size = tuple[int, int, int]


def require_session(
    model: ModelInfo, weights: int, precision: str, threads: int | None, *, loaded: bool
) -> None:
    """Raise SessionError where a limit leaves less memory than opening a graph on the CPU takes.

    `weights` are bytes. `loaded`: the library is there already. Under a limit memory goes back when it is
    freed, from here on.
    """
    if headroom.is_limited():
        headroom.return_freed()
    # Weights in the layout that products like best take the place of those that were read; of the
    # vocabulary's there are two, one as a table and one for the product.
    copies = 2.0 if precision == "float16" else 1.1
    table = model.vocab_size * model.hidden_size * FLOAT
    num_bytes = int(copies * weights) + table + GRAPH + (0 if loaded else LIBRARY)
    # The thread that runs a step is one of them.
    stacks = headroom.stacks((machine.cores() if threads is None else threads) - 1)
    code = 0 if loaded else CODE
    advice = "use a model of fewer or smaller weights"
    headroom.require(num_bytes, "opening this model", advice, stacks=stacks, code=code)


class Scratch:
    """The memory of a session's steps.

    With an `arena` it is kept: a step that is nowhere larger than one which ran finds it there, but for what
    the arena likes to take besides.
    """

    def __init__(self, model: ModelInfo, inner: int, slot_bytes: int, *, arena: bool = True) -> None:
        self._position = FLOAT * (8 * model.hidden_size + 4 * inner) + slot_bytes
        self._score, self._choice = 3 * FLOAT * model.num_heads, 4 * FLOAT * model.vocab_size
        self._arena, self._ran = arena, tuple[Size, ...]()
        self._grown = 0  # address space that steps took

    @classmethod
    def of(cls, model: ModelInfo, variant: Variant, weights: int, *, arena: bool) -> Scratch:
        """Of a variant with so many bytes of weights, which bound the width of its inner layers."""
        numbers = weights / BYTES.get(variant.precision, 1.0)
        inner = int(numbers / (3 * model.hidden_size * model.num_layers))
        # Entries that the graph does not write in place stand beside the KV memory first.
        slot_bytes = model.entry_bytes(variant.kv_dtype) if variant.kv_layout != "static" else 0
        return cls(model, inner, slot_bytes, arena=arena)

    @contextmanager
    def step(self, rows: int, slots: int, capacity: int, outputs: int) -> Iterator[None]:
        """Raise SessionError where a limit leaves too little for a step; as long as it runs nobody else is
        given its bytes. What it took without an error is known from then on.
        """
        size = (rows * slots, rows * slots * capacity, rows * outputs)
        is_known, is_limited = self._arena and self._has_run(size), headroom.is_limited()
        if is_known and not is_limited:
            yield
            return
        before = headroom.address_space() if self._arena else 0
        needed = 0 if is_known else self.num_bytes(size)
        if self._arena:
            # It grows by twice what it last grew by, whatever is asked of it; where that is not there, by all
            # that is, and leaves nothing for anybody.
            growth = self._grown + FIRST_GROWTH if is_limited else 0
            needed = max(2 * needed, growth)
        with headroom.granted(
            needed,
            f"a step of {rows} x {slots} slots",
            "run fewer rows at once, shorten the prompt, or give another prefill_tokens",
        ):
            yield
        if self._arena:
            self._keep(size, headroom.address_space() - before)

    def _keep(self, size: Size, grown: int) -> None:
        """A step of this size got what it needed, and its session keeps that."""
        self._grown += max(0, grown)
        if not self._has_run(size):
            self._ran = (*[s for s in self._ran if not _holds(size, s)], size)[-MOST_SIZES:]

    def num_bytes(self, size: Size) -> int:
        """What a step of a size takes, at most."""
        positions, scores, outputs = size
        return positions * self._position + scores * self._score + outputs * self._choice

    def _has_run(self, size: Size) -> bool:
        return any(_holds(ran, size) for ran in self._ran)


def _holds(larger: Size, smaller: Size) -> bool:
    return larger[0] >= smaller[0] and larger[1] >= smaller[1] and larger[2] >= smaller[2]
