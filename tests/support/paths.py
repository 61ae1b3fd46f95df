"""Where things lie in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFORMANCE = ROOT / "tests" / "conformance"
BUNDLE = CONFORMANCE / "trace"
"""A small bundle that is always there."""
