"""What `--help` shows on a terminal of 80 columns: options by their whole names, and their other names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
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
