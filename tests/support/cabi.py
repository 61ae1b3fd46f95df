"""libmars through its C interface, by ctypes: what a program in another language sees of mars.h."""

from __future__ import annotations

import ctypes as c
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.missing import lacking
from support.paths import ROOT

METRICS = {"probability": 0, "margin": 1, "entropy": 2}
COMMITS = {"cursor": 0, "block": 1}
WINDOWS = {"auto": 0, "full": -1}
TAUS = {None: -1.0}  # MARS_EXACT
REASONS = {0: None, 1: "eos", 2: "stop", 3: "length", 4: "capacity", 5: "cancelled", 6: "deadline"}


def build(preset: str = "release") -> Path:
    """The build directory of a preset; the test is skipped without it, but under CI it must be there."""
    directory = ROOT / "build" / "cpp" / preset
    if not (directory / "libmars.so").exists():
        lacking(f"the C++ runtime is not built ({preset}); `make cpp` builds it")
    return directory


COUNTS = ("prompt_tokens", "tokens", "forwards", "prefill_forwards", "tokens_after_first")
TIMES = ("prefill_time", "decode_time", "time_to_first_token", "tokens_per_forward", "tokens_per_second")


ON_LOG = c.CFUNCTYPE(None, c.c_int32, c.c_char_p, c.c_void_p)
LEVELS = ("debug", "info", "warning", "error")
VERIFY = {"once": 0, "always": 1, "never": 2}


class SessionOptions(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("device", c.c_char_p),
        ("threads", c.c_int32),
        ("verify", c.c_int32),
        ("variant", c.c_char_p),
        ("draft", c.c_char_p),
        ("cache_bytes", c.c_int64),
        ("safe", c.c_int32),
        ("option_names", c.POINTER(c.c_char_p)),
        ("option_values", c.POINTER(c.c_char_p)),
        ("num_options", c.c_size_t),
        ("on_log", ON_LOG),
        ("log_user", c.c_void_p),
    )


class Config(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("tau", c.c_double),
        ("metric", c.c_int32),
        ("commit", c.c_int32),
        ("cache_block", c.c_int64),
        ("max_new_tokens", c.c_int64),
        ("window", c.c_int64),
        ("eos_ids", c.POINTER(c.c_int64)),
        ("num_eos_ids", c.c_size_t),
        ("stop", c.POINTER(c.c_char_p)),
        ("num_stop", c.c_size_t),
        ("temperature", c.c_double),
        ("top_k", c.c_int64),
        ("top_p", c.c_double),
        ("seed", c.c_uint64),
        ("repetition_penalty", c.c_double),
        ("lookup", c.c_int64),
        ("min_p", c.c_double),
        ("cache_salt", c.c_char_p),
        ("deadline", c.c_double),
        ("grammar", c.c_char_p),
    )


class Prompt(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("text", c.c_char_p),
        ("text_size", c.c_size_t),
        ("messages", c.c_char_p),
        ("token_ids", c.POINTER(c.c_int64)),
        ("num_token_ids", c.c_size_t),
    )


class SessionInfo(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        *((name, c.c_int64) for name in ("vocab_size", "context_length", "block", "mask_id")),
        ("has_text", c.c_int32),
        ("reserved", c.c_int32),
        *((name, c.c_char_p) for name in ("variant", "backend", "precision", "device")),
        ("eos_ids", c.POINTER(c.c_int64)),
        ("num_eos_ids", c.c_size_t),
        ("profiles", c.POINTER(c.c_char_p)),
        ("num_profiles", c.c_size_t),
        ("outputs", c.POINTER(c.c_char_p)),
        ("num_outputs", c.c_size_t),
        ("max_rows", c.c_int64),
    )


class Event(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("row", c.c_int64),
        ("text", c.c_char_p),
        ("text_size", c.c_size_t),
        ("token_ids", c.POINTER(c.c_int64)),
        ("confidences", c.POINTER(c.c_double)),
        ("num_tokens", c.c_size_t),
        ("finish_reason", c.c_int32),
    )


class CStats(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        *((name, c.c_int64) for name in COUNTS),
        *((name, c.c_double) for name in TIMES),
        ("accepted", c.POINTER(c.c_int64)),
        ("num_accepted", c.c_size_t),
        *((name, c.c_int64) for name in ("proposed", "verified", "rejected")),
        ("queue_time", c.c_double),
        ("cached_tokens", c.c_int64),
        ("forced", c.c_int64),
    )


PREFIX_COUNTS = (
    *("queries", "hits", "query_tokens", "hit_tokens", "saved", "evicted", "failed"),
    *("entries", "num_bytes", "stored"),
)


class CPrefixStats(c.Structure):
    _fields_ = (("struct_size", c.c_size_t), *((name, c.c_int64) for name in PREFIX_COUNTS))


ON_EVENT = c.CFUNCTYPE(c.c_int, c.POINTER(Event), c.c_void_p)


@dataclass(frozen=True, slots=True)
class Answer:
    """A mars_completion, copied."""

    text: str
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    finish_reason: str
    forwards: int
    prefill_forwards: int
    accepted: tuple[int, ...]
    proposed: int
    verified: int
    rejected: int
    cached_tokens: int = 0


class MarsStatusError(Exception):
    """A mars_status other than MARS_OK, with its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Library:
    """The functions of mars.h, with errors as exceptions."""

    def __init__(self, path: Path) -> None:
        self.c = c.CDLL(str(path))
        self.c.mars_error_message.restype = self.c.mars_version.restype = c.c_char_p
        self.c.mars_error_message.argtypes = self.c.mars_error_free.argtypes = (c.c_void_p,)
        for name in (
            *("session_close", "stream_close", "stream_cancel", "completion_free"),
            *("conversation_close", "conversation_dropped", "session_warnings"),
        ):
            getattr(self.c, f"mars_{name}").argtypes = (c.c_void_p,)
        self.c.mars_stream_tau.argtypes, self.c.mars_stream_tau.restype = (c.c_void_p,), c.c_double
        for name, kind in (
            ("text", c.POINTER(c.c_char)),
            ("token_ids", c.POINTER(c.c_int64)),
            ("confidences", c.POINTER(c.c_double)),
        ):
            function = getattr(self.c, f"mars_completion_{name}")
            function.argtypes, function.restype = (c.c_void_p, c.POINTER(c.c_size_t)), kind
        self.c.mars_completion_finish_reason.argtypes = (c.c_void_p,)
        self.c.mars_conversation_dropped.restype = c.c_int64
        self.c.mars_session_warnings.restype = c.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        error = c.c_void_p()
        status = getattr(self.c, f"mars_{name}")(*arguments, c.byref(error))
        if status:
            message = self.c.mars_error_message(error).decode()
            self.c.mars_error_free(error)
            raise MarsStatusError(status, message)

    def config(self, values: Mapping[str, Any]) -> Config:
        """Settings by name; the window is full by default, because automatic ones follow measured times."""
        made = Config()
        self.c.mars_config_init(c.byref(made), c.sizeof(made))
        assert made.struct_size == c.sizeof(made)
        for name, value in {"window": "full", **values}.items():
            if name == "stop":
                made.stop, made.num_stop = (c.c_char_p * len(value))(*[s.encode() for s in value]), len(value)
            elif name == "eos_ids":
                made.eos_ids, made.num_eos_ids = (c.c_int64 * max(1, len(value)))(*value), len(value)
            else:
                words = {"metric": METRICS, "commit": COMMITS, "window": WINDOWS, "tau": TAUS}.get(name, {})
                given = value.encode() if isinstance(value, str) and not words else value
                setattr(made, name, words.get(value, given))
        return made

    def prompt(self, prompt: str | Sequence[Any]) -> Prompt:
        made = Prompt()
        self.c.mars_prompt_init(c.byref(made), c.sizeof(made))
        if isinstance(prompt, str):
            made.text, made.text_size = prompt.encode(), len(prompt.encode())
        elif prompt and not isinstance(prompt[0], int):
            made.messages = json.dumps(prompt).encode()
        else:
            made.token_ids, made.num_token_ids = (c.c_int64 * max(1, len(prompt)))(*prompt), len(prompt)
        return made


class CSession:
    """A mars_session; use it as a context manager."""

    def __init__(self, library: Library, bundle: Path, **options: Any) -> None:
        self.library, self.handle = library, c.c_void_p()
        wanted = SessionOptions()
        library.c.mars_session_options_init(c.byref(wanted), c.sizeof(wanted))
        pairs: dict[str, str] = options.pop("options", {})
        hear: Callable[[str, str], None] | None = options.pop("on_log", None)
        options["verify"] = VERIFY[options.pop("verify", "once")]
        for name, value in options.items():
            setattr(wanted, name, value.encode() if isinstance(value, str) else value)
        wanted.option_names = (c.c_char_p * len(pairs))(*(name.encode() for name in pairs))
        wanted.option_values = (c.c_char_p * len(pairs))(*(value.encode() for value in pairs.values()))
        wanted.num_options = len(pairs)
        if hear is not None:
            self.on_log = ON_LOG(lambda level, line, _: hear(LEVELS[level], line.decode()))  # as long as self
            wanted.on_log = self.on_log
        library.call("session_open", str(bundle).encode(), c.byref(wanted), c.byref(self.handle))

    @property
    def info(self) -> SessionInfo:
        info = SessionInfo()
        self.library.c.mars_session_info_init(c.byref(info), c.sizeof(info))
        self.library.call("session_describe", self.handle, c.byref(info))
        return info

    @property
    def has_text(self) -> bool:
        return bool(self.info.has_text)

    def __enter__(self) -> CSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.library.c.mars_session_close(self.handle)

    def generate(
        self, prompt: str | Sequence[Any], on_event: Callable[[Event], bool] | None = None, **config: Any
    ) -> Answer:
        completion = c.c_void_p()
        callback = (
            ON_EVENT(lambda event, _: int(on_event(event.contents))) if on_event else c.cast(None, ON_EVENT)
        )
        made = self.library.config(config)
        self.library.call(
            "generate",
            self.handle,
            c.byref(self.library.prompt(prompt)),
            c.byref(made),
            callback,
            None,
            c.byref(completion),
        )
        return self._taken(completion)

    def generate_batch(self, prompts: Sequence[Any], configs: Sequence[Mapping[str, Any]]) -> list[Answer]:
        texts, settings = [self.library.prompt(p) for p in prompts], [self.library.config(v) for v in configs]
        completions = (c.c_void_p * len(texts))()
        self.library.call(
            "generate_batch",
            self.handle,
            (c.POINTER(Prompt) * len(texts))(*map(c.pointer, texts)),
            (c.POINTER(Config) * len(settings))(*map(c.pointer, settings)),
            c.c_size_t(len(texts)),
            c.cast(None, ON_EVENT),
            None,
            completions,
        )
        return [self._taken(c.c_void_p(completion)) for completion in completions]

    def stream(self, prompt: str | Sequence[Any], **config: Any) -> CStream:
        return CStream(self, prompt, config)

    def conversation(self, system: str | None = None, *, drop_oldest: bool = False) -> CConversation:
        return CConversation(self, system, drop_oldest)

    @property
    def prefix_stats(self) -> dict[str, int]:
        made = CPrefixStats(c.sizeof(CPrefixStats))
        self.library.call("session_prefix_stats", self.handle, c.byref(made))
        return {name: getattr(made, name) for name in PREFIX_COUNTS}

    @property
    def warnings(self) -> str:
        return str(self.library.c.mars_session_warnings(self.handle).decode())

    def forget_prefixes(self) -> None:
        self.library.call("session_forget_prefixes", self.handle)

    def profile(self, name: str) -> dict[str, Any]:
        """tau, metric and window of a profile."""
        made = self.library.config({})
        self.library.call("config_of_profile", self.handle, name.encode(), c.byref(made))
        return {"tau": made.tau, "metric": made.metric, "window": made.window}

    def encode(self, prompt: str | Sequence[Any]) -> list[int]:
        made, count = self.library.prompt(prompt), c.c_size_t()
        self.library.call("encode", self.handle, c.byref(made), None, c.c_size_t(0), c.byref(count))
        ids = (c.c_int64 * count.value)()
        self.library.call("encode", self.handle, c.byref(made), ids, count, c.byref(count))
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        given, size = (c.c_int64 * max(1, len(ids)))(*ids), c.c_size_t()
        self.library.call(
            "decode", self.handle, given, c.c_size_t(len(ids)), None, c.c_size_t(0), c.byref(size)
        )
        text = c.create_string_buffer(size.value + 1)
        self.library.call(
            "decode", self.handle, given, c.c_size_t(len(ids)), text, c.c_size_t(len(text)), c.byref(size)
        )
        return text.raw[: size.value].decode()

    def _taken(self, completion: c.c_void_p) -> Answer:
        size, stats = c.c_size_t(), CStats(c.sizeof(CStats))
        self.library.call("completion_stats", completion, c.byref(stats))
        functions = self.library.c
        text = functions.mars_completion_text(completion, c.byref(size))[: size.value]
        ids = functions.mars_completion_token_ids(completion, c.byref(size))[: size.value]
        confidences = functions.mars_completion_confidences(completion, c.byref(size))[: size.value]
        reason = REASONS[functions.mars_completion_finish_reason(completion)]
        assert reason is not None and len(ids) == len(confidences) == stats.tokens
        accepted = tuple(stats.accepted[: stats.num_accepted]) if stats.num_accepted else ()
        functions.mars_completion_free(completion)
        return Answer(
            text.decode(),
            tuple(ids),
            tuple(confidences),
            reason,
            stats.forwards,
            stats.prefill_forwards,
            accepted,
            stats.proposed,
            stats.verified,
            stats.rejected,
            stats.cached_tokens,
        )


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


class CConversation:
    """A mars_conversation."""

    def __init__(self, session: CSession, system: str | None, drop_oldest: bool) -> None:
        self.session, self.library, self.handle = session, session.library, c.c_void_p()
        opening = system.encode() if system is not None else None
        self.library.call(
            "conversation_open",
            session.handle,
            opening,
            c.c_int32(drop_oldest),
            c.byref(self.handle),
        )

    def send(self, text: str, **config: Any) -> CStream:
        return self._asked("conversation_send", text, config)

    def edit(self, text: str, turn: int = -1, **config: Any) -> CStream:
        return self._asked("conversation_edit", text, config, c.c_int64(turn))

    def _asked(self, name: str, text: str, config: Mapping[str, Any], *rest: Any) -> CStream:
        stream, given = c.c_void_p(), self.library.config(config)
        self.library.call(name, self.handle, text.encode(), c.byref(given), *rest, c.byref(stream))
        return CStream(self.session, "", {}, stream)

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
