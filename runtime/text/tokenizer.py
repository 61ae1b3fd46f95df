"""The tokenizer and chat template of a bundle, and the text of a growing answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tokenizers import Tokenizer

from ..bundle.files import read_small
from ..bundle.open import Bundle
from ..bundle.turns import ChatTurns
from ..errors import BundleError, MarsError, SessionError
from .dialects import LIST, Dialect, dialect_in
from .special_tokens import PlainText
from .template import Template
from .thinking import ThinkingStream
from .tool_messages import RESULT_ROLES, calls_as_text, results_as_user, with_tools

Message = Mapping[str, Any]

# Roles that are known in addition to those of the bundle's table.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
PROBE = "mars-0-probe"
CALL_ID = "abcdefghi"
PROBED_CALL = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": {}}}
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}
RESULT = {"role": "tool", "content": PROBE}
PROBES: Mapping[str, Sequence[Sequence[Message]]] = {
    "system": [[{"role": "system", "content": PROBE}, USER]],
    "tool": [
        [USER, {**ANSWER, "tool_calls": [PROBED_CALL]}, {**RESULT, "tool_call_id": CALL_ID, "name": "f"}],
        [USER, ANSWER, RESULT],
    ],
}
MAX_STOPS, MAX_STOP = 16, 256  # stop strings of a request, and characters of each
BROKEN = "\ufffd"  # the decoder's character for bytes that are no text, or not yet
# Tokens whose text is not known; the first and the last of them, which decide about later ones; and the
# characters that later bytes may still change.
MAX_UNREAD, FIRST_UNREAD, LAST_UNREAD, OPEN = 48, 4, 16, 3
TOKENIZER_LIMIT = 1 << 30  # bytes
SAFE_ADVICE = ", or open it without safe mode if you trust its source"
# A prompt with more characters than a context full of very long tokens is refused before it is tokenized.
CHARACTERS_PER_TOKEN, ALWAYS_TAKEN = 32, 65_536


class Text:
    """The tokenizer and chat template of a bundle.

    `turns` is the template as a table, which is used when it covers the messages. Prompts of more than `most`
    characters are refused. `tool_template` takes the template's place in prompts with tools, and calls are
    written in the `dialect`. `special_tokens` are more variables of the templates. `safe` mode uses the table
    only, since a template is a program. With `parse_special`, the text of a special token or of one of the
    `control_tokens` in a message becomes that token; else it is plain text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        turns: ChatTurns | None = None,
        most: int | None = None,
        *,
        tool_template: str | None = None,
        dialect: Dialect = LIST,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Sequence[str] = (),
        safe: bool = False,
        parse_special: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._plain = None if parse_special else PlainText(tokenizer, control_tokens)
        self._advice = SAFE_ADVICE if safe and chat_template else ""
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {**(special_tokens or {})} | {k: v for k, v in tokens.items() if v is not None}
        self._turns, self._most, self._dialect = turns, most, dialect
        self._kept: dict[tuple[Template | None, str], bool] = {}
        try:
            self._template, self._tool_template = (
                Template(source) if source and not safe else None for source in (chat_template, tool_template)
            )
        except Exception as error:  # a hostile template can raise anything
            raise BundleError(
                f"the chat template is not valid jinja2 ({_words(error)});"
                " export again with a corrected template"
            ) from error

    @classmethod
    def of(cls, bundle: Bundle, *, safe: bool = False, parse_special: bool = False) -> Text:
        """Load a bundle's tokenizer. Raises BundleError if it has none or if it is unreadable."""
        info = bundle.manifest.text
        if info is None:
            raise BundleError(f"{bundle.path}: this bundle has no tokenizer; pass token ids instead of text")
        file = bundle.path / info.tokenizer
        with no_panic(BundleError, f"{file}: not a readable tokenizer", "export again"):
            tokenizer = Tokenizer.from_buffer(read_small(file, TOKENIZER_LIMIT, links=True))
        tokenizer.no_truncation()  # of the training that it was saved after
        tokenizer.no_padding()
        most = most_characters(bundle.manifest.model.context_length)
        return cls(
            tokenizer,
            info.chat_template,
            info.bos_token,
            info.eos_token,
            info.chat,
            most,
            tool_template=info.tool_template,
            dialect=dialect_in(info),
            special_tokens=info.special_tokens,
            control_tokens=info.control_tokens,
            safe=safe,
            parse_special=parse_special,
        )

    def encode(
        self,
        prompt: str | Sequence[Message],
        most: int | None = None,
        tools: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a text, or of messages ({role, content}) in the chat template with the beginning of
        the answer.

        `tools` is the JSON text of functions in OpenAI's form, which the prompt of messages lists. `template`
        has variables of the chat template, such as `enable_thinking`.

        Raises SessionError for an invalid prompt, and for one with more characters than `most` tokens can
        have.
        """
        is_text = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else self.rendered(prompt, most, tools, template)
        return self._ids(text, most, add_special_tokens=is_text)

    def prepare(self) -> None:
        """Build the tokenizer of messages with special tokens."""
        if self._plain is not None:
            self._plain.prepare()

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a continuation of `rendered`. Raises SessionError as `encode` does."""
        return self._ids(text, None, add_special_tokens=False)

    def spelled(self, token_ids: Sequence[int]) -> str:
        """The text of token ids with special tokens."""
        with no_panic(SessionError, "the bundle's tokenizer cannot decode these tokens", "export it again"):
            return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _ids(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        plain = None if self._plain is None or not self._plain.holds(text) else self._plain
        self._check(len(text if plain is None else plain.show(text)), most)
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

    def render(
        self,
        messages: Sequence[Message],
        most: int | None = None,
        tools: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages` in the chat template. Raises SessionError as `rendered` does."""
        text = self.rendered(messages, most, tools, template)
        return text if self._plain is None else self._plain.show(text)

    @property
    def settings(self) -> list[str]:
        """The variables of the chat template that `template` of `encode` may set."""
        templates = [t for t in (self._template, self._tool_template) if t is not None]
        return sorted(set[str]().union(*(t.settings for t in templates)))

    def rendered(
        self,
        messages: Sequence[Message],
        most: int | None = None,
        tools: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """`render` with hidden special tokens of messages, for `encode_part`. Raises SessionError.

        Tools, calls and results that the template does not take are written as text (docs/structured.md).
        """
        if self._template is None and self._turns is None:
            what = (
                "safe mode runs no chat template, and this bundle has no table in its place"
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
        if unknown := sorted(extra.keys() - set(self.settings)):
            known = ", ".join(self.settings) or "none"
            raise SessionError(
                f"the chat template has no variable {unknown[0][:60]!r} (it has: {known}){self._advice}",
                field="template",
            )
        self._check(sum(len(m["content"]) for m in messages if isinstance(m["content"], str)), most)
        if self._plain is not None:
            messages, extra = self._plain.hide(messages), self._plain.hide(extra)
            functions = self._plain.hide(functions)
        chosen = self._tool_template if functions and self._tool_template is not None else self._template
        messages = self._in_own_form(messages, functions, chosen)
        if functions and chosen is not None and chosen.takes_tools:
            extra["tools"] = functions
        return self._rendered(messages, chosen, extra)

    def _in_own_form(
        self, messages: Sequence[Message], functions: Sequence[Any] | None, template: Template | None
    ) -> Sequence[Message]:
        """Messages in which calls, results and tools that the template does not take are text."""
        original = messages
        if template is None or not template.takes_calls:
            messages = calls_as_text(messages, self._dialect)
        if any(m["role"] in RESULT_ROLES for m in messages) and not self._keeps(template, "tool"):
            messages = results_as_user(messages, original)
        if functions and (template is None or not template.takes_tools):
            messages = with_tools(messages, functions, has_system=self._keeps(template, "system"))
        return messages

    def _keeps(self, template: Template | None, role: str) -> bool:
        """Whether a message of this role is a part of the prompt: templates may refuse it, or ignore it."""
        if (template, role) not in self._kept:
            texts = []
            for messages in PROBES[role]:
                if template is None or not template.takes_calls:
                    messages = calls_as_text(messages, self._dialect)
                with suppress(SessionError):
                    texts.append(self._rendered(messages, template, {}))
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
                "the bundle's chat table does not know such a conversation; pass it as one text"
                + self._advice
            )
        try:
            return template.render(messages, **{**self._tokens, **values})
        except Exception as error:  # a template can raise anything
            raise SessionError(f"the chat template refuses these messages: {_words(error)}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        with no_panic(SessionError, "the bundle's tokenizer cannot decode this answer", "export it again"):
            return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Refuse unknown roles, which many templates would print unchanged. libmars refuses them too."""
        known = dict.fromkeys((*(self._turns.roles if self._turns else ()), *ROLES))
        if unknown := [
            f"{m['role'][:40]!r} in message {i}" for i, m in enumerate(messages) if m["role"] not in known
        ]:
            raise SessionError(
                f"unknown role {', '.join(unknown[:5])} (known: {', '.join(known)});"
                " write the conversation as one text if the model was tuned with others"
            )

    def _check(self, length: int, tokens: int | None) -> None:
        most = self._most if tokens is None else min(most_characters(tokens), self._most or sys.maxsize)
        if most is not None and length > most:
            limit = "this bundle's context takes" if most == self._most else "what is taken here is"
            raise SessionError(
                f"the prompt has {length} characters, {limit} at most {most}; shorten it",
                code="context_length_exceeded",
                field="prompt",
            )


def most_characters(tokens: int) -> int:
    """Most characters of a prompt that may have `tokens` tokens."""
    return max(ALWAYS_TAKEN, CHARACTERS_PER_TOKEN * tokens)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message


def _joined(number: int, message: Message) -> Message:
    """A message whose parts ({type: text, text: ...}, OpenAI's form) are joined to one text; null beside
    calls becomes an empty text. Raises SessionError for other content, which a template would print as Python
    does.
    """
    parts = message["content"]
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
                f"message {number}, part {i}: only text is understood, {{type: text, text: ...}},"
                f" not {str(kind)[:40]!r}"
            )
    return {**message, "content": "".join(part["text"] for part in parts)}


def _is_plain(message: Message) -> bool:
    """Whether the table of turns covers the form of a message."""
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)


def _words(error: BaseException) -> str:
    """The message of an error, shortened, or its class."""
    return (str(error) or type(error).__name__)[:2000]


@contextmanager
def no_panic(kind: type[MarsError], what: str, remedy: str) -> Iterator[None]:
    """Turn errors of a Rust library into `kind`. Hostile input can cause panics, which are not Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MarsError):
        raise
    except BaseException as error:
        raise kind(f"{what} ({_words(error)}); {remedy}") from error


def text_of(text: Text, token_ids: Sequence[int]) -> str:
    """The text of a whole answer, as its stream makes it. End-of-sequence tokens are not pushed."""
    stream = TextStream(text)
    for token in token_ids:
        stream.push(token)
    stream.complete()
    return stream.text


class TextStream:
    """The growing text of one answer, without incomplete characters and possible stop strings at its end.
    Stop strings in the thinking that `thinking` splits off have no effect.
    """

    def __init__(self, text: Text, stop: Sequence[str] = (), thinking: ThinkingStream | None = None) -> None:
        self._source = text
        if len(stop) > MAX_STOPS or any(len(s) > MAX_STOP for s in stop):
            raise SessionError(
                f"at most {MAX_STOPS} stop strings of at most {MAX_STOP} characters are taken,"
                f" not {len(stop)} of up to {max(map(len, stop))}; use fewer or shorter ones",
                field="stop",
            )
        self._stop = [s for s in stop if s]
        self._thinking = thinking if self._stop else None
        self._searched = 0  # characters in which there is no stop string
        # The last tokens: `num_read` whose text is known, which later ones may depend on, then the others.
        self._token_ids: list[int] = []
        self._num_read = 0
        self._known = ""  # the part of their text that is in `text`
        self._token_texts: list[str] = []  # that `take_token_texts` has not returned
        self._text = ""
        self._shown = 0
        self.stop_string: str | None = None  # that ended the text

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, token: int) -> bool:
        """Add a token. True if it completes a stop string; the text then ends before that string."""
        self._token_ids.append(token)
        piece = self._next_piece()
        self._token_texts.append(piece)
        if piece:
            self._append(piece)
        return self.stopped

    def _next_piece(self) -> str:
        """The text that the last token completes. The work for each token is bounded."""
        ids, num_open = self._token_ids, 0
        whole = self._source.decode(ids)
        if whole.endswith(BROKEN) or len(whole) <= len(self._known):
            if len(ids) - self._num_read < MAX_UNREAD:
                return ""
            # No character has so many bytes: all but the last of them never become one.
            whole = self._continued(whole)
            num_open = min(OPEN, len(whole) - len(self._known))
            del ids[self._num_read + FIRST_UNREAD : -LAST_UNREAD]
        else:
            whole = self._continued(whole)
            del ids[: self._num_read]
            self._num_read = len(ids)
        piece = whole[len(self._known) : len(whole) - num_open]
        self._known = self._source.decode(ids)
        self._known = self._known[: len(self._known) - num_open]
        return piece

    def _continued(self, whole: str) -> str:
        """`whole`, the text of the last tokens, or of the unread ones alone: with byte fallback, an invalid
        byte makes the decoder take back earlier characters of its run, which were shown.
        """
        if whole.startswith(self._known):
            return whole
        del self._token_ids[: self._num_read]
        self._num_read, self._known = 0, ""
        return self._source.decode(self._token_ids)

    def read(self) -> str:
        """The text that became final since the last call."""
        return self._up_to(len(self._text) - (0 if self.stopped else self._held()))

    def take_token_texts(self, num_tokens: int) -> tuple[str, ...]:
        """The texts of the next `num_tokens` tokens of the answer; an end-of-sequence token was not pushed.
        They are whole: a stop string, and text that is held back, are part of them. A character has
        its text at its last token.
        """
        taken, self._token_texts = self._token_texts[:num_tokens], self._token_texts[num_tokens:]
        return (*taken, *[""] * (num_tokens - len(taken)))

    def finish(self) -> str:
        """All remaining text; an incomplete character becomes U+FFFD."""
        self.complete()
        return self._up_to(len(self._text))

    def complete(self) -> None:
        """Add the text of an incomplete last character, as U+FFFD, to `text`. No token follows."""
        if self.stopped:
            return
        rest = self._continued(self._source.decode(self._token_ids))[len(self._known) :]
        self._token_ids, self._num_read, self._known = [], 0, ""
        self._append(rest)

    @property
    def text(self) -> str:
        """All text so far, with held-back text, without the stop string."""
        return self._text

    def _append(self, piece: str) -> None:
        self._text += piece
        start: int | None = 0
        if self._thinking is not None:
            self._thinking.push(piece)
            start = self._thinking.answer_start
        if start is None:
            return
        places = [(self._text.find(s, max(start, self._searched - len(s) + 1)), s) for s in self._stop]
        self._searched = len(self._text)
        if found := [(at, s) for at, s in places if at >= 0]:
            at, self.stop_string = min(found)
            self._text = self._text[:at]

    def _held(self) -> int:
        """The number of last characters that may begin a stop string."""
        if self._thinking is not None and self._thinking.is_undecided:
            return len(self._text)
        most = min(len(self._text), max(map(len, self._stop), default=0))
        ends = (self._text[-count:] for count in range(most, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _up_to(self, end: int) -> str:
        shown, self._shown = self._shown, max(self._shown, end)
        return self._text[shown : self._shown]
