"""Splits the thinking from the text of a growing answer."""

from __future__ import annotations

from typing import Literal

from ..bundle.turns import ThinkingMarks


class ThinkingStream:
    """Splits a growing answer into the thinking at its beginning and the text after it.

    The thinking is between the marks; `is_open`: the prompt ends with the opening one. Everything else is
    text, also later marks. The marks, with the white space next to them, belong to neither.
    """

    def __init__(self, marks: ThinkingMarks, *, is_open: bool = False) -> None:
        self._marks = marks
        self.is_open = is_open
        self._place: Literal["start", "begun", "thinking", "closed", "text"] = "begun" if is_open else "start"
        self._held = ""
        self._num_pushed = self._num_thinking = 0

    @property
    def is_undecided(self) -> bool:
        """Whether the answer may still begin with the opening mark."""
        return self._place == "start"

    @property
    def num_thinking(self) -> int:
        """Characters at the beginning of the answer that are thinking or marks, as far as it is known."""
        return self._num_pushed if self._place in ("begun", "thinking", "closed") else self._num_thinking

    @property
    def answer_start(self) -> int | None:
        """Characters before the text of the answer; None while it has not begun."""
        return self._num_thinking if self._place == "text" else None

    def push(self, text: str) -> tuple[str, str]:
        """The thinking and the text that `text` adds."""
        self._num_pushed += len(text)
        self._held += text
        thinking = ""
        if self._place == "start":
            said = self._held.lstrip()
            if said.startswith(self._marks.open):
                self._place, self._held = "begun", said[len(self._marks.open) :]
            elif not self._marks.open.startswith(said):
                self._place = "text"
        if self._place == "begun":
            self._held = self._held.lstrip()
            if self._held:
                self._place = "thinking"
        if self._place == "thinking":
            thinking = self._think()
        if self._place == "closed":
            self._held = self._held.lstrip()
            if self._held:
                self._place, self._num_thinking = "text", self._num_pushed - len(self._held)
        if self._place != "text":
            return thinking, ""
        text, self._held = self._held, ""
        return thinking, text

    def finish(self) -> tuple[str, str]:
        """The held-back rest, at the end of the answer."""
        held, self._held = self._held, ""
        return (held, "") if self._place == "thinking" else ("", held)

    def _think(self) -> str:
        """The thinking up to the closing mark; white space and a beginning of the mark are held back."""
        close = self._marks.close
        before, mark, after = self._held.partition(close)
        if mark:
            self._place, self._held = "closed", after
            return before.rstrip()
        num = next(n for n in range(len(close), -1, -1) if self._held.endswith(close[:n]))
        thinking = self._held[: len(self._held) - num].rstrip()
        self._held = self._held[len(thinking) :]
        return thinking
