"""Write src/text/unicode_tables.cpp: the properties that Hugging Face `tokenizers` gives each code point.

The tables are read off the library itself, because its parts follow different Unicode versions: the split
patterns a new one, the digits a newer one, NFC an old one. Tables of any single version would give other
token ids.
"""

from __future__ import annotations

import argparse
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

TARGET = Path(__file__).resolve().parent.parent / "src" / "text" / "unicode_tables.cpp"
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
HANGUL = range(0xAC00, 0xD7A4)
LOWEST, HIGHEST = "\u0334", "\u0345"  # marks of combining class 1 and 240, the least and the greatest
NFC, NFD = normalizers.NFC(), normalizers.NFD()


@dataclass(frozen=True, slots=True)
class Tables:
    """Sets of code points, and what NFC needs: `combining` classes above 0, and the canonical
    decompositions, each as (from, first, second or nothing, composes).
    """

    letters: frozenset[int]
    numbers: frozenset[int]
    digits: frozenset[int]
    spaces: frozenset[int]
    combining: dict[int, int]
    decompositions: list[tuple[int, ...]]


def observe() -> Tables:
    """Ask the installed library about every code point. Raises AssertionError where it does what our
    algorithm could not.
    """
    return Tables(
        letters=_matching(Regex(r"\p{L}+")),
        numbers=_matching(Regex(r"\p{N}+")),
        digits=_digits(),
        spaces=_matching(Regex(r"\s+")),
        combining=_combining(),
        decompositions=_decompositions(),
    )


def _matching(pattern: Regex) -> frozenset[int]:
    """The code points that `pattern` takes away, asked all at once."""
    text = "".join(map(chr, CODE_POINTS))
    left = pre_tokenizers.Split(pattern, "removed").pre_tokenize_str(text)
    return frozenset(CODE_POINTS) - {ord(c) for piece, _ in left for c in piece}


def _digits() -> frozenset[int]:
    text = "".join(map(chr, CODE_POINTS))
    pieces = pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str(text)
    # Pieces alternate; the text begins with U+0000, which is not a digit.
    return frozenset(ord(c) for piece, _ in pieces[1::2] for c in piece)


def _each(normalize: Callable[[str], str], texts: Iterable[str]) -> Iterator[str]:
    """Normalise many short texts in one call. U+0000 composes with nothing: it keeps them apart."""
    joined = "\0".join(texts)
    return iter(normalize(joined).split("\0"))


def _combining() -> dict[int, int]:
    """Combining classes as the library's reordering shows them. Only those newer than it knows may differ
    from Python's.
    """
    others = CODE_POINTS[1:]
    before = list(_each(NFD.normalize_str, (HIGHEST + chr(c) for c in others)))
    after = list(_each(NFD.normalize_str, (chr(c) + LOWEST for c in others)))
    classes = {}
    for c, high, low in zip(others, before, after, strict=True):
        if NFD.normalize_str(chr(c)) != chr(c):
            continue  # it decomposes before it is ordered
        known = unicodedata.combining(chr(c))
        moves = (
            (not high.startswith(HIGHEST) or c == ord(HIGHEST)),
            (low.startswith(LOWEST) or c == ord(LOWEST)),
        )
        if any(moves):
            assert known > 0, f"U+{c:04X} combines, but Python {unicodedata.unidata_version} does not know it"
            classes[c] = known
    return classes


def _decompositions() -> list[tuple[int, ...]]:
    others = [c for c in CODE_POINTS[1:] if c not in HANGUL]
    full = {
        c: d for c, d in zip(others, _each(NFD.normalize_str, map(chr, others)), strict=True) if d != chr(c)
    }
    # Of several code points with one decomposition, the one that NFC makes is the one that composes further.
    whole = {letters: chr(c) for c, letters in full.items() if len(letters) > 1}
    whole |= {letters: made for letters in whole if len(made := NFC.normalize_str(letters)) == 1}
    rows = []
    for c, letters in full.items():
        first = letters[0] if len(letters) <= 2 else whole.get(letters[:-1], "")
        assert len(first) == 1, f"U+{c:04X} is not a pair"
        second = [ord(letters[-1])] if len(letters) > 1 else []
        rows.append((c, ord(first), *second, len(letters) > 1 and NFC.normalize_str(letters) == chr(c)))
    return rows


def _ranges(points: Iterable[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for c in sorted(points):
        if found and found[-1][1] + 1 == c:
            found[-1] = (found[-1][0], c)
        else:
            found.append((c, c))
    return found


def _edges(points: Iterable[int]) -> list[str]:
    """Where a set of code points begins and ends, in turns."""
    return [f"0x{edge:X}" for low, high in _ranges(points) for edge in (low, high + 1)]


def _classes(classes: dict[int, int]) -> list[str]:
    ranges = [
        (low, high, k)
        for k in set(classes.values())
        for low, high in _ranges(c for c, v in classes.items() if v == k)
    ]
    return [f"{{0x{low:X}, 0x{high:X}, {k}}}" for low, high, k in sorted(ranges)]


def _runs(mapped: dict[int, list[int]]) -> list[str]:
    """The mapped code points, one string for each run of them."""
    return [
        f'{{0x{low:X}, U"{_literal(c for of in range(low, high + 1) for c in mapped[of])}"}}'
        for low, high in _ranges(mapped)
    ]


def _literal(points: Iterable[int]) -> str:
    """The inside of a C++ string, over several lines if it is long."""
    lines = [""]
    for c in points:
        if sum(2 if unicodedata.east_asian_width(each) == "W" else 1 for each in lines[-1]) > 98:
            lines.append("")
        lines[-1] += _character(c)
    return '"\n         U"'.join(lines)


def _character(c: int) -> str:
    """A character of a C++ string: itself if editors show it on its own, from left to right."""
    if unicodedata.bidirectional(chr(c)) == "L" and unicodedata.category(chr(c))[0] == "L" and c < 0x10000:
        return chr(c)
    return chr(c) if c < 0x80 else f"\\u{c:04X}" if c < 0x10000 else f"\\U{c:08X}"


def _lines(cells: Iterable[str]) -> str:
    """C++ initialisers, as many to a line as fit."""
    lines, line = [], "   "
    for cell in cells:
        if line.strip() and len(line) + 2 + len(cell) > 140:
            lines.append(line)
            line = "   "
        line += f" {cell},"
    return "\n".join([*lines, line])


def cpp(tables: Tables) -> str:
    """The text of unicode_tables.cpp."""
    pairs, exclusions, singles = (
        {c: to for c, *to, composes in tables.decompositions if (len(to), composes) == kind}
        for kind in ((2, True), (2, False), (1, False))
    )
    assert tables.numbers < tables.digits, "the Digits pre-tokenizer follows an older Unicode version"
    parts = [
        ("char32_t", "letters", _edges(tables.letters)),
        ("char32_t", "numbers", _edges(tables.numbers)),
        ("char32_t", "new_digits", _edges(tables.digits - tables.numbers)),
        ("char32_t", "spaces", _edges(tables.spaces)),
        ("CombiningRange", "combining", _classes(tables.combining)),
        ("Mapped", "pairs", _runs(pairs)),
        ("Mapped", "exclusions", _runs(exclusions)),
        ("Mapped", "singles", _runs(singles)),
    ]
    arrays = [
        f"static constexpr {kind} {name}_rows[] = {{\n{_lines(cells)}\n}};\n"
        f"const Table<{kind}> {name}{{std::begin({name}_rows), std::end({name}_rows)}};\n"
        for kind, name, cells in parts
    ]
    head = (
        f"// Written by tools/unicode_tables.py from tokenizers {tokenizers.__version__}; do not edit.\n"
        "// clang-format off\n"
        '#include "text/unicode_tables.hpp"\n\n#include <iterator>\n\nnamespace mars {\n\n'
    )
    return head + "\n".join(arrays) + "\n} // namespace mars\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=TARGET)
    parser.parse_args().output.write_text(cpp(observe()), encoding="utf-8")


if __name__ == "__main__":
    main()
