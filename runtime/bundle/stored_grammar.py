"""What a manifest says of a grammar that is kept in the bundle: the automaton of what answers may be.

Knows names; runtime/structured/automaton_file.py reads and writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from .fields import Rule

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FILE = re.compile(r"grammar-[0-9a-f]{16}\.dfa")
KINDS = ("schema", "tools", "regex", "choice")


@dataclass(frozen=True, slots=True)
class StoredGrammar:
    """`kind`: what it was compiled from. It is of bytes: any variant and any tokenizer may follow it."""

    name: str
    file: str
    kind: Annotated[str, Rule(choices=KINDS)]
    states: Annotated[int, Rule(1, 2**17)]
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def wrong(self) -> Iterator[tuple[str, str]]:
        """What contradicts itself in what was read."""
        if NAME.fullmatch(self.name) is None:
            yield (
                "name",
                f"`{self.name[:60]}` is not letters, digits, dots, dashes and underscores, 64 at most",
            )
        if FILE.fullmatch(self.file) is None:
            yield "file", f"`{self.file[:60]}` is not grammar-, 16 hexadecimal digits and .dfa"
