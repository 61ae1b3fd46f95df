"""A session over a fake device, as much of one as a benchmark needs: texts are tokens in figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mars_export.runtime.decode.batch import KvBudget
from mars_export.runtime.decode.row import Row
from support.fake import MASK, FakeBackend

BLOCK = 4


class Words:
    """The growing text of a fake answer: its tokens in figures."""

    def __init__(self) -> None:
        self.text, self.shown, self.stopped = "", 0, False

    def push(self, token: int) -> bool:
        self.text += f"{token} "
        return False

    def read(self) -> str:
        shown, self.shown = self.shown, len(self.text)
        return self.text[shown:]

    finish = read


def fake_session(backend: FakeBackend) -> Any:
    """As much of a session as a batcher and a benchmark need."""

    def new_row(index: int, prompt: Any, config: Any, *_: Any, **__: Any) -> Any:
        words = Words()
        return Row(index, [1 + len(m["content"]) for m in prompt], config, (), words.push), words

    tokens = SimpleNamespace(mask=MASK, eos=())
    manifest = SimpleNamespace(
        block=BLOCK, source="fake", tokens=tokens, mask_id=MASK, masks=None, draft=None
    )
    return SimpleNamespace(
        backend=backend,
        bundle=SimpleNamespace(manifest=manifest),
        variant=SimpleNamespace(name="fake"),
        check=lambda _config: None,
        kv_budget=KvBudget,
        new_row=new_row,
        text=Words(),
        policy=lambda: None,
        cost=None,
    )


def predict(known: tuple[int, ...], masks: int) -> tuple[int, float]:
    """Sure of all but every fifth token."""
    at = len(known) + masks
    return 1 + at % 9, 0.1 if at % 5 == 0 else 0.99
