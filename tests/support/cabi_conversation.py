"""Conversations of libmars through its C interface, and their streams."""

from __future__ import annotations

import ctypes as c
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from support.cabi_types import REASONS, Event

if TYPE_CHECKING:
    from support.cabi_session import Answer, CSession


class CStream:
    """A mars_stream, that of a conversation."""

    def __init__(self, session: CSession, handle: c.c_void_p) -> None:
        self.session, self.library, self.handle = session, session.library, handle

    def next(self) -> tuple[str, list[int], str | None] | None:
        event, done = Event(c.sizeof(Event)), c.c_int32()
        self.library.call("stream_next", self.handle, c.byref(event), c.byref(done))
        if done.value:
            return None
        text = c.string_at(event.text, event.text_size) if event.text_size else b""
        return text.decode(), list(event.token_ids[: event.num_tokens]), REASONS[event.finish_reason]

    def completion(self) -> Answer:
        completion = c.c_void_p()
        self.library.call("stream_completion", self.handle, c.byref(completion))
        return self.session._taken(completion)


class CConversation:
    """A mars_conversation."""

    def __init__(self, session: CSession, system: str | None, drop_oldest: bool) -> None:
        self.session, self.library, self.handle = session, session.library, c.c_void_p()
        opening = system.encode() if system is not None else None
        self.library.call(
            "conversation_open", session.handle, opening, c.c_int32(drop_oldest), c.byref(self.handle)
        )

    def send(self, text: str, **config: Any) -> CStream:
        return self._asked("conversation_send", text, config)

    def edit(self, text: str, turn: int = -1, **config: Any) -> CStream:
        return self._asked("conversation_edit", text, config, c.c_int64(turn))

    def _asked(self, name: str, text: str, config: Mapping[str, Any], *rest: Any) -> CStream:
        stream, given = c.c_void_p(), self.library.config(config)
        self.library.call(name, self.handle, text.encode(), c.byref(given), *rest, c.byref(stream))
        return CStream(self.session, stream)

    def undo(self, turns: int = 1) -> None:
        self.library.call("conversation_undo", self.handle, c.c_int64(turns))

    def reset(self) -> None:
        self.library.call("conversation_reset", self.handle)

    def resume(self, messages: Sequence[Mapping[str, str]]) -> None:
        self.library.call("conversation_resume", self.handle, json.dumps(messages).encode())

    @property
    def messages(self) -> list[dict[str, str]]:
        text = c.c_char_p()
        self.library.call("conversation_messages", self.handle, c.byref(text))
        assert text.value is not None
        found: list[dict[str, str]] = json.loads(text.value)
        return found

    @property
    def dropped(self) -> int:
        return int(self.library.c.mars_conversation_dropped(self.handle))

    def close(self) -> None:
        self.library.c.mars_conversation_close(self.handle)
