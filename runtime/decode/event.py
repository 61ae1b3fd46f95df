"""Events: the tokens and the text that a step adds to an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from .sample import Top

FinishReason = Literal["eos", "stop", "length", "capacity", "cancelled", "deadline"]


@dataclass(frozen=True, slots=True)
class Event:
    """The addition of one step to an answer. It has no tokens for a prefill chunk, and possibly at the end.

    `text` may come later than its tokens: incomplete characters and possible stop strings are held back.
    `accepted_draft_tokens`: how many of the first tokens were draft tokens that held. `forced`: positions of
    the tokens that a grammar forced. `top_logprobs`: of each token, if the config asks for them. `texts`: of
    each token, at once, with the text that `text` holds back.

    `seq`: the number of the sequence. `error`: what ended it, if it failed; readers see it raised.
    """

    text: str
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    finish_reason: FinishReason | None
    accepted_draft_tokens: int = 0
    forced: tuple[int, ...] = ()
    top_logprobs: tuple[Top, ...] = ()
    texts: tuple[str, ...] = ()
    seq: int = field(default=0, repr=False, compare=False)
    error: BaseException | None = field(default=None, repr=False)


class AnswerText(Protocol):
    """The growing text of an answer, as `TextStream` has it."""

    stop_string: str | None

    @property
    def text(self) -> str: ...
    def push(self, token: int) -> bool: ...
    def read(self) -> str: ...
    def take_token_texts(self, num_tokens: int) -> tuple[str, ...]: ...
    def finish(self) -> str: ...
    def complete(self) -> None: ...
