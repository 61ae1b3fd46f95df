"""Batchers of libmars through its C interface."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Sequence
from typing import Any

from support.cabi_session import Answer, CSession
from support.cabi_types import ON_EVENT, REASONS, TAUS, Event

FOREVER = -1.0
OVERLOADED = 7  # MARS_ERROR_OVERLOADED
LIMITS = (
    *("max_rows", "max_waiting", "prefill_tokens"),
    *("max_prompt_tokens", "max_new_tokens", "max_stops", "kv_bytes"),
)
COUNTS = (
    *("accepted", "finished", "failed", "cancelled", "expired", "refused", "overloaded"),
    *("prompt_tokens", "tokens"),
)


class CLimits(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        *((name, c.c_int64) for name in LIMITS),
        ("client_share", c.c_double),
        ("max_rows_per_client", c.c_int64),
    )


class CEntry(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("wait", c.c_double),
        ("client", c.c_char_p),
        ("on_event", ON_EVENT),
        ("user", c.c_void_p),
    )


class CState(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        *((name, c.c_int64) for name in (*COUNTS, "num_running", "num_waiting")),
        ("kv_usage", c.c_double),
        ("step_seconds", c.c_double),
        ("alive", c.c_int32),
    )


class CBatcher:
    """A mars_batcher; use it as a context manager."""

    def __init__(self, session: CSession, **limits: Any) -> None:
        self.session, self.library, self.handle = session, session.library, c.c_void_p()
        functions = self.library.c
        functions.mars_error_retry_after.argtypes = (c.c_void_p,)
        functions.mars_error_retry_after.restype = functions.mars_request_tau.restype = c.c_double
        for name in (
            "request_tau",
            "request_free",
            "request_cancel",
            "request_finish_reason",
            "batcher_free",
        ):
            getattr(functions, f"mars_{name}").argtypes = (c.c_void_p,)
        wanted = CLimits()
        functions.mars_limits_init(c.byref(wanted), c.c_size_t(c.sizeof(wanted)))
        assert (wanted.max_rows, wanted.max_waiting, wanted.client_share) == (0, 64, 1.0)
        assert wanted.max_rows_per_client == 0  # MARS_NO_LIMIT
        for name, value in limits.items():
            setattr(wanted, name, value)
        self.library.call("batcher_open", session.handle, c.byref(wanted), c.byref(self.handle))

    def submit(
        self,
        prompt: str | Sequence[Any],
        wait: float = 0.0,
        client: str | None = None,
        on_event: Callable[[Event], bool] | None = None,
        **config: Any,
    ) -> CRequest:
        entry = CEntry()
        self.library.c.mars_entry_init(c.byref(entry), c.c_size_t(c.sizeof(entry)))
        entry.wait, entry.client = wait, client.encode() if client is not None else None
        if on_event is not None:
            entry.on_event = ON_EVENT(lambda event, _: int(on_event(event.contents)))
        made, text, handle = self.library.config(config), self.library.prompt(prompt), c.c_void_p()
        self.library.call(
            "batcher_submit", self.handle, c.byref(text), c.byref(made), c.byref(entry), c.byref(handle)
        )
        return CRequest(self, handle, entry)

    @property
    def state(self) -> CState:
        made = CState(c.sizeof(CState))
        self.library.call("batcher_describe", self.handle, c.byref(made))
        return made

    def close(self, drain: float = 0.0, timeout: float = 10.0) -> bool:
        ended = c.c_int32()
        self.library.call(
            "batcher_close", self.handle, c.c_double(drain), c.c_double(timeout), c.byref(ended)
        )
        return bool(ended.value)

    def __enter__(self) -> CBatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.library.c.mars_batcher_free(self.handle)


class CRequest:
    """A mars_request; freed with `free`."""

    def __init__(self, batcher: CBatcher, handle: c.c_void_p, entry: CEntry) -> None:
        self.batcher, self.library, self.handle = batcher, batcher.library, handle
        self._entry = entry  # its callback must live as long

    def next(self) -> tuple[str, list[int], str | None] | None:
        event, done = Event(c.sizeof(Event)), c.c_int32()
        self.library.call("request_next", self.handle, c.byref(event), c.byref(done))
        if done.value:
            return None
        text = c.string_at(event.text, event.text_size) if event.text_size else b""
        return text.decode(), list(event.token_ids[: event.num_tokens]), REASONS[event.finish_reason]

    def result(self, timeout: float = 60.0) -> Answer:
        completion = c.c_void_p()
        self.library.call("request_result", self.handle, c.c_double(timeout), c.byref(completion))
        return self.batcher.session._taken(completion)

    def completion(self) -> Answer:
        completion = c.c_void_p()
        self.library.call("request_completion", self.handle, c.byref(completion))
        return self.batcher.session._taken(completion)

    @property
    def finish_reason(self) -> str | None:
        return REASONS[self.library.c.mars_request_finish_reason(self.handle)]

    @property
    def tau(self) -> float | None:
        tau = float(self.library.c.mars_request_tau(self.handle))
        return None if tau == TAUS[None] else tau

    def set_tau(self, tau: float | None) -> None:
        self.library.call("request_set_tau", self.handle, c.c_double(TAUS[None] if tau is None else tau))

    def cancel(self) -> None:
        self.library.c.mars_request_cancel(self.handle)

    def free(self) -> None:
        self.library.c.mars_request_free(self.handle)
