"""What an answer is: an event for each step, a stream of them, and the whole when it is done. Knows rows and
texts, and no session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..decode.row import Accepted, FinishReason, Row
from ..decode.stats import Stats
from ..text.tokenizer import TextStream


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `text` is "" for a bundle without a tokenizer; `confidences[i]` belongs to
    `token_ids[i]`.
    """

    text: str
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    finish_reason: FinishReason
    stats: Stats

    @classmethod
    def of(cls, row: Row, text: TextStream | None, confidences: Sequence[float]) -> Completion:
        """What a row has produced so far."""
        if text is not None and row.finish_reason is not None:
            text.finish()
        ids, reason = tuple(row.tokens[row.stats.prompt_tokens :]), row.finish_reason or "cancelled"
        return cls(text.text if text else "", ids, tuple(confidences), reason, row.stats)


@dataclass(frozen=True, slots=True)
class Event:
    """What one step added to a stream; no tokens for a prefill chunk, or for an end without any.

    `text` may lag behind the tokens: half characters and possible stop strings are held back. The first
    `verified` tokens had been proposed and held; those at the places `forced` are a grammar's.
    """

    text: str
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    finish_reason: FinishReason | None
    verified: int = 0
    forced: tuple[int, ...] = ()

    @classmethod
    def of(cls, accepted: Accepted, text: str) -> Event:
        """What a step accepted, with the text that became certain."""
        token_ids, confidences = accepted.token_ids, accepted.confidences
        return cls(text, token_ids, confidences, accepted.finish_reason, accepted.verified, accepted.forced)


class Answer:
    """An answer that grows: its row, its text and the confidences so far. `tau` and `exact` may be changed
    while it does.
    """

    def __init__(self, row: Row, text: TextStream | None) -> None:
        self._row, self._text = row, text
        self._confidences: list[float] = []

    @property
    def tau(self) -> float | None:
        """None in exact mode. A number that is put here counts from the next step on, and ends exact mode."""
        return self._row.config.tau

    @tau.setter
    def tau(self, value: float) -> None:
        self._row.config = self._row.config.with_values(tau=value)

    @property
    def exact(self) -> bool:
        """True may be put here at any time, too: one-token text follows what is there."""
        return self._row.config.exact is True

    @exact.setter
    def exact(self, value: bool) -> None:
        self._row.config = self._row.config.with_values(exact=value)

    @property
    def stats(self) -> Stats:
        return self._row.stats

    @property
    def completion(self) -> Completion:
        """The answer so far; `finish_reason` is "cancelled" while it is not finished."""
        return Completion.of(self._row, self._text, self._confidences)

    def _event(self, accepted: Accepted) -> Event:
        """Take in what a step accepted."""
        self._confidences += accepted.confidences
        return Event.of(accepted, self._grown(accepted.finish_reason))

    def _grown(self, finish_reason: FinishReason | None) -> str:
        """The text that became certain."""
        if self._text is None:
            return ""
        return self._text.read() if finish_reason is None else self._text.finish()


class Stream(Answer):
    """Events of one answer, made as they are asked for. Leaving early costs nothing."""

    def __init__(self, row: Row, text: TextStream | None, steps: Iterator[list[Accepted]]) -> None:
        super().__init__(row, text)
        self._steps = steps
        self.failed = False

    def __iter__(self) -> Iterator[Event]:
        for accepted in self._steps:
            if not accepted:
                yield Event("", (), (), None)
            for event in accepted:
                if event.error is not None:
                    self.failed = True
                    raise event.error
                yield self._event(event)

    @property
    def prefilled(self) -> int:
        """Prompt tokens that are in the cache."""
        return min(self._row.cursor, self._row.stats.prompt_tokens)

    @property
    def is_over(self) -> bool:
        return self._row.finish_reason is not None

    def cancel(self) -> None:
        """End the answer after the event in hand."""
        if self._row.finish_reason is None:
            self._row.finish_reason = "cancelled"

    def close(self) -> None:
        """End the answer now, and give its memory back."""
        self.cancel()
        for _ in self._steps:
            pass
