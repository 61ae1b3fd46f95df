"""The bundle that the fuzzing of the C interface opens: `python -m support.fuzzed PATH`. Knows no fuzzer."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from mars_export import GenerationConfig
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.structured.stored_grammars import compile_into
from support import tiny


def bundle(path: Path) -> Path:
    """A tiny model with every output and two grammars. `path` is made, or left as it is."""
    if not path.exists():
        with tempfile.TemporaryDirectory() as checkpoint:
            tiny.write(tiny.TINIES["llama"], Path(checkpoint))
            options = ExportOptions(block=6, metrics=True, logits=True, top_k=4)
            export_onnx(open_checkpoint(checkpoint), path, options)
        compile_into(path, "g0", GenerationConfig(regex="[a-z]{2,9}( ok)?"))
        compile_into(path, "g1", GenerationConfig(choice=("yes", "no", "yes, but")))
    return path


if __name__ == "__main__":
    bundle(Path(sys.argv[1]))
