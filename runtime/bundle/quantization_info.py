"""How the weights of a variant are stored, and what chose their codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..rules import integer


@dataclass(frozen=True, slots=True)
class QuantizerInfo:
    """The method that chose the codes: "round", "gptq", or "checkpoint" if the checkpoint has codes.

    `text_sha256` is the hash of the calibration text; `sequences` and `tokens` say how much of it was used.
    """

    name: str
    text_sha256: str | None = None
    sequences: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """How the weights of a variant are stored.

    `group_size` inputs share a scale; None means one scale for each output channel. `weight_bits` is the
    width of the codes of Linear weights. `quantizer` is None if it is unknown.
    """

    group_size: Annotated[int | None, integer(1, high=2**53)]
    symmetric: bool
    head: str
    embedding: str
    quantizer: QuantizerInfo | None = None
    weight_bits: int | None = None
