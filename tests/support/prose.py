"""The words that people read: prose of Markdown, `--help`, and the comments and strings of source files."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import typer

from mars_export import cli
from support.paths import ROOT

KINDS = {"page", "help", "comment", "docstring", "string"}
QUOTES = re.compile(r"""^[A-Za-z]*("{3}|'{3}|"|')|("{3}|'{3}|"|')$""")
# A C++ comment or string. A character is matched, too, so that '"' begins no string.
CPP = re.compile(
    r"""//(?P<line>[^\n]*) | /\*(?P<block>.*?)\*/ | R"\((?P<raw>.*?)\)" | "(?P<text>(?:\\.|[^"\\\n])*)"
    | '(?:\\.|[^'\\])+'""",
    re.DOTALL | re.VERBOSE,
)


class Passage(NamedTuple):
    where: str  # path:line, or the command
    kind: str  # "page", "help", "comment", "docstring", "string"
    text: str  # on one line


def markdown(path: Path) -> Iterator[Passage]:
    """Paragraphs, list items, headings and table rows, without code and without the targets of links."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^( *)```.*?^\1```$", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", lambda found: "`" + "\n" * found[0].count("\n"), text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    begin, lines = 0, [*text.splitlines(), ""]
    for number, line in enumerate(lines, 1):
        if re.match(r" *(\||[-*] |\d+\. |#)", line) or not line.strip():
            yield from _passage(
                path, begin, "page", [f"{part} " for part in lines[begin - 1 : number - 1] if begin]
            )
            begin = number if line.strip() else 0
        elif not begin:
            begin = number


def python(path: Path) -> Iterator[Passage]:
    """Comments, docstrings and strings. Neighbors of one kind are one passage: a sentence may go on in the
    next line.
    """
    begin, parts, last, fresh = 0, [], "", True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        name = tokenize.tok_name[token.type]
        if name in {"NL", "INDENT", "DEDENT", "FSTRING_START", "FSTRING_END"}:
            continue
        kind = name
        if name in {"STRING", "FSTRING_MIDDLE"}:
            kind = "docstring" if last == "docstring" or fresh else "string"
        elif name == "COMMENT":
            kind = "comment"
        if kind != last:
            yield from _passage(path, begin, last, parts)
            begin, parts = token.start[0], []
        if kind == "comment":
            parts.append(token.string.lstrip("#") + " ")
        elif name == "FSTRING_MIDDLE":
            parts.append(token.string)
        elif name == "STRING":
            parts.append(QUOTES.sub("", token.string))
        last, fresh = kind, name == "NEWLINE" or (fresh and name in {"COMMENT", "ENCODING"})
    yield from _passage(path, begin, last, parts)


def cpp(path: Path) -> Iterator[Passage]:
    """Comments and strings. Those on neighboring lines are one passage."""
    text = path.read_text(encoding="utf-8")
    begin, parts, end, last = 0, [], 0, ""
    for found in CPP.finditer(text):
        if found.lastgroup is None:
            continue
        kind = "string" if found.lastgroup in {"raw", "text"} else "comment"
        if kind != last or text[end : found.start()].strip():
            yield from _passage(path, begin, last, parts)
            begin, parts = text.count("\n", 0, found.start()) + 1, []
        parts.append(found[found.lastgroup].lstrip("/!") + (" " if kind == "comment" else ""))
        end, last = found.end(), kind
    yield from _passage(path, begin, last, parts)


def html(path: Path) -> Iterator[Passage]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield from _passage(path, number, "page", [line])


def helps() -> Iterator[Passage]:
    """What `--help` says of every command: its text, its end, and each option."""
    yield from _helps(typer.main.get_command(cli.app), "mars-export")


def _helps(command: click.Command, name: str) -> Iterator[Passage]:
    words = [command.help, command.epilog]
    words += [getattr(parameter, "help", None) for parameter in command.params]
    yield from (Passage(f"{name} --help", "help", " ".join(text.split())) for text in words if text)
    for child, below in getattr(command, "commands", {}).items():
        yield from _helps(below, f"{name} {child}")


def _passage(path: Path, line: int, kind: str, parts: list[str]) -> Iterator[Passage]:
    if kind in KINDS and (text := " ".join("".join(parts).split())):
        yield Passage(f"{path.relative_to(ROOT)}:{line}", kind, text)


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")
