"""Fixtures of the tests of codes."""

from __future__ import annotations

import pytest
from support.fixtures import Named

from mars_export.exporter.checkpoint.open import Checkpoint, open_checkpoint


@pytest.fixture
def checkpoint(checkpoints: Named) -> Checkpoint:
    return open_checkpoint(str(checkpoints("llama")))
