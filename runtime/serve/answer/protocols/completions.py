"""Response bodies and chunks in the form of OpenAI's chat and text completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from time import time
from typing import Any

from ..admission import Admitted
from ..choice import Choice, Piece
from ..steps import AnswerStep, Token
from . import usage as statistics

OBJECTS = {"chat": ("chatcmpl", "chat.completion"), "text": ("cmpl", "text_completion")}


class CompletionsReply:
    """The answers to one ask of /v1/chat/completions or /v1/completions."""

    def __init__(self, admitted: Admitted) -> None:
        self.admitted, self.ask = admitted, admitted.ask
        prefix, self._object = OBJECTS[self.ask.kind]
        self.id, self._created = f"{prefix}-{secrets.token_hex(16)}", int(time())
        session = admitted.served.session
        self.choices = [Choice(i, r, self.ask, session) for i, r in enumerate(admitted.requests)]

    @property
    def is_over(self) -> bool:
        return all(choice.is_over for choice in self.choices)

    def body(self) -> dict[str, Any]:
        """The body of a finished reply."""
        return self._head(self._object, [self._whole(choice) for choice in self.choices]) | self._end(
            usage=True
        )

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks of a stream."""
        if self.ask.kind == "text":
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([self._entry(choice, delta)]) for choice in self.choices]

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """The chunks for an event; none if it adds nothing, the last ones at the end."""
        chunks = []
        if piece.parts or piece.steps:
            only_others = not piece.text and (piece.calls or piece.thinking)
            delta: dict[str, Any] = {} if only_others else {"content": piece.text}
            if piece.thinking:
                delta["reasoning_content"] = piece.thinking
            if piece.calls:
                delta["tool_calls"] = piece.calls
            chunks.append(self._chunk([self._entry(choice, delta, piece)]))
        choice.num_shown += len(piece.text)
        if choice.is_over:
            chunks.append(self._chunk([self._entry(choice, {}, None, choice.finish_reason)]))
        if self.is_over and chunks:
            if self.ask.include_usage:
                chunks.append(self._head(self._chunk_object, []) | self._end(usage=True))
            else:
                chunks[-1] |= self._end(usage=False)
        return chunks

    # --- parts ---

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.ask.kind == "chat" else self._object

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = self.admitted.model
        return {"id": self.id, "object": kind, "created": self._created, "model": model, "choices": choices}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head(self._chunk_object, choices)
        return chunk | {"usage": None} if self.ask.include_usage else chunk

    def _end(self, *, usage: bool) -> dict[str, Any]:
        end = {"usage": statistics.usage(self.admitted, self.choices)} if usage else {}
        return end | {
            "mars": statistics.settings(self.admitted, self.choices),
            "timings": statistics.timings(self.admitted),
        }

    def _entry(
        self, choice: Choice, delta: dict[str, Any], piece: Piece | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        """One choice of a chunk."""
        entry: dict[str, Any] = {"index": choice.index}
        if self.ask.kind == "chat":
            entry["delta"] = delta
        else:
            entry["text"] = delta.get("content", "")
        steps = piece.steps if piece is not None else []
        entry |= {"logprobs": self._logprobs(steps, choice.num_shown), "finish_reason": reason}
        return entry | ({"steps": [step.to_dict() for step in steps]} if self.ask.return_steps else {})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        """One choice of a body."""
        entry: dict[str, Any] = {"index": choice.index}
        entry |= {"message": choice.message} if self.ask.kind == "chat" else {"text": choice.text}
        entry |= {"logprobs": self._logprobs(choice.steps, 0), "finish_reason": choice.finish_reason}
        steps = [step.to_dict() for step in choice.steps]
        return entry | ({"steps": steps} if self.ask.return_steps else {})

    def _logprobs(self, steps: Sequence[AnswerStep], offset: int) -> dict[str, Any] | None:
        tokens = [token for step in steps for token in step.tokens]
        if not self.ask.logprobs or (self.ask.stream and not tokens):
            return None
        if self.ask.kind == "chat":
            return {"content": [token.logprob_entry() for token in tokens], "refusal": None}
        return _older_logprobs(tokens, offset)


def _older_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """Logprobs in the form of text completions."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": offsets,
    }


def _by_text(token: Token) -> dict[str, float]:
    """Log-probabilities of the most likely tokens, and of this one. Of equal texts, the likeliest counts."""
    found: dict[str, float] = {}
    for text, logprob in [*token.likely, (token.text, token.logprob)]:
        found.setdefault(text, logprob)
    return found
