"""Response bodies and events in the form of OpenAI's Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ..admission import Admitted
from ..choice import Choice, Delta, Part, Reasoning, ToolCallEntry
from ..tokens import Token
from .serializer import Serializer

ECHOED = ("instructions", "metadata", "tools", "tool_choice", "parallel_tool_calls", "text", "user")
Json = dict[str, Any]


class ResponsesSerializer(Serializer):
    """The answer to one request of /v1/responses: items, each of one part of the answer."""

    def __init__(self, admitted: Admitted) -> None:
        super().__init__(admitted, "resp_")
        self._items: list[Json] = []  # of the stream, the last one may be open
        self._logprobs: list[Json] = []  # of tokens whose text was not sent yet
        self._open_kind: str | None = None  # of the text of the open item
        self._events: list[Json] = []  # to be sent
        self._num_events = 0

    def body(self) -> Json:
        items = [_item(part) for part in self.choices[0].parts]
        message = next((item for item in items if item["type"] == "message"), None)
        if message is not None:
            message["content"][0]["logprobs"] = self._entries(self.choices[0].tokens)
        return self._response(self._status, items)

    def opening(self) -> list[Json]:
        response = self._response("in_progress", [])
        self._emit("created", response=response)
        self._emit("in_progress", response=response)
        return self._take_events()

    def chunks(self, choice: Choice, delta: Delta) -> list[Json]:
        self._logprobs += self._entries(delta.tokens)
        for part in delta.parts:
            if isinstance(part, ToolCallEntry):
                self._call(part)
            elif isinstance(part, Reasoning):
                self._grow("reasoning_text", part.text)
            else:
                self._grow("output_text", part)
        if choice.is_over:
            self._close()
            self._emit(self._status, response=self._response(self._status, self._items))
        return self._take_events()

    def failure(self, body: Json) -> Json:
        """The API's event has the error's fields, and what is sent in practice also has them in `error`."""
        return {**body["error"], "type": "error", "sequence_number": self._num_events, **body}

    # --- parts ---

    def _emit(self, kind: str, **fields: Any) -> None:
        self._num_events += 1
        event = {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **fields}
        self._events.append(event)

    def _take_events(self) -> list[Json]:
        taken, self._events = self._events, []
        return taken

    def _entries(self, tokens: Sequence[Token]) -> list[Json]:
        """The log-probabilities of tokens, if they are asked for."""
        return [token.logprob_entry() for token in tokens] if self.api_request.logprobs else []

    def _take_logprobs(self) -> list[Json]:
        """Move the pending log-probabilities into the open message, and return them."""
        taken, self._logprobs = self._logprobs, []
        self._items[-1]["content"][0]["logprobs"] += taken
        return taken

    @property
    def _place(self) -> Json:
        """The position of the open text."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _add(self, item: Json) -> None:
        """Begin an item, which is empty at first."""
        self._items.append(item)
        empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        begun = {**item, **empty, "status": "in_progress"}
        self._emit("output_item.added", output_index=len(self._items) - 1, item=begun)

    def _done(self) -> None:
        self._emit("output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _grow(self, kind: str, text: str) -> None:
        """Add to the open text of this kind, which begins a message or a reasoning item if necessary."""
        if self._open_kind != kind:
            self._close()
            self._open_kind = kind
            self._add(_item("" if kind == "output_text" else Reasoning("")))
            self._emit("content_part.added", **self._place, part=_content(kind, ""))
        self._items[-1]["content"][0]["text"] += text
        fields = {"logprobs": self._take_logprobs()} if kind == "output_text" else {}
        self._emit(f"{kind}.delta", **self._place, delta=text, **fields)

    def _close(self) -> None:
        """End the open item."""
        kind, self._open_kind = self._open_kind, None
        if kind is None:
            return
        part = self._items[-1]["content"][0]
        fields = {"text": part["text"]}
        if kind == "output_text":
            self._take_logprobs()
            fields["logprobs"] = part["logprobs"]
        self._emit(f"{kind}.done", **self._place, **fields)
        self._emit("content_part.done", **self._place, part=part)
        self._done()

    def _call(self, call: ToolCallEntry) -> None:
        self._close()
        self._add(_item(call))
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        arguments = call.arguments
        self._emit("function_call_arguments.delta", **place, delta=arguments)
        self._emit("function_call_arguments.done", **place, name=call.name, arguments=arguments)
        self._done()

    @property
    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str, items: list[Json]) -> Json:
        admitted, config = self.admitted, self.admitted.config
        response = {
            "id": self.id, "object": "response", "created_at": self.created, "model": admitted.name,
            "status": status, "output": items, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None, "metadata": {}, "tools": [], "tool_choice": "auto",
            "parallel_tool_calls": True, "text": {"format": {"type": "text"}},
            "temperature": config.temperature, "top_p": config.top_p,
            "max_output_tokens": config.max_new_tokens, "previous_response_id": None, "store": False,
            "truncation": "disabled", "usage": None,
        }  # fmt: skip
        body = admitted.api_request.body
        response |= {name: body[name] for name in ECHOED if body.get(name) is not None}
        if status == "in_progress":
            return response
        counts = self.usage()
        num_thinking = counts["completion_tokens_details"]["reasoning_tokens"]
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_thinking},
            "total_tokens": counts["total_tokens"],
        }
        return response | {"usage": usage} | self.statistics()


def _item(part: Part) -> Json:
    """A complete item of the output."""
    if isinstance(part, ToolCallEntry):
        name = f"fc_{part.id.removeprefix('call_')}"
        call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
        return {"type": "function_call", "id": name, "status": "completed", **call}
    if isinstance(part, Reasoning):
        thought = [_content("reasoning_text", part.text)]
        name = f"rs_{secrets.token_hex(12)}"
        return {"type": "reasoning", "id": name, "status": "completed", "summary": [], "content": thought}
    content = [_content("output_text", part)]
    name = f"msg_{secrets.token_hex(12)}"
    return {"type": "message", "id": name, "status": "completed", "role": "assistant", "content": content}


def _content(kind: str, text: str) -> Json:
    extra: Json = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **extra}
