"""`mars-export generate`: prompts, options, its JSON, and its answers to wrong requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.shell import run, succeed

from mars_export import SessionError


def test_generate_json(plain: Path) -> None:
    done = succeed("generate", plain, "-p", "hello", "--tau", "0.5", "--max-new-tokens", "12", "--json")
    value = json.loads(done.stdout)
    assert 1 <= len(value["token_ids"]) <= 12
    assert len(value["confidences"]) == len(value["token_ids"]) == value["stats"]["tokens"]
    assert value["finish_reason"] in ("eos", "length")


def test_masks_are_a_word_or_a_number(plain: Path) -> None:
    arguments = ("generate", plain, "-p", "hello", "--tau", "0.5", "--max-new-tokens", "5", "--json")
    for masks in ("auto", "0", "2"):
        assert run(*arguments, "--masks", masks).returncode == 0
    for wrong in ("-1", "x", "9" * 500):
        refused = run(*arguments, "--masks", wrong)
        assert refused.returncode == 2
        assert "auto, full or a number of 0 or more" in " ".join(refused.stderr.replace("│", " ").split())
    both = run("generate", plain, "-p", "x", "--profile", "p", "--masks", "auto")
    assert both.returncode == 2
    assert "a profile sets exact, masks, metric, tau; use either the profile or masks" in both.stderr


@pytest.mark.parametrize("source", ["option", "file", "stdin"])
def test_prompt_sources_agree(plain: Path, tmp_path: Path, source: str) -> None:
    (tmp_path / "prompt.txt").write_text("hello", encoding="utf-8")
    arguments = {"option": ["-p", "hello"], "file": ["-f", str(tmp_path / "prompt.txt")], "stdin": []}[source]
    done = run(
        "generate",
        plain,
        *arguments,
        "--max-new-tokens",
        "8",
        "--tau",
        "1",
        "--json",
        stdin="hello" if source == "stdin" else "",
    )
    reference = run("generate", plain, "--prompt", "hello", "--max-new-tokens", "8", "--tau", "1", "--json")
    assert json.loads(done.stdout)["token_ids"] == json.loads(reference.stdout)["token_ids"]


def test_streamed_text_is_the_json_text(plain: Path) -> None:
    arguments = ("generate", plain, "-p", "hello", "--max-new-tokens", "16", "--masks", "3")
    assert run(*arguments).stdout.rstrip("\n") == json.loads(run(*arguments, "--json").stdout)["text"].rstrip(
        "\n"
    )


def test_block_commit_from_the_shell(plain: Path) -> None:
    arguments = ("generate", plain, "-p", "hello", "--tau", "1", "--max-new-tokens", "10", "--json")
    cursor, block = run(*arguments), run(*arguments, "--cache-block", "5")
    assert json.loads(cursor.stdout)["token_ids"] == json.loads(block.stdout)["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tau", "0.5", "--metric", "luck"], "metric must be one of"),
        (["--top-p", "0"], "top_p must be"),
        (["--temp", "1", "--min-p", "2"], "min_p must be"),
        (["--n", "3"], "greedy answers are all equal; add --temp"),
        (["--device", "abacus"], "unknown device"),
        (["--device", "cuda"], "mars-export[gpu]"),
        (["--file", "PROMPT"], "not both"),
        (["--prompt", "-"], "standard input is empty"),
    ],
)
def test_wrong_requests(plain: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "prompt").write_text("x")
    done = run(
        "generate",
        plain,
        "-p",
        "hello",
        *[str(tmp_path / "prompt") if a == "PROMPT" else a for a in arguments],
    )
    assert done.returncode == (1 if "cuda" in arguments else 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_prompt_that_is_not_text(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    done = run("generate", plain, "-f", tmp_path / "bytes")
    assert done.returncode == 2
    assert "not UTF-8" in done.stderr


def test_full_context_keeps_the_text(plain: Path) -> None:
    done = run("generate", plain, "--raw", "-p", "a" * 508, "--tau", "1", "--max-new-tokens", "100", "--json")
    if json.loads(done.stdout)["finish_reason"] == "eos":
        pytest.fail("the tiny model ended by itself: choose another prompt")
    assert done.returncode == 1
    assert json.loads(done.stdout)["token_ids"]
    assert "the context of 512 tokens is full" in done.stderr


def test_several_answers(plain: Path) -> None:
    drawn = ("generate", plain, "-p", "hello", "-n", "8", "--temp", "1.5", "--seed", "5", "--json")
    done = succeed(*drawn, "--n", "3")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a["seed"] for a in answers] == [5, 6, 7]
    assert len({tuple(a["token_ids"]) for a in answers}) == 3
    alone = json.loads(run(*drawn[:-2], "6", "--json").stdout)
    assert answers[1]["token_ids"] == alone["token_ids"]
    shown = run(*drawn[:-1], "--n", "2")
    assert (shown.returncode, shown.stderr.count("seed ")) == (0, 2)


def test_answers_that_call_tools(plain: Path, tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"on": {"enum": [True]}}, "required": ["on"]}
    tool = {"type": "function", "function": {"name": "lamp", "parameters": parameters}}
    (tmp_path / "tools.json").write_text(json.dumps([tool]), "utf-8")
    asked = ("generate", plain, "-p", "hello", "-n", "90", "--tools", tmp_path / "tools.json", "--json")
    for options in ((), ("--temp", "1.5", "--n", "2")):
        done = succeed(*asked, *options)
        for answer in (json.loads(line) for line in done.stdout.splitlines()):
            calls = [(call["name"], json.loads(call["arguments"])) for call in answer["tool_calls"]]
            assert ("lamp", {"on": True}) in calls, answer


def test_more_threads_than_cores_are_not_started(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_export.runtime.machine.cores", lambda: 2)
    opened = []
    monkeypatch.setattr(
        "mars_export.runtime.device.variants.OrtBackend",
        lambda *arguments: opened.append(arguments[2]) or (_ for _ in ()).throw(SessionError("enough")),
    )
    for threads, used, said in (("999", 2, True), ("3", 2, True), ("2", 2, False), ("1", 1, False)):
        done = run("generate", plain, "-p", "x", "-t", threads)
        assert opened.pop() == used
        assert ("this machine has 2 cores; 2 threads are used" in done.stderr) is said
