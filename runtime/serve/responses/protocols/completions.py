"""Response bodies and chunks in the form of OpenAI's chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from ..admission import Admitted
from ..choice import Choice, Delta
from ..tokens import Token
from .serializer import Serializer

OBJECTS = {
    "chat": ("chatcmpl-", "chat.completion", "chat.completion.chunk"),
    "text": ("cmpl-", "text_completion", "text_completion"),
}


class CompletionsSerializer(Serializer):
    """The answers to one request of /v1/chat/completions or /v1/completions."""

    def __init__(self, admitted: Admitted) -> None:
        self._is_chat = admitted.api_request.kind == "chat"
        prefix, self._object, self._chunk_object = OBJECTS[admitted.api_request.kind]
        super().__init__(admitted, prefix)

    def body(self) -> dict[str, Any]:
        choices = [
            self._entry(
                choice,
                {"message": choice.message} if self._is_chat else {"text": choice.text},
                choice.tokens,
                choice.finish_reason,
            )
            for choice in self.choices
        ]
        return self._head(self._object, choices) | {"usage": self.usage()} | self.statistics()

    def opening(self) -> list[dict[str, Any]]:
        fields = {"role": "assistant", "content": ""}
        return [self._chunk(choice, fields) for choice in self.choices] if self._is_chat else []

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.parts or delta.tokens:
            only_others = not delta.text and (delta.calls or delta.thinking)
            fields: dict[str, Any] = {} if only_others else {"content": delta.text}
            if delta.thinking:
                fields["reasoning_content"] = delta.thinking
            if delta.calls:
                first = len(choice.calls) - len(delta.calls)
                fields["tool_calls"] = [
                    call.to_dict() | {"index": first + i} for i, call in enumerate(delta.calls)
                ]
            chunks.append(self._chunk(choice, fields, delta.tokens))
        choice.num_returned += sum(len(token.text) for token in delta.tokens)
        if choice.is_over:
            chunks.append(self._chunk(choice, {}, (), choice.finish_reason))
        if self.is_over and chunks:
            if self.api_request.include_usage:
                chunks.append(self._head(self._chunk_object, []) | {"usage": self.usage()})
            chunks[-1] |= self.statistics()
        return chunks

    # --- parts ---

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = self.admitted.name
        return {"id": self.id, "object": kind, "created": self.created, "model": name, "choices": choices}

    def _chunk(
        self, choice: Choice, fields: dict[str, Any], tokens: Sequence[Token] = (), reason: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": fields} if self._is_chat else {"text": fields.get("content", "")}
        chunk = self._head(self._chunk_object, [self._entry(choice, content, tokens, reason)])
        return chunk | {"usage": None} if self.api_request.include_usage else chunk

    def _entry(
        self, choice: Choice, content: dict[str, Any], tokens: Sequence[Token], reason: str | None
    ) -> dict[str, Any]:
        """One choice of a chunk or a body."""
        logprobs = self._logprobs(tokens, choice.num_returned)
        entry = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason}
        return entry | {"steps": _steps(tokens)} if self.api_request.return_steps else entry

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        if not self.api_request.logprobs or (self.api_request.stream and not tokens):
            return None
        if self._is_chat:
            return {"content": [token.logprob_entry() for token in tokens], "refusal": None}
        return _older_logprobs(tokens, offset)


def _steps(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    groups = groupby(tokens, attrgetter("step"))
    return [{"step": step, "tokens": [token.step_entry() for token in group]} for step, group in groups]


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
