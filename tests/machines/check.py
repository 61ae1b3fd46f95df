"""What the bundles of bundles.py say on this processor and this release of ONNX Runtime, as JSON.

    python tests/machines/check.py FOLDER PRECISION...

Needs the runtime only. Reports and judges nothing: table.py does.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from mars_export import GenerationConfig, Session
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.decode.speculation.cost import Cost

PIECES = (1, 2, 7, 128)
LAST = 16


def logits(session: Session, ids: Sequence[int], piece: int) -> np.ndarray:
    """[tokens, vocab]; the last 16 tokens are fed in pieces, or all in two of which one is wide."""
    cache, parts = session.backend.new_cache(1), []
    first = piece if piece > LAST else len(ids) - LAST
    for start in (0, *range(first, len(ids), piece)):
        part = np.array([ids[start : start + piece] if start else ids[:first]])
        cache.reserve(start + part.size, [start])
        index = np.arange(part.size)[None]
        parts.append(
            session.backend.step(cache, 0, StepInput(part, np.array([start]), index), True).logits[0]
        )
    return np.concatenate(parts)


def check(bundle: Path, prompts: list[list[int]], new: int) -> dict[str, Any]:
    config = GenerationConfig(max_new_tokens=new, masks="full")
    sessions = [Session.open(bundle, threads=1, cache_bytes=size) for size in (0, 1 << 24)]
    for session in sessions:
        session.cost = Cost(((1, 1.0),))
    plain, saving = sessions
    exact = [plain.generate(prompt, config) for prompt in prompts]
    one = [plain.generate(prompt, config.with_values(tau=1.0)) for prompt in prompts]
    again = [[saving.generate(prompt, config) for prompt in prompts] for _ in range(2)][1]
    longest = max(prompts, key=len)
    whole = logits(plain, longest, len(longest))
    return {
        "exact": [done.token_ids for done in exact],
        "one": [done.token_ids for done in one],
        "stored": sum(
            (a.token_ids, a.confidences) == (b.token_ids, b.confidences)
            for a, b in zip(exact, again, strict=True)
        ),
        "hits": saving.prefix_stats.hits,
        "pieces": [piece for piece in PIECES if np.array_equal(whole, logits(plain, longest, piece))],
    }


def main(folder: Path, precisions: Sequence[str]) -> None:
    questions = json.loads((folder / "questions.json").read_text())
    forms = {name: check(folder / name, questions["prompts"], questions["new"]) for name in precisions}
    versions = {"onnxruntime": onnxruntime.__version__, "python": platform.python_version()}
    json.dump({"versions": versions, "forms": forms}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
