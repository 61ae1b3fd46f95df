"""Runs code that a model wrote in another process with limits, if allowed. It is not a sandbox."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 10  # of wall clock and of processor time
MEMORY = 1 << 30  # bytes of address space
FILE_SIZE = 1 << 20  # bytes

# The program first lowers its own limits; hard limits cannot be raised again.
_PRELUDE = f"""\
import resource as _r
for _kind, _most in dict(CPU={SECONDS}, AS={MEMORY}, FSIZE={FILE_SIZE}, CORE=0).items():
    _r.setrlimit(getattr(_r, "RLIMIT_" + _kind), (_most, _most))
del _r, _kind, _most
"""
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.S)


def is_supported() -> bool:
    """Whether this system can limit a process."""
    return os.name == "posix"


def passes_tests(code: str, tests: str, seconds: float = SECONDS) -> bool:
    """Whether `code` (with or without a Markdown fence) followed by `tests` runs to its end within the limits
    and without an error.

    A program that exits early fails, because the last line, after the tests, must be printed.
    """
    fenced = _FENCE.search(code)
    proof = os.urandom(16).hex()
    program = f"{_PRELUDE}{fenced.group(1) if fenced else code}\n{tests}\nprint({proof!r})\n"
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "program.py").write_text(program, encoding="utf-8", errors="replace")
        return _last_line(directory, seconds) == proof


def _last_line(directory: str, seconds: float) -> str:
    """The last line of a program that succeeds in time, else "". Processes that it started are ended."""
    output = Path(directory, "output")
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-I", "program.py"],
            cwd=directory, env={"PATH": os.defpath, "HOME": directory}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            good = process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            good = False
        finally:
            _end(process)
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if good else []
    return lines[-1] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
