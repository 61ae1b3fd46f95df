"""Response bodies and events in the form of Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

from ..admission import Admitted
from ..choice import Choice, Delta, Part, Reasoning, ToolCallEntry
from .serializer import Serializer

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
Json = dict[str, Any]


class MessagesSerializer(Serializer):
    """The answer to one request of /v1/messages: blocks, each of one part of the answer."""

    def __init__(self, admitted: Admitted) -> None:
        super().__init__(admitted, "msg_")
        self._num_blocks = 0
        self._open_kind: str | None = None  # of the open block

    def body(self) -> Json:
        blocks = [_block(part) for part in self.choices[0].parts]
        return self._message(blocks) | self._reason | {"usage": self._usage()} | self.statistics()

    def opening(self) -> list[Json]:
        unknown = {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": self._message([]) | unknown | {"usage": self._usage()}}]

    def chunks(self, choice: Choice, delta: Delta) -> list[Json]:
        events = []
        for part in delta.parts:
            if isinstance(part, ToolCallEntry):
                events += self._open(_block(part) | {"input": {}})
                events.append(self._delta(type="input_json_delta", partial_json=part.arguments))
                events += self._close()
            elif isinstance(part, Reasoning):
                events += [] if self._open_kind == "thinking" else self._open(_block(Reasoning("")))
                events.append(self._delta(type="thinking_delta", thinking=part.text))
            else:
                events += [] if self._open_kind == "text" else self._open(_block(""))
                events.append(self._delta(type="text_delta", text=part))
        if choice.is_over:
            events += self._close()
            events.append(
                {"type": "message_delta", "delta": self._reason, "usage": self._usage()} | self.statistics()
            )
            events.append({"type": "message_stop"})
        return events

    def failure(self, body: Json) -> Json:
        return {"type": "error", **body}

    # --- parts ---

    def _open(self, block: Json) -> list[Json]:
        """Begin a block, after the open one if there is one."""
        closed, self._open_kind = self._close(), block["type"]
        self._num_blocks += 1
        begun = {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}
        return [*closed, begun]

    def _delta(self, **delta: str) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _close(self) -> list[Json]:
        kind, self._open_kind = self._open_kind, None
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}] if kind else []

    def _message(self, blocks: list[Json]) -> Json:
        model = self.admitted.name
        return {"id": self.id, "type": "message", "role": "assistant", "model": model, "content": blocks}

    @property
    def _reason(self) -> Json:
        choice, stop = self.choices[0], self.admitted.requests[0].stop_string
        if choice.reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": REASONS[choice.finish_reason], "stop_sequence": None}

    def _usage(self) -> Json:
        """Anthropic's counts: cached tokens are not input tokens."""
        counts = self.usage()
        num_cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
        }


def _block(part: Part) -> Json:
    if isinstance(part, ToolCallEntry):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": json.loads(part.arguments)}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part}
