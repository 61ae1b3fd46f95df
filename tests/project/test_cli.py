"""The command line itself: entry point, exit codes, help, errors as JSON, commands that look at a bundle."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.shell import run, run_process
from support.tiny import Named

from mars_export.runtime.bundle import profiles
from mars_export.runtime.bundle.manifest import Profile
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.machine import byte_products


def test_doctor(plain: Path, tmp_path: Path) -> None:
    done = run("doctor")
    assert done.returncode == 0 and f"byte products: {byte_products()}" in done.stdout
    good = run("doctor", plain, "--json")
    assert good.returncode == 0
    assert json.loads(good.stdout)["good"] is True
    bad = run("doctor", tmp_path / "nothing")
    assert bad.returncode == 1
    assert "no such bundle" in bad.stdout


def test_the_program_itself(plain: Path, tmp_path: Path) -> None:
    """Entry point, exit codes and streams, once through the operating system."""
    good = run_process("generate", plain, "-p", "hello", "--max-new-tokens", "2", "--masks", "1")
    assert (good.returncode, good.stderr.count("tokens/forward")) == (0, 1)
    bad = run_process("generate", tmp_path / "nothing", "-p", "hello")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("error: ")
    assert run_process("generate", plain, "--no-such-option").returncode == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_writer_and_leave_nothing(
    number: signal.Signals, code: int, checkpoints: Named, tmp_path: Path
) -> None:
    options = ("--precision", "fp32", "-o", tmp_path / "out" / "b")
    command = [sys.executable, "-m", "mars_export.cli", "onnx", checkpoints("qwen2"), *options]
    (tmp_path / "out").mkdir()
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out/.b.partial/new/weights.bin")) and program.poll() is None:
        time.sleep(0.001)
    program.send_signal(number)
    said = program.communicate(timeout=60)
    assert (program.returncode, "Traceback" in said[1], [*(tmp_path / "out").iterdir()]) == (code, False, [])


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


def test_profiles_are_tables(bundles: Named, tmp_path: Path) -> None:
    path = shutil.copytree(bundles("qwen2"), tmp_path / "mine.bundle")
    digest = next(e.sha256 for e in open_bundle(path).manifest.files if e.path == "model.onnx")
    evidence = {"task": "sums", "num_rows": 60, "interval": [0.25, 0.5], "tested": [{"tau": 0.9, "ok": True}]}
    profiles.store(path, Profile("sums", 0.9, "probability", "model", digest, evidence))
    assert json.loads(run("profiles", "list", path, "--json").stdout)[0]["evidence"] == evidence
    listed, default = run("profiles", "list", path), run("profiles", path)
    assert "sums" in default.stdout and default.stdout == listed.stdout


def test_a_prompt_without_its_option_is_explained(plain: Path) -> None:
    done = run("generate", plain, "hello", "there")
    assert (done.returncode, "-p 'hello there'" in " ".join(done.stderr.split())) == (2, True), done.stderr


def test_errors_are_json_where_results_are(plain: Path, tmp_path: Path) -> None:
    absent = str(tmp_path / "none")
    for words in (
        ("inspect", absent),
        ("generate", absent, "-p", "x"),
        ("profiles", "list", absent),
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
        json.loads, run("chat", plain, "--json", "-n", "2", stdin="/tau nowhere\nhello\n").stdout.splitlines()
    )
    assert bad["error"]["message"]
    assert good["text"]


def test_what_the_system_refuses_is_one_error(plain: Path, tmp_path: Path) -> None:
    """A full output and a name that is too long: no traceback. A closed standard input is an empty one."""
    program = f"{sys.executable} -m mars_export.cli"
    for command, code in (
        (f"{program} doctor --json > /dev/full", 1),
        (f"{program} generate {plain} -p hi -n 2 --json > /dev/full", 1),
        (f"{program} onnx {tmp_path} -o {tmp_path}/{'x' * 300} --force", 1),
        (f"{program} chat {tmp_path} <&-", 1),
        (f"{program} chat {plain} <&-", 0),
    ):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == code, (command, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        assert ("error" in done.stderr + done.stdout) == (code == 1), done.stderr
