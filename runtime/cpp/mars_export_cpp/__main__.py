"""`python -m mars_export_cpp` prints the directory for CMAKE_PREFIX_PATH."""

import sys

from . import get_cmake_prefix

sys.stdout.write(f"{get_cmake_prefix()}\n")
