"""`python -m mars_export_cpp` prints the directory for CMAKE_PREFIX_PATH."""

from . import get_cmake_prefix

print(get_cmake_prefix())
