"""`mars-export chat`: what it remembers, forgets and reads anew, and the commands inside it."""

from __future__ import annotations

import json
from pathlib import Path

from support.shell import run, succeed


def test_every_answer_of_a_talk_follows_a_grammar(plain: Path) -> None:
    done = succeed("chat", plain, "--choice", "fine", "--json", stdin="hello\nagain\n")
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["fine", "fine"]


def test_chat_remembers_and_obeys(plain: Path) -> None:
    lines = "hello\n/tau 0.3\nagain\n/reset\nhello\n/quit\n"
    done = succeed("chat", plain, "--tau", "1", "--max-new-tokens", "6", "--json", stdin=lines)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a["tau"] for a in answers] == [1.0, 0.3, 0.3]
    assert (
        answers[1]["stats"]["prompt_tokens"]
        > answers[0]["stats"]["prompt_tokens"]
        == answers[2]["stats"]["prompt_tokens"]
    )


def test_quiet_prints_answers_only(plain: Path) -> None:
    done = run("chat", plain, "-q", "--max-new-tokens", "4", stdin="hello\n")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
    once = run("generate", plain, "-q", "-p", "hello", "-n", "4")
    assert (once.returncode, once.stderr, once.stdout) == (0, "", done.stdout)


def test_a_tau_above_1_is_warned_about(plain: Path) -> None:
    done = run("generate", plain, "-p", "hello", "-n", "2", "--tau", "7")
    assert done.returncode == 0 and "warning: tau 7: no probability is above 1" in done.stderr
