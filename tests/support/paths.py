"""Where things lie in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFORMANCE = ROOT / "tests" / "conformance"
BUNDLE = ROOT / "tests" / "runtime" / "bundle" / "written-by-1.1"
"""A whole bundle, of a version that was released."""
