"""Response bodies and chunks in the form of OpenAI's chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..admission import Admitted
from ..choice import Choice, Delta
from ..steps import Step, Token
from .serializer import Serializer

OBJECTS = {"chat": ("chatcmpl-", "chat.completion"), "text": ("cmpl-", "text_completion")}


class CompletionsSerializer(Serializer):
    """The answers to one request of /v1/chat/completions or /v1/completions."""

    def __init__(self, admitted: Admitted) -> None:
        prefix, self._object = OBJECTS[admitted.api_request.kind]
        super().__init__(admitted, prefix)

    def body(self) -> dict[str, Any]:
        choices = []
        for choice in self.choices:
            content = (
                {"message": choice.message} if self.api_request.kind == "chat" else {"text": choice.text}
            )
            choices.append(self._entry(choice, content, choice.steps, choice.finish_reason))
        return self._head(self._object, choices) | {"usage": self.usage()} | self.statistics()

    def opening(self) -> list[dict[str, Any]]:
        if self.api_request.kind == "text":
            return []
        fields = {"role": "assistant", "content": ""}
        return [self._chunk(choice, fields) for choice in self.choices]

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.parts or delta.steps:
            only_others = not delta.text and (delta.calls or delta.thinking)
            fields: dict[str, Any] = {} if only_others else {"content": delta.text}
            if delta.thinking:
                fields["reasoning_content"] = delta.thinking
            if delta.calls:
                first = len(choice.calls) - len(delta.calls)
                fields["tool_calls"] = [
                    call.to_dict() | {"index": first + i} for i, call in enumerate(delta.calls)
                ]
            chunks.append(self._chunk(choice, fields, delta.steps))
        choice.num_shown += len(delta.text)
        if choice.is_over:
            chunks.append(self._chunk(choice, {}, (), choice.finish_reason))
        if self.is_over and chunks:
            if self.api_request.include_usage:
                chunks.append(self._head(self._chunk_object, []) | {"usage": self.usage()})
            chunks[-1] |= self.statistics()
        return chunks

    # --- parts ---

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.api_request.kind == "chat" else self._object

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = self.admitted.name
        return {"id": self.id, "object": kind, "created": self.created, "model": name, "choices": choices}

    def _chunk(
        self,
        choice: Choice,
        fields: dict[str, Any],
        steps: Sequence[Step] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        content = (
            {"delta": fields} if self.api_request.kind == "chat" else {"text": fields.get("content", "")}
        )
        chunk = self._head(self._chunk_object, [self._entry(choice, content, steps, reason)])
        return chunk | {"usage": None} if self.api_request.include_usage else chunk

    def _entry(
        self, choice: Choice, content: dict[str, Any], steps: Sequence[Step], reason: str | None
    ) -> dict[str, Any]:
        """One choice of a chunk or a body."""
        logprobs = self._logprobs(steps, choice.num_shown)
        entry = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason}
        return (
            entry | {"steps": [step.to_dict() for step in steps]} if self.api_request.return_steps else entry
        )

    def _logprobs(self, steps: Sequence[Step], offset: int) -> dict[str, Any] | None:
        tokens = [token for step in steps for token in step.tokens]
        if not self.api_request.logprobs or (self.api_request.stream and not tokens):
            return None
        if self.api_request.kind == "chat":
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
