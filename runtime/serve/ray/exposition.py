"""Merging the Prometheus metrics of several replicas."""

from __future__ import annotations

from collections.abc import Mapping

LABEL = "replica"


def merged(pages: Mapping[str, str]) -> str:
    """The metrics of all `pages`, by replica. The samples of each metric are together, as the
    format requires.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        comments: dict[str, list[str]] = {}
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                comments.setdefault(family, []).append(line)
            elif line.strip():
                samples.setdefault(family, []).append(labelled(line, replica))
        for name, lines in comments.items():
            heads.setdefault(name, lines)
    return "".join(f"{line}\n" for name in heads for line in (*heads[name], *samples.get(name, [])))


def labelled(line: str, replica: str) -> str:
    """A sample with the label `replica` added."""
    label = LABEL + '="' + replica.replace("\\", "\\\\").replace('"', '\\"') + '"'
    name, brace, rest = line.partition("{")
    if not brace:
        name, _, value = line.partition(" ")
        return f"{name}{{{label}}} {value}"
    return f"{name}{{{label}}}{rest[1:]}" if rest.startswith("}") else f"{name}{{{label},{rest}"
