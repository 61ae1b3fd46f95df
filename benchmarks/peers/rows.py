"""The rows that everyone answers: held-out test rows as token ids, and who answered them rightly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mars_export.calibration.tasks import tasks
from mars_export.calibration.tasks.scores import Output
from mars_export.calibration.tasks.tasks import TaskRow
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.text.tokenizer import Text

DATA = Path(__file__).resolve().parent.parent.parent / "examples" / "default-checkpoint" / "data"


@dataclass(frozen=True, slots=True)
class Prompts:
    """The rows of a task for one model: token ids, the model's special tokens, and how answers are judged."""

    task: str
    rows: tuple[TaskRow, ...]
    ids: tuple[tuple[int, ...], ...]
    eos: tuple[int, ...]
    mask: int
    text: Text

    def accuracy(self, answers: Sequence[Sequence[int]]) -> float:
        """Share of rows answered rightly; `answers` are token ids with the end token."""
        made = [Output(self.text.tokenizer.decode([i for i in ids if i not in self.eos])) for ids in answers]
        return sum(row.score(output) for row, output in zip(self.rows, made, strict=False)) / max(
            len(made), 1
        )


def read(task: str, count: int, bundle: Path) -> Prompts:
    """The first `count` test rows of a task, encoded as the bundle does."""
    opened = open_bundle(bundle)
    text, tokens = Text.load(opened), opened.manifest.tokens
    rows = tuple(tasks.load(DATA / f"{task}.test.jsonl")[:count])
    return Prompts(
        task, rows, tuple(tuple(text.encode(row.prompt)) for row in rows), tokens.eos, tokens.mask, text
    )
