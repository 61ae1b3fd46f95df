"""How to build an engine on the machine it is for: a shell script with our own command and trtexec's."""

from __future__ import annotations

from ...runtime.bundle.manifest import ModelInfo
from .plan import Plan, Shapes

RECIPE_FILE = "build-on-device.sh"


def recipe(plan: Plan, model: ModelInfo, graph: str) -> str:
    """The script's text. `graph` is the ONNX file, with the plan's capacity fixed, that trtexec reads."""
    where = plan.target.name + (f", JetPack {plan.jetpack.version}" if plan.jetpack else "")
    needed = "10.15" if plan.kv_layout == "static" else "10.3"
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

# Without it, the same engine by trtexec (for a runtime of your own; the Python runtime wants the manifest
# entry):
trtexec={"/usr/src/tensorrt/bin/trtexec" if plan.target.is_jetson else "trtexec"}
exec "$trtexec" {_trtexec(plan, model, graph)}
"""


def _command(plan: Plan) -> str:
    words = [
        f"mars-export trt . --target host --kv-layout {plan.kv_layout}",
        f"--batch {plan.batch} --capacity {plan.capacity} --prefill {plan.ranges[-1].slots.max}",
        *(["--fixed"] if plan.is_fixed else []),
    ]
    return " ".join(words)


def _trtexec(plan: Plan, model: ModelInfo, graph: str) -> str:
    lines = [f"--onnx={graph}", f"--saveEngine={plan.name}.engine", "--stronglyTyped", "--skipInference"]
    if not plan.is_fixed:
        for i, shapes in enumerate(plan.inputs(model)):
            lines += [
                f"--profile={i}",
                *(f"--{word}Shapes={_spec(shapes, at)}" for at, word in enumerate(("min", "opt", "max"))),
            ]
    return " \\\n  ".join(lines)


def _spec(shapes: Shapes, at: int) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, sizes[at]))}" for name, sizes in shapes.items())
