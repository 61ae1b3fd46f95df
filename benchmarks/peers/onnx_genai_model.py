"""A model of onnxruntime-genai's builder for onnx-genai, which needs the size of a head in the graph.

python -m peers.onnx_genai_model MODEL OUT
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import onnx_ir as ir

SYMBOL = "kv_cache_dim"


def main(model: Path, out: Path) -> None:
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.onnx", "*.data"))
    size = json.loads((model / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"][
        "head_size"
    ]
    graph = ir.load(model / "model.onnx")
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([size if str(dim) == SYMBOL else dim for dim in value.shape])
    ir.save(graph, out / "model.onnx", external_data="model.onnx.data")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
