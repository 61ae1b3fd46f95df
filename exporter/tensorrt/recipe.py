"""Writes the recipe of an engine for its own machine: a shell script, and JSON for mars-build-engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ...runtime.bundle.files import FileEntry
from ...runtime.bundle.manifest import ModelInfo, Variant
from .plan import EnginePlan, Shapes

RECIPE_FILE = "build-on-device.sh"
STEPS_FILE = ".build.json"  # the suffix of the file that mars-build-engine reads
STEPS_VERSION = 1


def steps(plan: EnginePlan, variant: Variant, graph: FileEntry) -> str:
    """The engine's entry for the manifest as JSON text, without what the build adds: version, cuda, platform,
    seconds, peak_memory.

    `graph` is the file that TensorRT reads, and `variant` the graph it was made from.
    """
    engine: dict[str, Any] = {
        "compute_capabilities": list(plan.target.compute_capabilities),
        "ranges": [asdict(r) for r in plan.ranges],
        "graph": graph.path,
        "graph_sha256": graph.sha256,
        "tf32": plan.tf32,
    }
    entry = asdict(variant) | {
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
        json.dumps({"version": STEPS_VERSION, "weights": variant.weights, "variant": entry}, indent=2) + "\n"
    )


def recipe(plan: EnginePlan, model: ModelInfo, graph: str) -> str:
    """The text of the script. `graph` is the ONNX file that trtexec reads, with the plan's capacity."""
    machine = plan.target.name + (f", JetPack {plan.jetpack.version}" if plan.jetpack else "")
    needed = "10.15" if plan.kv_layout == "static" else "10.3"
    workspace = f" --workspace {plan.workspace >> 20}" if plan.workspace else ""
    return f"""#!/bin/sh
# Builds the TensorRT engine of this bundle on the machine it is for: {machine}
# ({", ".join(plan.target.compute_capabilities)}, TensorRT {needed} or newer, KV layout {plan.kv_layout}).
# It was not built with the bundle: {plan.obstacle}.
#
# Run it on the device: sh {RECIPE_FILE}
set -eu
cd "$(dirname "$0")"

# With mars-export installed, which also writes the engine into the manifest:
if command -v mars-export >/dev/null; then
  exec {_command(plan)}
fi

# With libmars built with TensorRT (docs/cpp.md), which does the same without Python:
if command -v mars-build-engine >/dev/null; then
  exec mars-build-engine . --recipe {plan.name}{workspace}
fi

# With neither, trtexec builds the same engine for your own runtime; ours need the manifest entry:
trtexec={"/usr/src/tensorrt/bin/trtexec" if plan.target.is_jetson else "trtexec"}
exec "$trtexec" {_trtexec(plan, model, graph)}
"""


def _command(plan: EnginePlan) -> str:
    words = [
        f"mars-export trt . --target host --kv-layout {plan.kv_layout}",
        f"--batch {plan.batch} --capacity {plan.capacity} --prefill {plan.ranges[-1].slots.max}",
        *(["--fixed"] if plan.is_fixed else []),
        *(["--tf32"] if plan.tf32 else []),
        *([f"--workspace {plan.workspace >> 20}M"] if plan.workspace else []),
    ]
    return " ".join(words)


def _trtexec(plan: EnginePlan, model: ModelInfo, graph: str) -> str:
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
