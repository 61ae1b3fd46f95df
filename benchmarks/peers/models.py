"""Models made once for each peer, and what a peer lacks."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from peers import catalog
from peers.catalog import Program

BENCHMARKS = Path(__file__).resolve().parent.parent


def why_absent(program: Program, venvs: Path) -> str | None:
    """What to install, or None when the program's environment is there."""
    if program.environment is None or Path(catalog.python_of(venvs, program.environment)).exists():
        return None
    return "no environment; " + " && ".join(
        shlex.join(c) for c in catalog.setup_commands(venvs, program.environment)
    )


def make(program: Program, work: Path) -> str | None:
    """Make the program's model if it is not there. Returns why that failed, or None."""
    if program.model.exists():
        return None
    if shutil.disk_usage(work).free < 4e9:
        return f"less than 4 GB are free under {work}"
    partial = work / f"{program.model.name}.part"
    if partial.is_dir():
        shutil.rmtree(partial)
    command = [part.format(out=partial) for part in program.make]
    print(f"{program.name}: making {program.model}", file=sys.stderr, flush=True)
    log = work / "logs" / f"make {program.name}.log"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]),
        "ORT_DISABLE_TELEMETRY": "1",
    }
    with log.open("w", encoding="utf-8") as out:
        try:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False, env=environment)
        except OSError as error:
            return f"{command[0]} does not start: {error}"
    if done.returncode or not partial.exists():
        return f"its model could not be made (exit code {done.returncode}); see {log}"
    partial.rename(program.model)
    return None
