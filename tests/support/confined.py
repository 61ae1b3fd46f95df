"""A piece of Python in a process of its own, with little memory and little time: what it prints, or how it
died.
"""

from __future__ import annotations

import os
import subprocess
import sys

PREAMBLE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, ({bytes}, {bytes}))
"""


def confined(program: str, *arguments: str, gigabytes: float = 2.0, seconds: float = 30.0) -> str:
    """Standard output of `program`. It fails the test when it is killed, hangs, or ends with
    anything but 0.
    """
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE.format(bytes=int(gigabytes * 2**30)) + program, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout
