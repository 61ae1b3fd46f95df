"""The types of conftest.py's fixtures, for the tests that take them: something by the name of its tiny
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mars_export import Session
from support.oracle import Oracle
from support.tiny import Named as Named

Sessions = Callable[[str], Session]
Oracles = Callable[[str], Oracle]
Exported = Callable[..., Path]
