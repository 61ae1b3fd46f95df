"""An answer: an event for each step, a stream of events, and the completion at the end."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..decode.sample import Top
from ..decode.sequence import Accepted, FinishReason, Sequence
from ..decode.speculation.draft_slots import check_tau
from ..decode.stats import Stats
from ..text.tokenizer import TextStream


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `text` is "" for a bundle without a tokenizer; `confidences[i]` and,
    if the config asks for them, `top_logprobs[i]` (ids and log-probabilities, best first) belong to
    `token_ids[i]`.
    """

    text: str
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    finish_reason: FinishReason
    stats: Stats
    top_logprobs: tuple[Top, ...] = ()

    @classmethod
    def of(cls, seq: Sequence, text: TextStream | None, confidences: abc.Sequence[float]) -> Completion:
        """The sequence's answer so far."""
        if text is not None and seq.finish_reason is not None:
            text.complete()
        ids, reason = tuple(seq.tokens[seq.stats.prompt_tokens :]), seq.finish_reason or "cancelled"
        tops = tuple(seq.top_logprobs)
        return cls(text.text if text else "", ids, tuple(confidences), reason, seq.stats, tops)


@dataclass(frozen=True, slots=True)
class Event:
    """The addition of one step to an answer. It has no tokens for a prefill chunk, and possibly at the end.

    `text` may come later than its tokens: incomplete characters and possible stop strings are held back.
    `accepted_draft_tokens`: how many of the first tokens were draft tokens that held. `forced`: positions of
    the tokens that a grammar forced. `top_logprobs`: of each token, if the config asks for them.
    """

    text: str
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    finish_reason: FinishReason | None
    accepted_draft_tokens: int = 0
    forced: tuple[int, ...] = ()
    top_logprobs: tuple[Top, ...] = ()

    @classmethod
    def of(cls, accepted: Accepted, text: str) -> Event:
        """The event of what a step accepted, with the text that became final."""
        how = (accepted.finish_reason, accepted.accepted_draft_tokens, accepted.forced, accepted.top_logprobs)
        return cls(text, accepted.token_ids, accepted.confidences, *how)


class Answer:
    """A growing answer: its sequence, its text and the confidences so far. `tau` and `exact` may be changed
    at any time.
    """

    def __init__(self, seq: Sequence, text: TextStream | None) -> None:
        self._row, self._text = seq, text
        self._confidences: list[float] = []

    @property
    def tau(self) -> float | None:
        """None in exact mode. Setting it ends exact mode, from the next step on."""
        return self._row.config.tau

    @tau.setter
    def tau(self, value: float) -> None:
        self._set(tau=value)

    @property
    def exact(self) -> bool:
        """Setting it to True continues with the one-token text of the answer so far."""
        return self._row.config.exact is True

    @exact.setter
    def exact(self, value: bool) -> None:
        self._set(exact=value)

    def _set(self, **changes: Any) -> None:
        config = self._row.config.with_values(**changes)
        if self._row.draft_slots is not None:
            check_tau(config)
        self._row.config = config

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return None if self._text is None else self._text.stop_string

    @property
    def stats(self) -> Stats:
        return self._row.stats

    @property
    def completion(self) -> Completion:
        """The answer so far; `finish_reason` is "cancelled" until it is finished."""
        return Completion.of(self._row, self._text, self._confidences)

    def _event(self, accepted: Accepted) -> Event:
        """Add what a step accepted."""
        self._confidences += accepted.confidences
        return Event.of(accepted, self._grown(accepted.finish_reason))

    def _grown(self, finish_reason: FinishReason | None) -> str:
        """The text that became final."""
        if self._text is None:
            return ""
        return self._text.read() if finish_reason is None else self._text.finish()


class Stream(Answer):
    """Events of one answer, computed when they are read. It may be left early."""

    def __init__(self, seq: Sequence, text: TextStream | None, steps: Iterator[list[Accepted]]) -> None:
        super().__init__(seq, text)
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
        """End the answer after the current event."""
        if self._row.finish_reason is None:
            self._row.finish_reason = "cancelled"

    def close(self) -> None:
        """End the answer now, and free its memory."""
        self.cancel()
        for _ in self._steps:
            pass
