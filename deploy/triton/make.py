"""A model repository for Triton from a bundle's step graph: `python deploy/triton/make.py BUNDLE REPOSITORY`.

Writes REPOSITORY/mars_step/config.pbtxt and copies the graph and its weights to mars_step/1/. The KV memory
of a sequence stays in Triton, as implicit state; everything else of decoding stays in the client: README.md
beside this file says more.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from mars_export.runtime.bundle.manifest import Variant, kv_names
from mars_export.runtime.bundle.open import Bundle, open_bundle
from mars_export.runtime.errors import BundleError

NAME = "mars_step"
TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
OUTPUTS = {"token_ids": "TYPE_INT64"}  # all others are TYPE_FP32
HEAD = """\
# The step graph of {name}, {precision}. Made by deploy/triton/make.py; never loaded where it was written.
# One slot of a batch is one sequence: its KV memory is the state below, {capacity} entries long.
name: "{model}"
backend: "onnxruntime"
max_batch_size: 1
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "kv_length" data_type: TYPE_INT64 dims: [ 1 ] reshape: {{ shape: [ ] }} }},
  {{ name: "output_index" data_type: TYPE_INT64 dims: [ -1 ] }}
]
output [
{outputs}
]
sequence_batching {{
  max_sequence_idle_microseconds: 60000000
  direct {{ }}
  state [
{states}
  ]
}}
instance_group [ {{ count: 1 kind: KIND_{kind} }} ]
"""
STATE = """\
    {{
      input_name: "{before}" output_name: "{after}" data_type: {type} dims: [ {dims} ]
      use_same_buffer_for_input_output: true
      initial_state: {{ name: "empty" data_type: {type} dims: [ {dims} ] zero_data: true }}
    }}"""


def config(bundle: Bundle, variant: Variant, capacity: int, gpu: bool) -> str:
    """The text of config.pbtxt. Raises BundleError for a graph that Triton could not hold the state of."""
    if variant.backend != "onnx" or variant.kv_layout == "delta":
        raise BundleError(
            f"{bundle.path}: variant {variant.name} is of {variant.backend} with the layout"
            f" {variant.kv_layout}; give one of onnx whose graph returns its whole KV memory"
        )
    model = bundle.manifest.model
    dims = f"{model.num_kv_heads}, {capacity}, {model.head_dim}"
    before, after = (kv_names(model.num_layers, of) for of in ("past_key_values", "present"))
    states = [
        STATE.format(before=a, after=b, type=TYPES[variant.kv_dtype], dims=dims)
        for a, b in zip(before, after, strict=True)
    ]
    plain = [name for name in variant.outputs if name in ("token_ids", "confidence", "margin", "entropy")]
    outputs = [
        f'  {{ name: "{name}" data_type: {OUTPUTS.get(name, "TYPE_FP32")} dims: [ -1 ] }}' for name in plain
    ]
    return HEAD.format(
        name=bundle.path.resolve().name,
        precision=variant.precision,
        model=NAME,
        capacity=capacity,
        outputs=",\n".join(outputs),
        states=",\n".join(states),
        kind="GPU" if gpu else "CPU",
    )


def make(path: Path, repository: Path, capacity: int, gpu: bool = False) -> Path:
    """Write the model's folder into a repository; returns it."""
    bundle = open_bundle(path)
    variant = bundle.manifest.variants[0]
    text = config(bundle, variant, capacity, gpu)
    folder = repository / NAME
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    for file in filter(None, (variant.file, variant.weights)):
        # Triton wants the graph as model.onnx; the graph names its weights' file.
        target = folder / "1" / ("model.onnx" if file == variant.file else Path(file).name)
        shutil.copyfile(bundle.path / file, target)  # no link: loaders refuse weights with several names
    return folder


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--capacity", type=int, default=1024, help="KV entries of a sequence")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args(argv)
    make(args.bundle, args.repository, args.capacity, args.gpu)


if __name__ == "__main__":
    main()
