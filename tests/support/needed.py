"""The libraries that a library is linked to."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from .missing import lacking


def needed(library: Path) -> set[str]:
    tool = shutil.which("readelf") or lacking("readelf is not installed; `make cpp` installs what it needs")
    words = subprocess.run([tool, "-d", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", words))
