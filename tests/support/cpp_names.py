"""The classes of C++ headers and of Python files, and the names in them. Headers are read as text: only the
forms that libmars uses are known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

FUNCTIONS = ""
"""Among classes: the functions outside of them."""


@dataclass(slots=True)
class Names:
    """`methods` are public or protected; `others` are fields, private names and nested ones."""

    bases: list[str] = field(default_factory=list)
    methods: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)


def of_header(text: str) -> dict[str, Names]:
    """The classes of namespace `mars` in a header, without nested ones, and its functions."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*#[^\n]*|\"(\\.|[^\"\\])*\"", "", text, flags=re.S | re.M)
    found = {FUNCTIONS: Names()}
    for head, block in _declarations(text):
        if block is not None and re.match(r"namespace mars\b", head):
            for inner, body in _declarations(block):
                _add(found, inner, body)
    return found


def of_python(text: str) -> dict[str, Names]:
    """The same of a Python file. Leading underscores are removed; attributes are among the others."""
    found = {FUNCTIONS: Names()}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[FUNCTIONS].methods.add(node.name)
        elif isinstance(node, ast.ClassDef):
            own = found[node.name] = Names([ast.unparse(base) for base in node.bases])
            for part in ast.walk(node):
                name = _python_name(part)
                if name is not None:
                    is_method = part in node.body and isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                    is_public = is_method and not name.startswith("_")
                    (own.methods if is_public else own.others).add(name if "__" in name else name.strip("_"))
    return found


def with_bases(name: str, classes: Mapping[str, Names]) -> set[str]:
    """All names of a class, its bases' included."""
    own = classes[name]
    return own.methods | own.others | {n for b in own.bases if b in classes for n in with_bases(b, classes)}


def _python_name(part: Any) -> str | None:
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
        return part.name
    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
        return part.target.id
    is_own = isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
    return part.attr if is_own and isinstance(part.ctx, ast.Store) else None


def _declarations(text: str) -> Iterator[tuple[str, str | None]]:
    """The declarations directly in a block: the text of each, and its own block."""
    head, parens, i = "", 0, 0
    while i < len(text):
        char = text[i]
        parens += {"(": 1, ")": -1}.get(char, 0)
        if char == "{" and not parens:
            depth, end = 1, i + 1
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            yield head.strip(), text[i + 1 : end - 1]
            head, i = "", end
        elif char == ";" and not parens:
            yield head.strip(), None
            head, i = "", i + 1
        else:
            head, i = head + char, i + 1


def _add(found: dict[str, Names], head: str, block: str | None) -> None:
    """Add a class with its members, or a function."""
    made = re.match(r"(class|struct) (?:MARS_API )?(\w+)(?: final)?(?::\s*public (\w+))?[^()]*$", head)
    if made is None:
        if (name := _function(head)) is not None:
            found[FUNCTIONS].methods.add(name)
    elif block is not None:
        own = found[made[2]] = Names([made[3]] if made[3] else [])
        access = "private" if made[1] == "class" else "public"
        for member, _ in _declarations(block):
            while label := re.match(r"(public|protected|private)\s*:(?!:)\s*", member):
                access, member = label[1], member[label.end() :]
            name = _function(member)
            if name is None:
                own.others |= {n.strip("_") for n in re.findall(r"(\w+)\s*(?:=[^,]*)?(?:,|$)", member)}
            elif name != made[2]:
                (own.others if access == "private" else own.methods).add(name.strip("_"))


def _function(head: str) -> str | None:
    """The name of a declared function; None for anything else."""
    while (shorter := re.sub(r"<[^<>]*>", "", head)) != head:
        head = shorter
    if head.startswith(("using", "friend", "enum", "struct", "class", "typedef")) or "operator" in head:
        return None
    found = re.match(r"[^(=]*?(~?\w+)\s*\(", head)
    return None if found is None or found[1].startswith("~") else found[1]
