"""The command line as a person calls it: in this process, within milliseconds, or as a program of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mars_export import cli

Done = subprocess.CompletedProcess[str]


def run(*arguments: str | Path, stdin: str = "", cwd: Path | None = None) -> Done:
    """What `cli.main` writes and exits with. What it does not catch is raised: users see no traceback."""
    return run_main(cli.main, "mars-export", *arguments, stdin=stdin, cwd=cwd)


def succeed(*arguments: str | Path, stdin: str = "", cwd: Path | None = None) -> Done:
    """`run`, which ends with 0."""
    done = run(*arguments, stdin=stdin, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def run_main(
    main: Callable[[], object], *arguments: str | Path, stdin: str = "", cwd: Path | None = None
) -> Done:
    words = [str(argument) for argument in arguments]
    given, out, err = (
        io.TextIOWrapper(io.BytesIO(text), encoding="utf-8") for text in (stdin.encode(), b"", b"")
    )
    code: object = 0
    with (
        patch.object(sys, "argv", words),
        patch.object(sys, "stdin", given),
        patch.dict(os.environ, COLUMNS="80"),  # as where standard output is a pipe
        redirect_stdout(out),
        redirect_stderr(err),
        chdir(cwd or Path.cwd()),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int), f"exit code {code!r}: a message belongs to standard error"
    return Done(words, code, _written(out), _written(err))


def run_process(*arguments: str | Path, stdin: str = "", cwd: Path | None = None) -> Done:
    """The same by `python -m mars_export.cli`: for what concerns the process, or what conftest.py patches."""
    return call(sys.executable, "-m", "mars_export.cli", *arguments, input=stdin, cwd=cwd)


def call(*command: str | Path, timeout: float = 120, **options: Any) -> Done:
    """Any program: its exit status, and what it wrote."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()
