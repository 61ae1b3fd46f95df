"""The comparison with fp32 on a page: figures of known logits, programs that fail, and the page itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import quality

from peers.process import PeerError
from peers.protocol import Request

VOCAB, MASK = 4, 3


class Scripted:
    """A program whose logits at token t are `scale` at token t + 1, and `mask` at the mask token."""

    def __init__(self, scale: float, mask: float = -50.0, broken: bool = False) -> None:
        self.scale, self.mask, self.broken = scale, mask, broken

    def answer(self, request: Request) -> None:
        if self.broken:
            raise PeerError("no logits")
        logits = np.zeros((len(request.prompt), VOCAB), np.float32)
        logits[np.arange(len(logits)), (np.array(request.prompt) + 1) % 3] = self.scale
        logits[:, MASK] = self.mask
        np.save(request.settings["logits"], logits)


def measured(**others: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    texts = quality.Texts(MASK, {"prose": [quality.Piece([0, 1, 2, 0]), quality.Piece([2, 0, 1, 1], 2)]})
    absent: dict[str, str] = {}
    processes: Any = {quality.REFERENCE: Scripted(2.0), **others}
    return {row["system"]: row for row in quality.measure(processes, texts, absent)}, absent


def test_figures_are_those_of_the_distributions() -> None:
    found, absent = measured(same=Scripted(2.0, mask=90.0), less=Scripted(1.0), wrong=Scripted(-1.0))
    p, q = math.exp(2) / (math.exp(2) + 2), math.exp(1) / (math.exp(1) + 2)
    ours, same, less, wrong = (found[name] for name in (quality.REFERENCE, "same", "less", "wrong"))
    assert ours["tokens"] == 3 and absent == {}  # two of the first piece, one of the second
    assert same | {"system": quality.REFERENCE} == ours, "the mask is never predicted"
    # Two tokens follow as scripted, the last one does not.
    losses = 2 * -math.log(p) - math.log((1 - p) / 2)
    assert math.isclose(ours["perplexity"], math.exp(losses / 3), abs_tol=1e-3)
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert math.isclose(less["kl"], divergence, abs_tol=1e-5)
    assert (ours["top1_equal"], less["top1_equal"], wrong["top1_equal"]) == (1, 1, 0)
    assert less["perplexity_change"] != 0 == ours["perplexity_change"]
    assert "| less | 100.0%" in quality.table(list(found.values()))


def test_a_program_that_fails_is_named() -> None:
    found, absent = measured(broken=Scripted(1.0, broken=True))
    assert set(found) == {quality.REFERENCE} and absent == {"broken": "no logits"}


def test_the_page_is_text_of_its_own() -> None:
    page = (Path(quality.ROOT) / "pages" / "prose.txt").read_text(encoding="utf-8")
    assert len(page.split()) > 1500
