"""The command line: what each command prints, its JSON, its exit codes, and its answers to wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.shell import run, run_process
from support.tiny import Named


@pytest.fixture(scope="module")
def plain(bundles: Named) -> Path:
    return bundles("qwen2")


def test_export_then_inspect(checkpoints: Named, tmp_path: Path) -> None:
    done = run(
        "onnx",
        checkpoints("a2d-qwen2"),
        "-o",
        tmp_path / "out",
        "--block",
        "4",
        "--fixed",
        "--capacity",
        "64",
        "--prefill",
        "16",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)["manifest"]
    assert manifest["block"] == 4
    assert [v["slots"] for v in manifest["variants"]] == [None, 1, 4, 16]
    shown = run("inspect", tmp_path / "out", "--verify")
    assert shown.returncode == 0
    assert "block 4" in shown.stdout
    assert json.loads(run("inspect", tmp_path / "out", "--json").stdout) == manifest


def test_existing_output_is_refused_and_kept(checkpoints: Named, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    refused = run("onnx", checkpoints("qwen2"), "-o", tmp_path / "mine")
    forced = run("onnx", checkpoints("qwen2"), "-o", tmp_path / "mine", "--force")
    assert (refused.returncode, forced.returncode) == (1, 1)
    assert "exists" in refused.stderr
    assert "not a bundle" in forced.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_generate_json(plain: Path) -> None:
    done = run("generate", plain, "-p", "hello", "--tau", "0.5", "--max-new-tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert 1 <= len(value["token_ids"]) <= 12
    assert len(value["confidences"]) == len(value["token_ids"]) == value["stats"]["tokens"]
    assert value["finish_reason"] in ("eos", "length")


def test_the_window_is_auto_or_a_number(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("generate", plain, "-p", "hello", "--tau", "0.5", "--max-new-tokens", "5", "--json")
    for window in ("auto", "1", "3"):
        assert run_process(*arguments, "--window", window).returncode == 0
    assert len(list(tmp_path.rglob("*.json"))) <= 1, (
        "measured for auto only; a busy machine's table is not kept"
    )
    for wrong in ("0", "x", "9" * 500):
        refused = run(*arguments, "--window", wrong)
        assert refused.returncode == 2
        assert "auto or a number of 1 or more" in " ".join(refused.stderr.replace("│", " ").split())
    both = run("generate", plain, "-p", "x", "--profile", "p", "--window", "auto")
    assert both.returncode == 1
    assert "a profile sets tau, metric and window" in both.stderr


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
    arguments = ("generate", plain, "-p", "hello", "--max-new-tokens", "16", "--window", "4")
    assert run(*arguments).stdout.rstrip("\n") == json.loads(run(*arguments, "--json").stdout)["text"].rstrip(
        "\n"
    )


def test_block_commit_from_the_shell(plain: Path) -> None:
    arguments = ("generate", plain, "-p", "hello", "--tau", "1", "--max-new-tokens", "10", "--json")
    cursor, block = run(*arguments), run(*arguments, "--commit", "block", "--cache-block", "5")
    assert json.loads(cursor.stdout)["token_ids"] == json.loads(block.stdout)["token_ids"]


def test_chat_remembers_and_obeys(plain: Path) -> None:
    lines = "hello\n/tau 0.3\nagain\n/reset\nhello\n/quit\n"
    done = run("chat", plain, "--tau", "1", "--max-new-tokens", "6", "--json", stdin=lines)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a["tau"] for a in answers] == [1.0, 0.3, 0.3]
    assert (
        answers[1]["stats"]["prompt_tokens"]
        > answers[0]["stats"]["prompt_tokens"]
        == answers[2]["stats"]["prompt_tokens"]
    )


def test_chat_reads_nothing_twice(plain: Path) -> None:
    lines = "the man in the error\nagain\n/undo\nanother\n/edit yet another\n/edit\n"
    options = ("--system", "be the inner man " * 20, "--max-new-tokens", "6", "--window", "6")
    done, without = (
        run("chat", plain, *options, "--json", *more, stdin=lines) for more in ((), ("--cache-bytes", "0"))
    )
    assert done.returncode == without.returncode == 0, done.stderr
    assert "/edit QUESTION" in done.stderr
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
    assert "take turns back (undo)" in " ".join(full.stderr.split())
    done = run("chat", plain, *options, "--drop-oldest", stdin=lines)
    assert len(done.stdout.splitlines()) == 6
    assert "turn(s) are forgotten" in done.stderr


def test_chat_survives_wrong_commands(plain: Path) -> None:
    done = run("chat", plain, "--max-new-tokens", "4", stdin="/tau fast\n/dance\nhello\n")
    assert done.returncode == 0
    assert "/tau needs a number" in done.stderr
    assert "/reset" in done.stderr


def test_doctor(plain: Path, tmp_path: Path) -> None:
    assert run("doctor").returncode == 0
    good = run("doctor", plain, "--json")
    assert good.returncode == 0
    assert json.loads(good.stdout)["good"] is True
    bad = run("doctor", tmp_path / "nothing")
    assert bad.returncode == 1
    assert "no such bundle" in bad.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tau", "0.5", "--metric", "luck"], "metric must be one of"),
        (["--top-p", "0"], "top_p must be"),
        (["--commit", "often"], "commit must be one of"),
        (["--device", "abacus"], "unknown device"),
        (["--device", "cuda"], "mars-export[gpu]"),
        (["--file", "PROMPT"], "not both"),
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
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_prompt_that_is_not_text(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    done = run("generate", plain, "-f", tmp_path / "bytes")
    assert done.returncode == 1
    assert "not UTF-8" in done.stderr


def test_full_context_keeps_the_text(plain: Path) -> None:
    done = run("generate", plain, "--raw", "-p", "a" * 508, "--tau", "1", "--max-new-tokens", "100", "--json")
    if json.loads(done.stdout)["finish_reason"] == "eos":
        pytest.fail("the tiny model ended by itself: choose another prompt")
    assert done.returncode == 1
    assert json.loads(done.stdout)["token_ids"]
    assert "the context of 512 tokens is full" in done.stderr


def test_the_program_itself(plain: Path, tmp_path: Path) -> None:
    """Entry point, exit codes and streams, once through the operating system."""
    good = run_process("generate", plain, "-p", "hello", "--max-new-tokens", "2", "--window", "2")
    assert (good.returncode, good.stderr.count("tokens/forward")) == (0, 1)
    bad = run_process("generate", tmp_path / "nothing", "-p", "hello")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("error: ")
    assert run_process("generate", plain, "--no-such-option").returncode == 2


def test_ctrl_c_is_130(plain: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompt")
    command = [sys.executable, "-m", "mars_export", "generate", plain, "-f", tmp_path / "prompt"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with (tmp_path / "prompt").open("w"):  # opens when the program reads its prompt
        program.send_signal(signal.SIGINT)
        said = program.communicate(timeout=60)
    assert (program.returncode, "Traceback" in said[1]) == (130, False)


def test_help_needs_no_heavy_package() -> None:
    heavy = ("numpy", "torch", "onnx", "onnxruntime", "tokenizers", "transformers")
    code = (
        "import sys; from mars_export import cli; sys.argv = ['mars-export', 'generate', '--help']\n"
        "try: cli.main()\n"
        f"finally: sys.stderr.write(' '.join(name for name in {heavy} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("--tau" in done.stdout, done.stderr) == (True, "")
