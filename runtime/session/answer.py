"""An answer: an event for each step, a stream of events, and the completion at the end."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass

from ..decode.sample import Top
from ..decode.sequence import Accepted, FinishReason, Sequence
from ..decode.stats import Stats
from ..text.stream import TextStream


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
    def of(cls, events: abc.Sequence[Event], text: str, reason: FinishReason, stats: Stats) -> Completion:
        """The answer of `events`."""
        token_ids = tuple(token for event in events for token in event.token_ids)
        confidences = tuple(p for event in events for p in event.confidences)
        tops = tuple(top for event in events for top in event.top_logprobs)
        return cls(text, token_ids, confidences, reason, stats, tops)


@dataclass(frozen=True, slots=True)
class Event:
    """The addition of one step to an answer. It has no tokens for a prefill chunk, and possibly at the end.

    `text` may come later than its tokens: incomplete characters and possible stop strings are held back.
    `accepted_draft_tokens`: how many of the first tokens were draft tokens that held. `forced`: positions of
    the tokens that a grammar forced. `top_logprobs`: of each token, if the config asks for them. `texts`: of
    each token, at once, with the text that `text` holds back.
    """

    text: str
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    finish_reason: FinishReason | None
    accepted_draft_tokens: int = 0
    forced: tuple[int, ...] = ()
    top_logprobs: tuple[Top, ...] = ()
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, accepted: Accepted, stream: TextStream | None) -> Event:
        """The event of what a step accepted, with its text from the sequence's own `stream`."""
        text, texts = "", ("",) * len(accepted.token_ids)
        if stream is not None:
            text = stream.read() if accepted.finish_reason is None else stream.finish()
            texts = stream.take_token_texts(len(accepted.token_ids))
        how = (accepted.finish_reason, accepted.accepted_draft_tokens, accepted.forced, accepted.top_logprobs)
        return cls(text, accepted.token_ids, accepted.confidences, *how, texts)


class Answer:
    """A growing answer: its sequence, its text and its events so far. `tau` and `exact` may be changed at
    any time.
    """

    def __init__(self, seq: Sequence, text: TextStream | None) -> None:
        self.seq, self._text = seq, text
        self._events: list[Event] = []

    @property
    def tau(self) -> float | None:
        """None in exact mode. Setting it ends exact mode, from the next step on."""
        return self.seq.next_config.tau

    @tau.setter
    def tau(self, value: float) -> None:
        self.seq.change(tau=value)

    @property
    def exact(self) -> bool:
        """Setting it to True continues with the one-token text of the answer so far."""
        return self.seq.next_config.exact is True

    @exact.setter
    def exact(self, value: bool) -> None:
        self.seq.change(exact=value)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return None if self._text is None else self._text.stop_string

    @property
    def stats(self) -> Stats:
        return self.seq.stats


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
                self._events.append(Event.of(event, self._text))
                yield self._events[-1]

    @property
    def completion(self) -> Completion:
        """The answer so far; `finish_reason` is "cancelled" until it is finished."""
        text = self._text
        if text is not None and self.is_over:
            text.complete()
        reason = self.seq.finish_reason or "cancelled"
        return Completion.of(self._events, text.text if text is not None else "", reason, self.stats)

    @property
    def prefilled(self) -> int:
        """Prompt tokens that are in the cache."""
        return min(self.seq.cursor, self.seq.stats.prompt_tokens)

    @property
    def is_over(self) -> bool:
        return self.seq.is_over

    def cancel(self) -> None:
        """End the answer after the current event."""
        self.seq.end("cancelled")

    def close(self) -> None:
        """End the answer now, and free its memory."""
        self.cancel()
        for _ in self._steps:
            pass
