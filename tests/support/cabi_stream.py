"""Streams of libmars through its C interface."""

from __future__ import annotations

import ctypes as c
from typing import TYPE_CHECKING

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
