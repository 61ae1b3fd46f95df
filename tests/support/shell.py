"""The command line, as a person calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(*arguments: str | Path, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mars_export.cli", *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=False, cwd=cwd, timeout=120
    )
