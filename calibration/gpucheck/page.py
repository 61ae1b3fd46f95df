"""The checks of a device as a page of Markdown. Reads a report."""

from __future__ import annotations

from .outcome import CheckReport

SIGNS = {"passed": "passed", "failed": "**failed**", "not run": "not run here"}


def markdown(report: CheckReport) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    lines = [
        f"# {_plain(report.device_name)}",
        "",
        f"`mars-export gpucheck {_plain(report.bundle)} --device {report.device}`, {report.date}: variant"
        f" {report.variant}, {report.precision}, block {report.block}. {versions}.",
        "",
        "| check | | what was found | seconds |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {o.name}: {o.title} | {SIGNS[o.state]} | {_plain(o.detail)} | {o.seconds:g} |"
        for o in report.outcomes
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """One cell: no line breaks, no bars."""
    return " ".join(text.replace("|", "/").split())
