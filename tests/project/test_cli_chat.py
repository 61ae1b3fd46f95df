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


def test_chat_reads_nothing_twice(plain: Path) -> None:
    lines = "the man in the error\nagain\n/undo\nanother\n/undo\nyet another\n"
    options = ("--system", "be the inner man " * 20, "--max-new-tokens", "6", "--masks", "5")
    done, without = (
        run("chat", plain, *options, "--json", *more, stdin=lines) for more in ((), ("--cache-bytes", "0"))
    )
    assert done.returncode == without.returncode == 0, done.stderr
    one, other = ([json.loads(line) for line in run_.stdout.splitlines()] for run_ in (done, without))
    assert [a["token_ids"] for a in one] == [a["token_ids"] for a in other]
    assert [a["stats"]["prompt_tokens"] for a in one] == [a["stats"]["prompt_tokens"] for a in other]
    assert not any(a["stats"]["cached_tokens"] for a in [*other, one[0]])
    assert all(a["stats"]["cached_tokens"] >= 256 for a in one[1:])
    shown = run("chat", plain, *options, stdin=f"{'hello ' * 10}\nagain\n").stderr
    assert "0 of " in shown
    assert "256 of " in shown
    assert "prompt tokens from cache" in shown


def test_chat_says_when_it_forgets(plain: Path) -> None:
    lines = f"{'the man ' * 60}\n" * 6
    options = ("--max-new-tokens", "4", "--json")
    full = run("chat", plain, *options, stdin=lines)
    assert "remove turns (undo)" in " ".join(full.stderr.split())
    done = run("chat", plain, *options, "--drop-oldest", stdin=lines)
    assert len(done.stdout.splitlines()) == 6
    assert "turn(s) are forgotten" in done.stderr


def test_quiet_prints_answers_only(plain: Path) -> None:
    done = run("chat", plain, "-q", "--max-new-tokens", "4", stdin="hello\n")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
    once = run("generate", plain, "-q", "-p", "hello", "-n", "4")
    assert (once.returncode, once.stderr, once.stdout) == (0, "", done.stdout)


def test_a_tau_above_1_is_warned_about(plain: Path) -> None:
    done = run("generate", plain, "-p", "hello", "-n", "2", "--tau", "7")
    assert done.returncode == 0 and "warning: tau 7: no probability is above 1" in done.stderr
