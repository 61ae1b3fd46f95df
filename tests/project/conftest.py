"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import Named


@pytest.fixture(scope="module")
def plain(bundles: Named) -> Path:
    """A bundle with nothing more than an export writes. Read only."""
    return bundles("qwen2")
