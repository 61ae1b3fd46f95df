"""libmars through its C interface, by ctypes: its functions, with errors as exceptions."""

from __future__ import annotations

import ctypes as c
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.cabi_types import MASKS, METRICS, TAUS, Config, Prompt
from support.missing import lacking
from support.paths import ROOT


def build(preset: str = "release") -> Path:
    """The build directory of a preset; the test is skipped without it (support/missing.py)."""
    directory = ROOT / "build" / "cpp" / preset
    if not (directory / "libmars.so").exists():
        lacking(f"the C++ runtime is not built ({preset}); `make cpp` builds it")
    return directory


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
        for name in ("session_close", "completion_free", "conversation_close", "conversation_dropped"):
            getattr(self.c, f"mars_{name}").argtypes = (c.c_void_p,)
        for name, kind in (
            ("text", c.POINTER(c.c_char)),
            ("token_ids", c.POINTER(c.c_int64)),
            ("confidences", c.POINTER(c.c_double)),
        ):
            function = getattr(self.c, f"mars_completion_{name}")
            function.argtypes, function.restype = (c.c_void_p, c.POINTER(c.c_size_t)), kind
        self.c.mars_completion_finish_reason.argtypes = (c.c_void_p,)
        self.c.mars_conversation_dropped.restype = c.c_int64

    def call(self, name: str, *arguments: Any) -> None:
        error = c.c_void_p()
        status = getattr(self.c, f"mars_{name}")(*arguments, c.byref(error))
        if status:
            message = self.c.mars_error_message(error).decode()
            self.c.mars_error_free(error)
            raise MarsStatusError(status, message)

    def config(self, values: Mapping[str, Any]) -> Config:
        """Settings by name; all masks by default, because automatic ones follow measured times."""
        made = Config()
        self.c.mars_config_init(c.byref(made), c.sizeof(made))
        assert made.struct_size == c.sizeof(made)
        for name, value in {"masks": "full", **values}.items():
            if name == "stop":
                made.stop, made.num_stop = (c.c_char_p * len(value))(*[s.encode() for s in value]), len(value)
            elif name == "eos_ids":
                made.eos_ids, made.num_eos_ids = (c.c_int64 * max(1, len(value)))(*value), len(value)
            else:
                words = {"metric": METRICS, "masks": MASKS, "tau": TAUS}.get(name, {})
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
