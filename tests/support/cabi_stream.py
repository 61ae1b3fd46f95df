"""Streams of libmars through its C interface."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from support.cabi_types import REASONS, TAUS, Event

if TYPE_CHECKING:
    from support.cabi_session import Answer, CSession


class CStream:
    """A mars_stream."""

    def __init__(
        self,
        session: CSession,
        prompt: str | Sequence[Any],
        config: Mapping[str, Any],
        handle: c.c_void_p | None = None,
    ) -> None:
        """`handle`: a stream that is there already, a conversation's."""
        self.session, self.library, self.handle = session, session.library, handle or c.c_void_p()
        if handle is not None:
            return
        given = self.library.config(config)
        self.library.call(
            "stream_open",
            session.handle,
            c.byref(self.library.prompt(prompt)),
            c.byref(given),
            c.byref(self.handle),
        )

    def next(self) -> tuple[str, list[int], str | None] | None:
        event, done = Event(c.sizeof(Event)), c.c_int32()
        self.library.call("stream_next", self.handle, c.byref(event), c.byref(done))
        if done.value:
            return None
        text = c.string_at(event.text, event.text_size) if event.text_size else b""
        return text.decode(), list(event.token_ids[: event.num_tokens]), REASONS[event.finish_reason]

    @property
    def tau(self) -> float | None:
        """None in exact mode."""
        tau = float(self.library.c.mars_stream_tau(self.handle))
        return None if tau == TAUS[None] else tau

    def set_tau(self, tau: float | None) -> None:
        """None is exact mode."""
        self.library.call("stream_set_tau", self.handle, c.c_double(TAUS[None] if tau is None else tau))

    def cancel(self) -> None:
        self.library.c.mars_stream_cancel(self.handle)

    def completion(self) -> Answer:
        completion = c.c_void_p()
        self.library.call("stream_completion", self.handle, c.byref(completion))
        return self.session._taken(completion)

    def close(self) -> None:
        self.library.c.mars_stream_close(self.handle)
