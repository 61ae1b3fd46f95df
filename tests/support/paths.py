"""Where things lie in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFORMANCE = ROOT / "tests" / "conformance"
BUILT_KERNELS = ROOT / "build" / "kernels"
"""mars-export-kernels for its tests (`make kernels`)."""
BUNDLE = CONFORMANCE / "trace"
"""A small bundle that is always there."""
