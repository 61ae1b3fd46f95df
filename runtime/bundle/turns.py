"""A chat template as a table, without jinja2: the text between messages, and the marks of thinking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .fields import AnyText

START = "start"  # the role before the first message
SWITCH = "enable_thinking"  # the usual variable of chat templates


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts around the thinking at the beginning of an answer.

    `on`, `off`: `after` of ChatTurns with `enable_thinking` true and false; None if the template has no such
    variable, or one that changes other text, too.
    """

    open: str
    close: str
    on: Mapping[str, AnyText] | None = None
    off: Mapping[str, AnyText] | None = None

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if not self.open or not self.close:
            yield "", "two non-empty strings are expected"


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """The text around each message, for a template in which it depends on two roles only: that of the message
    and that of the message before it. The exporter proves that this holds.

    `between[previous][role]` precedes a message. `after[role]` follows the last message and begins the
    answer. A role that the table lacks cannot follow or end. Contents of the `trimmed` roles lose the white
    space around them. The table does not cover messages with one of the `reserved` strings.
    """

    between: Mapping[str, Mapping[str, AnyText]]
    after: Mapping[str, AnyText]
    trimmed: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for following in self.between.values() for role in following))

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if START not in self.between or not self.after:
            yield "", "a text at the start and one after the last message are needed"

    def render(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """The prompt of `messages` ({role, content}), or None if the table does not cover them."""
        text, previous = "", START
        for message in messages:
            role, content = message["role"], message["content"]
            before = self.between.get(previous, {}).get(role)
            if before is None or any(word in content for word in self.reserved):
                return None
            text += before + (content.strip() if role in self.trimmed else content)
            previous = role
        end = self.after.get(previous)
        return None if end is None else text + end
