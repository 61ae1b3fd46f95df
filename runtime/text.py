"""Text in, text out: the bundle's tokenizer and chat template, streaming, stop strings. The only file that knows text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .bundle.manifest import Bundle
from .errors import BundleError, SessionError

Message = Mapping[str, Any]


class Text:
    """The tokenizer and chat template of a bundle."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        try:
            self._template = environment.from_string(chat_template) if chat_template else None
        except TemplateError as error:
            raise BundleError(
                f"the chat template is not valid jinja2 ({error}); export again with a corrected template"
            ) from error

    @classmethod
    def of(cls, bundle: Bundle) -> Text:
        """Load a bundle's tokenizer. Raises BundleError when it has none or it cannot be read."""
        info = bundle.manifest.text
        if info is None:
            raise BundleError(f"{bundle.path}: this bundle has no tokenizer; pass token ids instead of text")
        try:
            tokenizer = Tokenizer.from_file(str(bundle.path / info.tokenizer))
        except Exception as error:  # the Rust library raises plain Exception
            raise BundleError(
                f"{bundle.path / info.tokenizer}: not a readable tokenizer ({error}); export again"
            ) from error
        return cls(tokenizer, info.chat_template, info.bos_token, info.eos_token)

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a text as it stands, or of messages ({role, content}) in the chat template, ready for the answer."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt).ids)
        return list(self.tokenizer.encode(self.render(prompt), add_special_tokens=False).ids)

    def render(self, messages: Sequence[Message]) -> str:
        """The chat template's text for `messages` and the beginning of an answer. Raises SessionError."""
        if self._template is None:
            raise SessionError("this bundle has no chat template; pass the whole prompt as one text")
        wrong = [
            i
            for i, m in enumerate(messages)
            if not isinstance(m, Mapping) or not isinstance(m.get("role"), str) or "content" not in m
        ]
        if wrong or not messages:
            raise SessionError(
                f"messages must be a non-empty list of {{role, content}}; wrong: {wrong or 'empty'}"
            )
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except Exception as error:  # a template is a program of somebody else's: it can fail in any way
            raise SessionError(f"the chat template refuses these messages: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


class TextStream:
    """The growing text of one answer. Never shows half a character, nor text that may turn out to be a stop string."""

    def __init__(self, text: Text, stop: Sequence[str] = ()) -> None:
        self._source, self._stop = text, tuple(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._unread = 0  # of those, the last ones that have no text yet
        self._text = ""
        self._shown = 0
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; returns whether it completes a stop string, which ends the text before that string."""
        self._token_ids.append(token)
        self._unread += 1
        piece = self._step(token)
        if piece:
            self._unread = 0
            self._append(piece)
        return self.stopped

    def _step(self, token: int) -> str | None:
        try:
            return self._decoder.step(self._source.tokenizer, token)
        except Exception:  # the Rust library raises plain Exception
            # With byte fallback a run of bytes is text as a whole or not at all: one broken byte takes back the characters
            # before it, which were shown. The run then counts from behind them.
            self._decoder = DecodeStream(skip_special_tokens=True)
            pieces = [self._decoder.step(self._source.tokenizer, i) for i in self._token_ids[-self._unread :]]
            return "".join(piece for piece in pieces if piece)

    def read(self) -> str:
        """The text that became certain since the last call."""
        return self._up_to(len(self._text) - (0 if self.stopped else self._held_back()))

    def finish(self) -> str:
        """All text not shown yet; an unfinished character becomes U+FFFD."""
        if not self.stopped:
            whole = self._source.decode(self._token_ids)
            is_kept = whole.startswith(self._text)
            self._append(
                whole[len(self._text) :]
                if is_kept
                else self._source.decode(self._token_ids[len(self._token_ids) - self._unread :])
            )
        return self._up_to(len(self._text))

    @property
    def text(self) -> str:
        """Everything so far, held-back text included, without the stop string."""
        return self._text

    def _append(self, piece: str) -> None:
        start = max(0, len(self._text) - max(map(len, self._stop), default=0) + 1)
        self._text += piece
        found = [at for at in (self._text.find(s, start) for s in self._stop) if at >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def _up_to(self, end: int) -> str:
        shown, self._shown = self._shown, max(self._shown, end)
        return self._text[shown : self._shown]

    def _held_back(self) -> int:
        longest = max((len(s) - 1 for s in self._stop), default=0)
        for length in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(s.startswith(tail) for s in self._stop):
                return length
        return 0


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
