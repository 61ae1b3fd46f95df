"""Sessions of libmars through its C interface, and what they answer."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cabi import Library
from support.cabi_conversation import CConversation
from support.cabi_types import (
    LEVELS,
    ON_LOG,
    PREFIX_COUNTS,
    REASONS,
    VERIFY,
    Config,
    CPrefixStats,
    CStats,
    Prompt,
    SessionInfo,
    SessionOptions,
)


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
    draft_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    cached_tokens: int = 0


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

    def generate(self, prompt: str | Sequence[Any], **config: Any) -> Answer:
        completion, made = c.c_void_p(), self.library.config(config)
        self.library.call(
            "generate",
            self.handle,
            c.byref(self.library.prompt(prompt)),
            c.byref(made),
            None,
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
            None,
            None,
            completions,
        )
        return [self._taken(c.c_void_p(completion)) for completion in completions]

    def conversation(self, system: str | None = None, *, drop_oldest: bool = False) -> CConversation:
        return CConversation(self, system, drop_oldest)

    @property
    def prefix_stats(self) -> dict[str, int]:
        made = CPrefixStats(c.sizeof(CPrefixStats))
        self.library.call("session_prefix_stats", self.handle, c.byref(made))
        return {name: getattr(made, name) for name in PREFIX_COUNTS}

    def forget_prefixes(self) -> None:
        self.library.call("session_forget_prefixes", self.handle)

    def profile(self, name: str) -> dict[str, Any]:
        """tau, metric and masks of a profile."""
        made = self.library.config({})
        self.library.call("config_of_profile", self.handle, name.encode(), c.byref(made))
        return {name: getattr(made, name) for name in ("tau", "metric", "masks")}

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
            stats.draft_tokens,
            stats.accepted_draft_tokens,
            stats.rejected_draft_tokens,
            stats.cached_tokens,
        )
