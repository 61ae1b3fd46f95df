"""What libmars.so shows: what the public headers mark, and nothing else. The headers stand alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.cabi import build
from support.missing import lacking
from support.paths import ROOT
from support.shell import call

HEADERS = ROOT / "runtime/cpp/include/mars"
PUBLIC = {
    "batcher.hpp", "config.hpp", "conversation.hpp", "errors.hpp", "export.hpp", "mars.h", "session.hpp",
    "stats.hpp", "text.hpp",
}  # fmt: skip
MARKED_CLASS = re.compile(r"^(?:class|struct) MARS_API (\w+)", re.M)
MARKED_FUNCTION = re.compile(r"^(?:struct (\w+) \{|\};| *MARS_API [^;(]*?(\w+)\()", re.M)


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        lacking(f"{name} is not installed; `make cpp` installs what it needs")
    return found


def text_of(header: Path) -> str:
    return re.sub(
        r"//.*|/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.S if header.suffix == ".h" else 0
    )


def marked(header: Path) -> set[str]:
    """Qualified names behind MARS_API: of classes and of functions, also of one function of a struct."""
    text = text_of(header)
    if header.suffix == ".h":
        return set(re.findall(r"MARS_API [^;(]*?\b(mars_\w+)\(", text))
    names = {f"mars::{name}" for name in MARKED_CLASS.findall(text)}
    inside = ""
    for opened, function in MARKED_FUNCTION.findall(text):
        if function:
            names.add(f"mars::{inside + '::' if inside else ''}{function}")
        else:
            inside = opened
    return names


def shown() -> set[str]:
    """Names of the exported symbols, without parameters, tags and the words before typeinfo and vtables."""
    listed = call(tool("nm"), "-DC", "--defined-only", build() / "libmars.so", check=True).stdout
    symbols = [line.split(" ", 2)[2] for line in listed.splitlines()]
    plain = (re.sub(r"^(vtable|typeinfo|typeinfo name) for ", "", symbol) for symbol in symbols)
    return {re.split(r"[(\[]", symbol)[0] for symbol in plain}


def test_every_symbol_is_marked_in_a_public_header_and_every_mark_is_a_symbol() -> None:
    marks = set().union(*(marked(header) for header in HEADERS.iterdir()))
    assert len(marks) > 50  # the headers were read
    found = shown()
    owners = {name if name in marks else name.rsplit("::", 1)[0] for name in found}
    assert owners == marks


def test_public_headers_are_few_and_include_no_others() -> None:
    here = {header.name for header in HEADERS.iterdir()}
    assert here <= PUBLIC and PUBLIC - here <= {"batcher.hpp"}
    for header in HEADERS.iterdir():
        assert not re.findall(r'#include "', header.read_text(encoding="utf-8"))
        assert set(re.findall(r"#include <mars/([\w.]+)>", header.read_text(encoding="utf-8"))) <= here


@pytest.mark.parametrize("header", sorted(path.name for path in HEADERS.glob("*.hpp")))
def test_a_header_compiles_by_itself(header: str, tmp_path: Path) -> None:
    source = tmp_path / "alone.cpp"
    source.write_text(f"#include <mars/{header}>\n")
    flags = (
        "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{HEADERS.parent}",
    )  # fmt: skip
    subprocess.run([tool("c++"), *flags, source], check=True)


def test_programs_include_public_headers_only() -> None:
    for folder in ("examples", "runtime/cpp/app"):
        for path in (ROOT / folder).rglob("*.[ch]pp"):
            assert not re.findall(r'#include ".*src/', path.read_text(encoding="utf-8")), path
