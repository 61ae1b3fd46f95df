"""libmars, its headers and mars-run, installed beside this file."""

import os
import sys
from pathlib import Path

__version__ = "0.1.0"

PREFIX = Path(__file__).parent
PROGRAM = PREFIX / "bin" / "mars-run"


def get_library_path() -> str:
    """libmars."""
    return str(next(PREFIX.glob("lib/libmars.so.*")))


def get_cmake_prefix() -> str:
    """The directory for CMAKE_PREFIX_PATH, with include/, lib/cmake/ and lib/pkgconfig/."""
    return str(PREFIX)


def main() -> None:
    """Run mars-run with the arguments of this process."""
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])
