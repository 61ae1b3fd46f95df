"""What a test does when something that it needs is not installed: it is skipped, and the summary names the
reason. With `--require-all`, as in CI, it fails.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NoReturn

import pytest

require_all = False


def lacking(message: str) -> NoReturn:
    """Skip, or with `--require-all` fail, saying what is missing and how to get it."""
    if require_all:
        pytest.fail(f"{message} (--require-all)", pytrace=False)
    pytest.skip(message, allow_module_level=True)


def need(module: str, extra: str) -> None:
    """The test, or the whole test module, needs `module`, which the extra `extra` installs."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # a package above it is not there
        found = None
    if found is None:
        lacking(f"{module} is not installed: pip install 'mars-export[{extra}]'")
