"""An answer: a stream of events, and the completion at the end."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass

from ..decode.event import Event, FinishReason
from ..decode.sample import Top
from ..decode.sequence import Sequence
from ..decode.stats import Stats


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


class Answer:
    """A growing answer: its sequence and its events so far. `tau` and `exact` may be changed at any time."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
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
        return None if self.seq.stream is None else self.seq.stream.stop_string

    @property
    def stats(self) -> Stats:
        return self.seq.stats


class Stream(Answer):
    """Events of one answer, computed when they are read. It may be left early."""

    def __init__(self, seq: Sequence, steps: Iterator[list[Event]]) -> None:
        super().__init__(seq)
        self._steps = steps
        self.failed = False

    def __iter__(self) -> Iterator[Event]:
        for events in self._steps:
            if not events:
                yield Event("", (), (), None)
            for event in events:
                if event.error is not None:
                    self.failed = True
                    raise event.error
                self._events.append(event)
                yield event

    @property
    def completion(self) -> Completion:
        """The answer so far; `finish_reason` is "cancelled" until it is finished."""
        if self.seq.stream is not None and self.is_over:
            self.seq.stream.complete()
        reason = self.seq.finish_reason or "cancelled"
        return Completion.of(self._events, self.seq.text, reason, self.stats)

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
