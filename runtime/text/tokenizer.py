"""The tokenizer and chat template of a bundle."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

from ..bundle.files import read_small
from ..bundle.manifest import TextInfo
from ..bundle.open import Bundle
from ..errors import BundleError, SessionError, brief, no_panic
from .dialects import RESULT_ROLES, Message, calls_as_text, dialect_in, results_as_user, with_tools
from .template import PlainText, Template

# Roles that are known in addition to those of the bundle's table.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
PROBE = "mars-0-probe"
CALL_ID = "abcdefghi"
PROBED_CALL = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": {}}}
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}
RESULT = {"role": "tool", "content": PROBE}
PROBED_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
PROBES: Mapping[str, Sequence[Sequence[Message]]] = {
    "system": [[{"role": "system", "content": PROBE}, USER]],
    "tool": [
        [USER, {**ANSWER, "tool_calls": [PROBED_CALL]}, {**RESULT, "tool_call_id": CALL_ID, "name": "f"}],
        [USER, ANSWER, RESULT],
    ],
}
TOKENIZER_LIMIT = 1 << 30  # bytes
SAFE_ADVICE = ", or open it without safe mode if you trust its source"
# A prompt with more characters than a context full of very long tokens is refused before it is tokenized.
CHARACTERS_PER_TOKEN, ALWAYS_TAKEN = 32, 65_536


class Text:
    """The tokenizer and chat template of a bundle.

    `info.chat`, the template as a table, is used when it covers the messages. Prompts of more than
    `max_characters` are refused. `safe` mode uses the table only, since a template is a program. With
    `parse_special`, the text of a special token or of one of the control tokens in a message becomes that
    token; else it is plain text, except marks of thinking in an answer, by which templates leave the thinking
    of earlier answers out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: TextInfo,
        max_characters: int | None = None,
        *,
        safe: bool = False,
        parse_special: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._plain = None if parse_special else PlainText(tokenizer, info.control_tokens)
        self._marks = () if info.thinking is None else (info.thinking.open, info.thinking.close)
        self._advice = SAFE_ADVICE if safe and info.chat_template else ""
        tokens = {"bos_token": info.bos_token, "eos_token": info.eos_token}
        self._tokens = {**info.special_tokens} | {k: v for k, v in tokens.items() if v is not None}
        self._turns, self._max_characters, self._dialect = info.chat, max_characters, dialect_in(info)
        self._kept: dict[tuple[Template | None, str], bool] = {}
        try:
            self._template, self._tool_template = (
                Template(source) if source and not safe else None
                for source in (info.chat_template, info.tool_template)
            )
        except Exception as error:  # a hostile template can raise anything
            raise BundleError(
                f"the chat template is not valid jinja2 ({brief(error)});"
                " export again with a corrected template"
            ) from error

    @classmethod
    def load(cls, bundle: Bundle, *, safe: bool = False, parse_special: bool = False) -> Text | None:
        """Load a bundle's tokenizer; None if it has none. Raises BundleError if it is unreadable."""
        if (info := bundle.manifest.text) is None:
            return None
        file = bundle.path / info.tokenizer
        with no_panic(BundleError, f"{file}: not a readable tokenizer", "export again"):
            tokenizer = Tokenizer.from_buffer(read_small(file, TOKENIZER_LIMIT, links=True))
        tokenizer.no_truncation()  # of the training that it was saved after
        tokenizer.no_padding()
        max_characters = character_limit(bundle.manifest.model.context_length)
        return cls(tokenizer, info, max_characters, safe=safe, parse_special=parse_special)

    def encode(
        self,
        prompt: str | Sequence[Message],
        max_tokens: int | None = None,
        tools: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a text, or of messages ({role, content}) in the chat template with the beginning of
        the answer.

        `tools` is the JSON text of functions in OpenAI's form, which the prompt of messages lists. `template`
        has variables of the chat template, such as `enable_thinking`.

        Raises SessionError for an invalid prompt, and for one with more characters than `max_tokens` can
        have.
        """
        is_text = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else self.rendered(prompt, max_tokens, tools, template)
        return self.encode_part(text, max_tokens, add_special_tokens=is_text)

    def prepare(self) -> None:
        """Build the tokenizer of messages with special tokens."""
        if self._plain is not None:
            self._plain.prepare()

    def spelled(self, token_ids: Sequence[int]) -> str:
        """The text of token ids with special tokens."""
        with no_panic(SessionError, "the bundle's tokenizer cannot decode these tokens", "export it again"):
            return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_part(
        self, text: str, max_tokens: int | None = None, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a result of `rendered`, or of its continuation. Raises as `encode` does."""
        plain = None if self._plain is None or not self._plain.holds(text) else self._plain
        self._check(len(text if plain is None else plain.show(text)), max_tokens)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SessionError(
                f"the prompt holds half a character (a lone surrogate, U+{ord(text[error.start]):04X}) at"
                f" {error.start}; use whole Unicode text"
            ) from error
        with no_panic(SessionError, "the bundle's tokenizer cannot read this prompt", "use another one"):
            if plain is not None:
                return plain.encode(text)
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def render(self, messages: Sequence[Message], **settings: Any) -> str:
        """The text of `messages` in the chat template, with the settings of `rendered`."""
        text = self.rendered(messages, **settings)
        return text if self._plain is None else self._plain.show(text)

    @property
    def settings(self) -> list[str]:
        """The variables of the chat template that `template` of `encode` may set."""
        templates = [t for t in (self._template, self._tool_template) if t is not None]
        return sorted(set[str]().union(*(t.settings for t in templates)))

    def rendered(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        tools: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """`render` with hidden special tokens of messages, for `encode_part`. Raises SessionError.

        Tools, calls and results that the template does not take are written as text (docs/structured.md).
        """
        if self._template is None and self._turns is None:
            what = (
                "safe mode runs no chat template, and this bundle has no table to use instead"
                if self._advice
                else "this bundle has no chat template"
            )
            raise SessionError(f"{what}; pass the whole prompt as one text{self._advice}")
        if not isinstance(messages, Sequence) or isinstance(messages, bytes):
            raise SessionError(f"a prompt is a text, messages or token ids, not {type(messages).__name__}")
        wrong = [i for i, m in enumerate(messages) if not _is_message(m)]
        if wrong or not messages:
            raise SessionError(
                f"messages must be a non-empty list of {{role, content}}; wrong: {wrong[:20] or 'empty'}"
            )
        self._check_roles(messages)
        messages = [_joined(i, m) for i, m in enumerate(messages)]
        functions = None if tools is None else json.loads(tools)
        extra = {**(template or {})}
        if extra and (unknown := sorted(extra.keys() - set(self.settings))):
            known = ", ".join(self.settings) or "none"
            raise SessionError(
                f"the chat template has no variable {unknown[0][:60]!r} (it has: {known}){self._advice}",
                field="template",
            )
        self._check(sum(len(m["content"]) for m in messages if isinstance(m["content"], str)), max_tokens)
        if self._plain is not None:
            plain = self._plain
            messages = [
                {**plain.hide(m), "content": plain.hide(m["content"], self._marks)}
                if m["role"] == "assistant"
                else plain.hide(m)
                for m in messages
            ]
            extra, functions = plain.hide(extra), plain.hide(functions)
        chosen = self._tool_template if functions and self._tool_template is not None else self._template
        messages = self._in_own_form(messages, functions, chosen)
        if functions and chosen is not None and chosen.takes_tools:
            extra["tools"] = functions
        return self._rendered(messages, chosen, extra)

    def _in_own_form(
        self, messages: Sequence[Message], functions: Sequence[Any] | None, template: Template | None
    ) -> Sequence[Message]:
        """Messages in which calls, results and tools that the template does not take are text."""
        original, has_calls = messages, any(m.get("tool_calls") for m in messages)
        if has_calls and (template is None or not template.takes_calls):
            messages = calls_as_text(messages, self._dialect)
        if any(m["role"] in RESULT_ROLES for m in messages) and not self._keeps(template, "tool"):
            messages = results_as_user(messages, original)
        if functions and (template is None or not template.takes_tools):
            messages = with_tools(messages, functions, has_system=self._keeps(template, "system"))
        return messages

    def _keeps(self, template: Template | None, role: str) -> bool:
        """Whether a message of this role is a part of the prompt: templates may refuse it, or ignore it."""
        if (template, role) not in self._kept:
            texts, values = [], {"tools": [PROBED_TOOL]} if template and template.takes_tools else {}
            for messages in PROBES[role]:
                if template is None or not template.takes_calls:
                    messages = calls_as_text(messages, self._dialect)
                with suppress(SessionError):
                    texts.append(self._rendered(messages, template, values))
            self._kept[template, role] = any(PROBE in text for text in texts)
        return self._kept[template, role]

    def _rendered(
        self, messages: Sequence[Message], template: Template | None, values: Mapping[str, Any]
    ) -> str:
        """The text of messages whose special tokens are hidden."""
        is_own = template is self._template
        if self._turns is not None and is_own and not values and all(_is_plain(m) for m in messages):
            text = self._turns.render(messages)
            if text is not None:
                return text
        if template is None:
            raise SessionError(
                "the bundle's chat table does not cover this conversation; pass it as one text" + self._advice
            )
        try:
            return template.render(messages, **{**self._tokens, **values})
        except Exception as error:  # a template can raise anything
            raise SessionError(f"the chat template refuses these messages: {brief(error)}") from error

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Refuse unknown roles, which many templates would print unchanged. libmars refuses them too."""
        known = dict.fromkeys((*(self._turns.roles if self._turns else ()), *ROLES))
        if unknown := [
            f"{m['role'][:40]!r} in message {i}" for i, m in enumerate(messages) if m["role"] not in known
        ]:
            raise SessionError(
                f"unknown role {', '.join(unknown[:5])} (known: {', '.join(known)});"
                " write the conversation as one text if the model was trained with others"
            )

    def _check(self, length: int, tokens: int | None) -> None:
        own = self._max_characters
        limit = own if tokens is None else min(character_limit(tokens), own or sys.maxsize)
        if limit is not None and length > limit:
            words = "this bundle's context holds" if limit == own else "this request may have"
            raise SessionError(
                f"the prompt has {length} characters, {words} at most {limit}; shorten it",
                code="context_length_exceeded",
                field="prompt",
            )


def character_limit(tokens: int) -> int:
    """Maximum characters of a prompt that may have `tokens` tokens."""
    return max(ALWAYS_TAKEN, CHARACTERS_PER_TOKEN * tokens)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message


def _joined(number: int, message: Message) -> Message:
    """A message whose parts ({type: text, text: ...}, OpenAI's form) are joined to one text; null beside
    calls becomes an empty text, and other fields that are null are left out. Raises SessionError for other
    content, which a template would print as Python does.
    """
    parts = message["content"]
    message = {name: value for name, value in message.items() if value is not None}
    if isinstance(parts, str):
        return message
    if parts is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if not isinstance(parts, list | tuple):
        raise SessionError(
            f"message {number}: content must be a text or a list of parts, not {type(parts).__name__}"
        )
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise SessionError(
                f"message {number}, part {i}: only text parts are supported, {{type: text, text: ...}},"
                f" not {str(kind)[:40]!r}"
            )
    return {**message, "content": "".join(part["text"] for part in parts)}


def _is_plain(message: Message) -> bool:
    """Whether the table of turns covers the form of a message."""
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)
