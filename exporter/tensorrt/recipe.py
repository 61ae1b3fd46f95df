"""How to build an engine on the machine it is for: a shell script with our own commands and trtexec's, and
the same for mars-build-engine, which reads JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ...runtime.bundle.files import FileEntry
from ...runtime.bundle.manifest import ModelInfo, Variant
from .plan import Plan, Shapes

RECIPE_FILE = "build-on-device.sh"
STEPS_FILE = ".build.json"  # how the name of what mars-build-engine reads ends
STEPS_VERSION = 1


def steps(plan: Plan, variant: Variant, graph: FileEntry) -> str:
    """The manifest's entry of the engine as JSON text, but for what the build adds to it: version, cuda,
    platform, seconds, peak_memory.

    `variant` is that of the graph which `graph`, the file that TensorRT reads, was made of.
    """
    engine: dict[str, Any] = {
        "compute_capabilities": list(plan.target.compute_capabilities),
        "ranges": [asdict(r) for r in plan.ranges],
        "graph": graph.path,
        "graph_sha256": graph.sha256,
        "tf32": plan.tf32,
    }
    made = asdict(variant) | {
        "name": plan.name,
        "backend": plan.backend,
        "file": f"{plan.name}.engine",
        "weights": None,
        "batch": plan.batch if plan.is_fixed else None,
        "slots": plan.block if plan.is_fixed else None,
        "capacity": plan.capacity,
        "engine": engine,
    }
    return (
        json.dumps({"version": STEPS_VERSION, "weights": variant.weights, "variant": made}, indent=2) + "\n"
    )


def recipe(plan: Plan, model: ModelInfo, graph: str) -> str:
    """The script's text. `graph` is the ONNX file, with the plan's capacity fixed, that trtexec reads."""
    where = plan.target.name + (f", JetPack {plan.jetpack.version}" if plan.jetpack else "")
    needed = "10.15" if plan.kv_layout == "static" else "10.3"
    workspace = f" --workspace {plan.workspace // 10**6}" if plan.workspace else ""
    return f"""#!/bin/sh
# Builds the TensorRT engine of this bundle on the machine it is for: {where}
# ({", ".join(plan.target.compute_capabilities)}, TensorRT {needed} or newer, KV layout {plan.kv_layout}).
# It was not built where the bundle was made: {plan.obstacle}.
#
# Run it on the device: sh {RECIPE_FILE}
set -eu
cd "$(dirname "$0")"

# With mars-export installed, which also writes the engine into the manifest:
if command -v mars-export >/dev/null; then
  exec {_command(plan)}
fi

# With libmars built with TensorRT (docs/cpp.md), which needs no Python and does the same:
if command -v mars-build-engine >/dev/null; then
  exec mars-build-engine . --recipe {plan.name}{workspace}
fi

# Without either, the same engine by trtexec (for a runtime of your own; ours want the manifest entry):
trtexec={"/usr/src/tensorrt/bin/trtexec" if plan.target.is_jetson else "trtexec"}
exec "$trtexec" {_trtexec(plan, model, graph)}
"""


def _command(plan: Plan) -> str:
    words = [
        f"mars-export trt . --target host --kv-layout {plan.kv_layout}",
        f"--batch {plan.batch} --capacity {plan.capacity} --prefill {plan.ranges[-1].slots.max}",
        *(["--fixed"] if plan.is_fixed else []),
        *(["--tf32"] if plan.tf32 else []),
        *([f"--workspace {plan.workspace // 10**6}M"] if plan.workspace else []),
    ]
    return " ".join(words)


def _trtexec(plan: Plan, model: ModelInfo, graph: str) -> str:
    lines = [f"--onnx={graph}", f"--saveEngine={plan.name}.engine", "--stronglyTyped", "--skipInference"]
    lines += [] if plan.tf32 else ["--noTF32"]
    lines += [f"--memPoolSize=workspace:{plan.workspace >> 20}"] if plan.workspace else []  # in MiB
    if not plan.is_fixed:
        for i, shapes in enumerate(plan.inputs(model)):
            lines += [
                f"--profile={i}",
                *(f"--{word}Shapes={_spec(shapes, at)}" for at, word in enumerate(("min", "opt", "max"))),
            ]
    return " \\\n  ".join(lines)


def _spec(shapes: Shapes, at: int) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, sizes[at]))}" for name, sizes in shapes.items())
