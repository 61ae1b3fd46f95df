"""A talk: lines that make questions, commands that change settings, and Ctrl-C at a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from support.conversations import talk_of
from support.tiny import Named

from mars_export import GenerationConfig, MarsError
from mars_export.runtime.cli.chat import Talk, questions
from mars_export.runtime.decode.config import repeatable


def joined(lines: Sequence[str]) -> tuple[list[str], list[bool]]:
    """The questions that lines make, and of each line whether it was asked for as a continuation."""
    rest, asked = list(lines), []

    def read(goes_on: bool) -> str | None:
        asked.append(goes_on)
        return rest.pop(0) if rest else None

    return list(questions(read)), asked[: len(lines)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["a\\", "b\\", "c", "d"], ["a\nb\nc", "d"]),
        (["a\\"], ["a"]),
        (["", "  "], ["", "  "]),
    ],
)
def test_lines_make_questions(lines: list[str], expected: list[str]) -> None:
    assert joined(lines)[0] == expected


def test_commands_change_what_they_name() -> None:
    talk = talk_of()
    assert (talk.obey("/tau 0.8"), talk.config.tau, talk.config.exact) == ("tau 0.8", 0.8, False)
    assert (talk.obey("/exact"), talk.config.exact) == ("exact", True)
    assert (talk.obey("/runs"), talk.runs, talk.obey("/runs"), talk.runs) == (
        "runs on",
        True,
        "runs off",
        False,
    )
    for wrong in ("/tau fast", "/tau", "/tau -1", "/tau nan"):
        with pytest.raises(MarsError, match="tau"):
            talk.obey(wrong)
    assert talk.config.exact is True, "a wrong command changes nothing"
    assert all(f"/{name}" in talk.obey("/help") for name in ("system", "exact", "tau", "runs"))
    with pytest.raises(MarsError, match="unknown command /dance; /help lists"):
        talk.obey("/dance now")
    assert talk.obey("/tau 7").startswith("tau 7: no probability is above 1")


def contents(talk: Talk) -> list[str]:
    return [message["content"] for message in talk.conversation.messages]


def test_the_system_message_stands_first_and_survives_a_reset() -> None:
    talk = talk_of(system="be kind")
    talk.ask("hi")
    talk.obey("/system be brief")
    assert contents(talk) == ["be brief", "hi", "ok"]
    talk.obey("/reset")
    assert contents(talk) == ["be brief"]
    assert talk.obey("/system") == "be brief"
    assert talk.obey("/system -") == "system message removed"
    assert contents(talk) == []
    assert "no system message" in talk.obey("/system")
    talk.obey("/system again")
    assert contents(talk) == ["again"]


def test_turns_are_taken_back() -> None:
    talk = talk_of(system="be kind")
    assert talk.obey("/undo") == "there is no turn to remove"
    for question in ("hi", "he"):
        talk.ask(question)
    talk.conversation.give(["a result"])
    assert talk.obey("/undo") == "last turn removed", "with the results in it"
    assert contents(talk) == ["be kind", "hi", "ok"]
    talk.obey("/undo")
    assert contents(talk) == ["be kind"]


@pytest.mark.parametrize(
    ("changes", "has_masks", "has_seed", "masks"),
    [
        ({}, False, True, "auto"),
        ({"temperature": 0.8}, False, True, "auto"),
        ({"tau": 0.9}, False, False, "auto"),
        ({"tau": 0.9}, False, True, "full"),
        ({"tau": 0.9, "temperature": 0.8}, False, False, "full"),
        ({"tau": 0.9, "temperature": 0.8}, True, True, "auto"),
        ({"tau": 1.0, "temperature": 0.8}, False, True, "auto"),
        ({"tau": 0.9, "temperature": 0.8, "masks": 2}, True, True, 2),
        ({"tau": 0.9, "temperature": 0.8, "masks": 2}, False, True, 2),
    ],
)
def test_drawn_texts_at_a_tau_get_all_masks(
    changes: dict[str, object], has_masks: bool, has_seed: bool, masks: object
) -> None:
    config = GenerationConfig(**changes)  # type: ignore[arg-type]
    done = repeatable(config, has_masks=has_masks, has_seed=has_seed)
    assert done == config.with_values(masks=masks, tau=config.tau, exact=config.exact)
    if config.exact and config.temperature:
        talk = talk_of(config, has_masks=has_masks)
        talk.obey("/tau 0.9")
        assert talk.config.masks == "full"


class Terminal:
    """`mars-export chat` at a terminal of its own."""

    def __init__(self, *arguments: str | Path) -> None:
        self._own, theirs = pty.openpty()
        command = [sys.executable, "-m", "mars_export.cli", "chat", *map(str, arguments)]
        self.program = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=os.environ | {"TERM": "dumb", "COLUMNS": "200"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def until(self, text: str, count: int = 1, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while self.seen.count(text) < count:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self._own], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._own, 4096).decode("utf-8", "replace")
                except OSError:
                    break
        assert self.seen.count(text) >= count, self.seen

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def interrupt(self, text: str, count: int = 1) -> None:
        """Ctrl-C until `text` shows: one that comes just before input() waits is seen with the next key."""
        for _ in range(20):
            self.program.send_signal(signal.SIGINT)
            with suppress(AssertionError):
                self.until(text, count, seconds=3)
                return
            assert self.program.poll() is None, self.seen
        raise AssertionError(f"no {text!r} in {self.seen!r}")


def test_ctrl_c_at_the_prompt_keeps_the_talk(bundles: Named) -> None:
    terminal = Terminal(bundles("qwen2"), "-n", "3", "--tau", "1")
    try:
        terminal.until("> ")
        assert "qwen2" in terminal.seen and "/help lists the commands" in terminal.seen
        terminal.type("hello\n")
        terminal.until("tokens/forward")
        terminal.interrupt("Ctrl-D or /quit to leave")  # a moment after the answer has ended
        terminal.interrupt("Ctrl-D or /quit to leave", 2)
        terminal.type("/undo\n")
        terminal.until("last turn removed")
        terminal.type("/quit\n")
        assert terminal.program.wait(timeout=30) == 0
    finally:
        terminal.program.kill()
