"""How libmars opens a session: what it says of itself, devices, options, the log, which files it hashes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cabi import Library, MarsStatusError, build
from support.cabi_session import CSession
from support.fixtures import Named, Sessions
from support.twins import PROMPT

from mars_export.runtime.bundle.open import open_bundle

SPINNING = "session.intra_op.allow_spinning"
SESSION = 2  # of mars_status


@pytest.fixture
def copied(bundles: Named, tmp_path: Path) -> Path:
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    return directory


def test_a_session_says_what_runs(library: Library, bundles: Named, sessions: Sessions) -> None:
    python = sessions("llama")
    with CSession(library, bundles("llama"), threads=1) as session:
        info = session.info
        assert (info.variant.decode(), info.backend, info.device) == (python.variant.name, b"onnx", b"cpu")
        assert info.precision.decode() == python.variant.precision
        assert tuple(info.eos_ids[: info.num_eos_ids]) == tuple(python.bundle.manifest.tokens.eos)
        assert [name.decode() for name in info.outputs[: info.num_outputs]] == [*python.variant.outputs]
        assert info.num_profiles == 0 and info.has_text


TELLS = """
import ctypes, sys
from support.cabi import Library
from support.cabi_session import CSession
from pathlib import Path
with CSession(Library(Path(sys.argv[1])), Path(sys.argv[2]), threads=1):
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    print(getenv(b"ORT_DISABLE_TELEMETRY").decode())
"""


@pytest.mark.parametrize("said", [None, "0"])
def test_onnx_runtime_tells_nobody_unless_it_was_asked_to(bundles: Named, said: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({"ORT_DISABLE_TELEMETRY": said} if said else {})
    command = [sys.executable, "-c", TELLS, str(build() / "libmars.so"), str(bundles("llama"))]
    assert subprocess.check_output(command, env=env, text=True).split() == [said or "1"]


def test_devices_by_name(library: Library, bundles: Named) -> None:
    for device in ("CPU", "cpuexecutionprovider", "CPUExecutionProvider"):
        with CSession(library, bundles("llama"), device=device, threads=1):
            pass
    for device, words in (
        ("cpu:0", "the CPU has no number"),
        ("cuda:", "the part after the colon must be a GPU"),
    ):
        with pytest.raises(MarsStatusError, match=words):
            CSession(library, bundles("llama"), device=device)
    with pytest.raises(MarsStatusError, match=r"has no device `tpu` \(it has: .*CPUExecutionProvider"):
        CSession(library, bundles("llama"), device="tpu")
    with pytest.raises(MarsStatusError, match="no variant `x`"):
        CSession(library, bundles("llama"), variant="x")


def test_options_of_onnx_runtime(library: Library, bundles: Named) -> None:
    with CSession(library, bundles("llama"), threads=1) as session:
        wanted = session.generate(PROMPT, max_new_tokens=16).token_ids
    with CSession(library, bundles("llama"), threads=2, options={SPINNING: "0"}) as session:
        assert session.generate(PROMPT, max_new_tokens=16).token_ids == wanted
    refusals = {
        "device_id": "the CPU has no option device_id",
        "session.intra_op_thread_affinities": "ONNX Runtime .* cannot load the graph",
        "session.qdq_matmulnbits_accuracy_level": "the variant determines it",
    }
    for name, words in refusals.items():
        with pytest.raises(MarsStatusError, match=words) as error:
            CSession(library, bundles("llama"), threads=2, options={name: "nonsense"})
        assert error.value.status == SESSION


def test_the_log_hears_the_session_and_onnx_runtime(
    library: Library, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[tuple[str, str]] = []
    with CSession(library, copied, threads=1, on_log=lambda *line: lines.append(line)) as session:
        session.generate(PROMPT, max_new_tokens=4)
        assert lines[0] == ("info", f"{copied}: variant {session.info.variant.decode()} on cpu")
    lines.clear()
    with pytest.raises(MarsStatusError, match="CPU EP"):  # the log hears it, nobody else
        CSession(
            library,
            copied,
            threads=2,
            options={"session.disable_cpu_ep_fallback": "1"},  # on the CPU there is nothing else
            on_log=lambda *line: lines.append(line),
        )
    assert [level for level, _ in lines] == ["error"]
    assert "fallback to CPU EP has been explicitly disabled" in lines[0][1]
    assert capfd.readouterr() == ("", "")


def test_stamps_lie_with_the_user_and_never_in_the_bundle(
    library: Library, bundles: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    names = {path.name for path in directory.iterdir()}
    with CSession(library, directory, threads=1):
        pass
    (file,) = (tmp_path / "cache" / "verified").iterdir()
    theirs, state = file.read_bytes(), file.stat()
    monkeypatch.setattr("mars_export.runtime.bundle.files.sha256_of", lambda _: pytest.fail("hashed again"))
    manifest = open_bundle(directory).manifest
    assert json.loads(theirs).keys() == {entry.path for entry in manifest.files}
    assert file.stat() == state, "Python believes it as it stands"
    monkeypatch.undo()
    monkeypatch.setenv("MARS_EXPORT_CACHE", str(tmp_path / "cache"))
    file.unlink()
    open_bundle(directory)
    assert json.loads(file.read_bytes()) == json.loads(theirs), "and says the same"
    assert {path.name for path in directory.iterdir()} == names
