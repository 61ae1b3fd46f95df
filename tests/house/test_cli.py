"""The command line: what each command prints, its JSON, its exit codes, and its answers to wrong input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.shell import run, run_process
from support.tiny import Named

from mars_export.runtime import Batcher, GenerationConfig, Session, SessionError
from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.manifest import Profile
from mars_export.runtime.bundle.open import open_bundle


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


def test_the_window_is_a_word_or_a_number(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("generate", plain, "-p", "hello", "--tau", "0.5", "--max-new-tokens", "5", "--json")
    for window in ("auto", "1", "3"):
        assert run_process(*arguments, "--window", window).returncode == 0
    assert len(list(tmp_path.rglob("costs/*.json"))) <= 1, (
        "measured for auto only; a busy machine's table is not kept"
    )
    for wrong in ("0", "x", "9" * 500):
        refused = run(*arguments, "--window", wrong)
        assert refused.returncode == 2
        assert "auto, full or a number of 1 or more" in " ".join(refused.stderr.replace("│", " ").split())
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


def test_every_answer_of_a_talk_follows_a_grammar(plain: Path) -> None:
    done = run("chat", plain, "--choice", "fine", "--json", stdin="hello\nagain\n")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["fine", "fine"]


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
        (["--n", "3"], "greedy answers are all the same; give --temp"),
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


def test_short_forms_that_hands_know(plain: Path) -> None:
    arguments = ("generate", plain, "-p", "hello", "--json")
    long = ("--max-new-tokens", "5", "--temperature", "0.7", "--threads", "1", "--seed", "3")
    short = ("-n", "5", "--temp", "0.7", "-t", "1", "--seed", "3")
    answers = [json.loads(run(*arguments, *options).stdout)["token_ids"] for options in (long, short)]
    assert answers[0] == answers[1]
    assert len(json.loads(run(*arguments, "--max-tokens", "3").stdout)["token_ids"]) <= 3


def test_several_answers(plain: Path) -> None:
    drawn = ("generate", plain, "-p", "hello", "-n", "8", "--temp", "1.5", "--seed", "5", "--json")
    done = run(*drawn, "--n", "3")
    assert done.returncode == 0, done.stderr
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
        done = run(*asked, *options)
        assert done.returncode == 0, done.stderr
        for answer in (json.loads(line) for line in done.stdout.splitlines()):
            calls = [(call["name"], json.loads(call["arguments"])) for call in answer["tool_calls"]]
            assert ("lamp", {"on": True}) in calls, answer


def test_min_p_of_one_is_greedy(plain: Path) -> None:
    arguments = ("generate", plain, "-p", "hello", "-n", "8", "--json")
    greedy, drawn = run(*arguments), run(*arguments, "--temp", "1.5", "--min-p", "1")
    assert json.loads(greedy.stdout)["token_ids"] == json.loads(drawn.stdout)["token_ids"]
    assert "min_p must be" in run(*arguments, "--min-p", "2").stderr


@pytest.mark.parametrize(
    ("options", "window"),
    [
        (["--tau", "0.3", "--seed", "1"], "full"),
        (["--tau", "0.3", "--temp", "1"], "full"),
        (["--tau", "0.3", "--temp", "1", "--window", "auto"], "auto"),
        (["--tau", "0.3"], "auto"),
        (["--temp", "1"], "auto"),
    ],
)
def test_a_drawn_text_does_not_follow_measured_costs(
    plain: Path, options: list[str], window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def stream(self: Session, prompt: object, config: GenerationConfig, **more: object) -> object:
        asked.append(config.window)
        return real(self, prompt, config, **more)  # type: ignore[arg-type]

    real = Session.stream
    monkeypatch.setattr(Session, "stream", stream)
    assert run("generate", plain, "-p", "x", "-n", "4", *options).returncode == 0
    assert asked == [window]


def test_more_threads_than_cores_are_not_started(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_export.runtime.machine.cores", lambda: 2)
    opened = []
    monkeypatch.setattr(
        "mars_export.runtime.opening._backend",
        lambda *given: opened.append(given[3]) or (_ for _ in ()).throw(SessionError("enough")),
    )
    for threads, used, said in (("999", 2, True), ("3", 2, True), ("2", 2, False), ("1", 1, False)):
        done = run("generate", plain, "-p", "x", "-t", threads)
        assert opened.pop() == used
        assert ("this machine has 2 cores; 2 threads are used" in done.stderr) is said


def test_a_bundle_is_not_exported_again(plain: Path, tmp_path: Path) -> None:
    done = run("onnx", plain, "-o", tmp_path / "new")
    assert (done.returncode, (tmp_path / "new").exists()) == (1, False)
    assert "a bundle already" in done.stderr
    assert "mars-export trt" in done.stderr


def test_what_is_no_bundle_is_named(checkpoints: Named, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for what, message in (
        (
            "Xalphinions/MARS-Qwen2.5-0.5B-blk8",
            "export it first: `mars-export onnx Xalphinions/MARS-Qwen2.5-0.5B-blk8",
        ),
        (checkpoints("qwen2"), "a checkpoint, not a bundle; export it first"),
        (tmp_path / "model.gguf", "a GGUF checkpoint, not a bundle; export it first"),
        (tmp_path, "it has no manifest.json; make one with `mars-export onnx CHECKPOINT -o BUNDLE`"),
        (tmp_path / "nothing.bundle", "no such bundle; make one with"),
    ):
        done = run("generate", what, "-p", "x")
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr


def test_the_mask_that_was_given_wins_and_that_is_said(checkpoints: Named, tmp_path: Path) -> None:
    arguments = ("onnx", checkpoints("qwen2"), "--block", "4", "--no-oracle")
    done = run(*arguments, "-o", tmp_path / "a", "--mask-token", "<|endoftext|>")
    said = " ".join(done.stderr.split())
    assert done.returncode == 0, done.stderr
    assert "--mask-token <|endoftext|> (id 265) is taken, not the tokenizer's own <|mask|>" in said
    assert open_bundle(tmp_path / "a").manifest.tokens.mask == 265
    same = run(*arguments, "-o", tmp_path / "b", "--mask-token", "<|mask|>")
    assert (same.returncode, "is taken" in same.stderr) == (0, False)


def test_profiles_are_tables(bundles: Named, tmp_path: Path) -> None:
    path = shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle")
    digest = next(e.sha256 for e in open_bundle(path).manifest.files if e.path == "model.onnx")
    evidence = {"task": "sums", "num_rows": 60, "interval": [0.25, 0.5], "tested": [{"tau": 0.9, "ok": True}]}
    profiles.store(path, Profile("sums", 0.9, "probability", "model", digest, evidence))
    shown = run("profiles", "show", path, "sums")
    assert shown.returncode == 0
    assert not set("{}[]'") & set(shown.stdout), "a Python value was printed"
    lines = [line.split() for line in shown.stdout.splitlines()]
    for words in (
        ["tau", "0.9"],
        ["num_rows", "60"],
        ["interval", "0.25,", "0.5"],
        ["tested", "tau", "0.9,", "ok", "yes"],
    ):
        assert words in lines
    assert json.loads(run("profiles", "show", path, "sums", "--json").stdout)["evidence"] == evidence


@pytest.mark.parametrize("wrong", [5, None, b"bytes", {"role": "user"}, object()])
def test_a_prompt_of_another_kind_is_an_error_of_ours(plain: Path, wrong: object) -> None:
    session = Session.open(plain, threads=1)
    with pytest.raises(SessionError, match="a prompt is a text, messages or token ids, not"):
        session.generate(wrong)  # type: ignore[arg-type]
    with Batcher(session) as batcher, pytest.raises(SessionError, match="a prompt is a text"):
        batcher.submit(wrong)  # type: ignore[arg-type]
    with (
        Batcher(session) as batcher,
        pytest.raises(SessionError, match="a config is a GenerationConfig, not str"),
    ):
        batcher.submit("x", "y")  # type: ignore[arg-type]


def test_threads_of_another_kind(plain: Path) -> None:
    for wrong in ("2", 0, 1.5):
        with pytest.raises(SessionError, match="threads must be None or an integer of 1 or more"):
            Session.open(plain, threads=wrong)  # type: ignore[arg-type]


def test_an_array_of_ids_is_a_prompt(plain: Path) -> None:
    session = Session.open(plain, threads=1)
    assert session.encode(np.array([1, 2, 3])) == [1, 2, 3]  # type: ignore[arg-type]


def test_errors_are_json_where_results_are(plain: Path, tmp_path: Path) -> None:
    absent = str(tmp_path / "none")
    for words in (
        ("inspect", absent),
        ("generate", absent, "-p", "x"),
        ("profiles", "list", absent),
        ("prefix", "list", absent),
        ("unpack", absent),
        ("onnx", absent, "-o", str(tmp_path / "out")),
    ):
        done, plainly = run(*words, "--json"), run(*words)
        assert (done.returncode, plainly.returncode) == (1, 1)
        error = json.loads(done.stdout)["error"]
        assert error["kind"].endswith("Error")
        assert absent in error["message"]
        assert plainly.stdout == ""
        assert done.stderr == plainly.stderr, "people see the same"
        assert " ".join(error["message"].split()) in " ".join(done.stderr.split())
    [bad, good] = map(
        json.loads,
        run("chat", plain, "--json", "-n", "2", stdin="/load nowhere\nhello\n").stdout.splitlines(),
    )
    assert bad["error"]["message"]
    assert good["text"]
