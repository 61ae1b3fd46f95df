"""Metrics of several processes as one page: each sample with the name of its replica."""

from __future__ import annotations

from collections.abc import Mapping

LABEL = "replica"


def merged(pages: Mapping[str, str]) -> str:
    """The text format of all `pages`, which are by replica: a metric's samples together, as it wants."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        own: dict[str, list[str]] = {}
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                own.setdefault(family, []).append(line)
            elif line.strip():
                samples.setdefault(family, []).append(labelled(line, replica))
        for name, lines in own.items():
            heads.setdefault(name, lines)
    return "".join(f"{line}\n" for name in heads for line in (*heads[name], *samples.get(name, [])))


def labelled(line: str, replica: str) -> str:
    """A sample with one label more."""
    own = LABEL + '="' + replica.replace("\\", "\\\\").replace('"', '\\"') + '"'
    name, brace, rest = line.partition("{")
    if not brace:
        name, _, value = line.partition(" ")
        return f"{name}{{{own}}} {value}"
    return f"{name}{{{own}}}{rest[1:]}" if rest.startswith("}") else f"{name}{{{own},{rest}"
