"""Writes the recipe of an engine for its own machine: a shell script."""

from __future__ import annotations

from ...runtime.bundle.manifest import ModelInfo
from .plan import EnginePlan, Shapes

RECIPE_FILE = "build-on-device.sh"


def recipe(plan: EnginePlan, model: ModelInfo, graph: str) -> str:
    """The text of the script. `graph` is the ONNX file that trtexec reads, with the plan's capacity."""
    needed = "10.15" if plan.kv_layout == "in-place" else "10.3"
    return f"""#!/bin/sh
# Builds the TensorRT engine of this bundle on the machine it is for: {plan.target.name}
# ({", ".join(plan.target.compute_capabilities)}, TensorRT {needed} or newer, KV layout {plan.kv_layout}).
# It was not built with the bundle: {plan.reason}.
#
# Run it on the device: sh {RECIPE_FILE}
set -eu
cd "$(dirname "$0")"

# With mars-export installed, which also writes the engine into the manifest:
if command -v mars-export >/dev/null; then
  exec {_command(plan)}
fi

# Without it, trtexec builds the same engine for your own runtime; ours need the manifest entry:
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
