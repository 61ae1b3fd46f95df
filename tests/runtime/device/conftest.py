"""Bundles that tests of several device modules open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.agreement import MAIN
from support.fixtures import Exported


@pytest.fixture(scope="session")
def graphs(exported: Exported) -> Callable[[str, str], Path]:
    """Bundles by KV layout and precision."""
    return lambda layout, precision: exported(
        MAIN, metrics=True, logits=True, kv_layout=layout, precision=precision
    )
