"""What `--help` shows on a terminal of 80 columns: options by their whole names, and their other names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.paths import ROOT
from support.shell import run
from typer.main import get_command

from mars_export import cli
from mars_export.runtime.terminal.options import bytes_of


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that runs something, with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


def plain(shown: str) -> str:
    return " ".join(shown.replace("│", " ").split())


ALL = dict(commands(get_command(cli.app)))


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_option_is_shown_whole(words: tuple[str, ...]) -> None:
    shown = run(*words, "--help").stdout.split()
    first = {p.opts[0] for p in ALL[words].params if p.opts[0].startswith("--")}
    # A second name may stand behind it, in less room.
    assert first <= {word.split(",")[0] for word in shown}, "cut off: say metavar, or shorten"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_other_names_are_told_and_taken(command: str) -> None:
    shown = plain(run(command, "--help").stdout)
    for other, name in cli.ALIASES.items():
        assert f"Also --{other}." in shown, name
        assert "No such option" not in run(command, "nowhere", f"--{other}", "1").stderr
        assert "No such option" not in run(command, "nowhere", f"--{other}=1").stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4194304", 4 << 20), ("4M", 4 << 20), ("1g", 1 << 30), ("512KiB", 512 << 10)],
)
def test_byte_options_take_units(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "1.5G", "4 M", "4X"])
def test_byte_options_refuse_other_words(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="4M or 1G"):
        bytes_of(text)


def test_t_is_threads_or_the_task() -> None:
    both = 0
    for words, command in ALL.items():
        owner = {name: option.opts[0] for option in command.params for name in option.opts}
        if "--threads" in owner:
            meant = "--task" if "--task" in owner else "--threads"
            assert owner.get("-t") == meant, words
            both += meant == "--task"
            assert meant != "--task" or "Here -t is the task" in plain(run(*words, "--help").stdout)
    assert both == 2, "calibrate, bench"


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_options_that_exist(page: Path) -> None:
    """`mars-export COMMAND ... --option` and `COMMAND --option`, in blocks and in text."""
    text = page.read_text(encoding="utf-8")
    for words, command in ALL.items():
        name = " ".join(words)
        options = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
        options |= {f"--{alias}" for alias in cli.ALIASES}
        for found in re.findall(rf"(?:^|`|mars-export ){name} ([^\n`|#&;>]*)", text, flags=re.M):
            used = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r'"[^"]*"|\'[^\']*\'', "", found)))
            assert used <= options, f"{name} {found}"


def anchor(heading: str) -> str:
    """As GitHub and mkdocs make it of a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, place = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if place:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.M)
            assert place in {anchor(heading) for heading in headings}, link
