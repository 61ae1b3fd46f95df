"""Prometheus metrics: the counters of a front and of the router in its process, and those of all replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from threading import Lock

HELP = {
    "mars_front_requests": "Requests by outcome at the front.",
    "mars_front_retries": "Requests that were sent again because their replica was lost.",
    "mars_front_routes": "Requests by the reason for the choice of their replica.",
}
LABEL = {"mars_front_requests": "outcome", "mars_front_retries": "", "mars_front_routes": "route"}


class FrontCounters:
    """Three counters. Thread-safe, since a router has its own thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, metric: str, model: str, value: str = "", number: int = 1) -> None:
        assert metric in HELP, metric
        with self._lock:
            self._counts[metric, model, value] += number

    def text(self) -> str:
        with self._lock:
            counts = sorted(self._counts.items())
        lines = []
        for metric, words in HELP.items():
            lines += [f"# HELP {metric}_total {words}", f"# TYPE {metric}_total counter"]
            for (name, model, value), number in counts:
                if name == metric:
                    label = f',{LABEL[name]}="{value}"' if LABEL[name] else ""
                    lines.append(f'{metric}_total{{model="{_escaped(model)}"{label}}} {float(number)}')
        return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


OF_PROCESS = FrontCounters()


def routed(model: str, route: str) -> None:
    """Count a request that a router of this process sent."""
    OF_PROCESS.add("mars_front_routes", model, route)


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
    label = 'replica="' + replica.replace("\\", "\\\\").replace('"', '\\"') + '"'
    name, brace, rest = line.partition("{")
    if not brace:
        name, _, value = line.partition(" ")
        return f"{name}{{{label}}} {value}"
    return f"{name}{{{label}}}{rest[1:]}" if rest.startswith("}") else f"{name}{{{label},{rest}"
