"""A chat template as a table: what stands between the contents of a conversation.

Knows no jinja2 and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

START = "start"  # stands for the role before the first message


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """The text before a content depends on the role before it and its own; the exporter proves that the
    template does no more.

    `between[previous][role]` precedes a content, `after[role]` follows the last one and begins the answer.
    Roles that are not there cannot follow or end. The contents of `trimmed` roles lose the white space around
    them. A content that holds one of the `reserved` strings is treated by the template in its own way, which
    this table does not tell.
    """

    between: Mapping[str, Mapping[str, str]]
    after: Mapping[str, str]
    trimmed: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles that it knows."""
        return tuple(dict.fromkeys(role for following in self.between.values() for role in following))

    def wrong(self) -> Iterator[tuple[str, str]]:
        """What contradicts itself in a table that was read."""
        if START not in self.between or not self.after:
            yield "", "no conversation can begin or end"

    def render(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """The prompt of `messages` ({role, content}), or None where only the template itself could tell."""
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
