"""What a test does when something that it needs is not installed: people see a skip, CI fails, so that
nothing goes untested unseen.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import NoReturn

import pytest


def lacking(message: str) -> NoReturn:
    """Skip, or under CI fail, saying what is missing and how to get it."""
    if os.environ.get("CI"):
        pytest.fail(f"{message} (CI must test this)", pytrace=False)
    pytest.skip(message, allow_module_level=True)


def need(module: str, extra: str) -> None:
    """The test, or the whole test module, needs `module`, which the extra `extra` installs."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # a package above it is not there
        found = None
    if found is None:
        lacking(f"{module} is not installed: pip install 'mars-export[{extra}]'")
