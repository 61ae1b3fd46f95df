"""One test per knob: turned alone it changes the model, and the graph follows the reference in both layouts.

That the reference's knobs are transformers' own is test_families.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import tiny

from mars_export.exporter.check import reference, segments
from mars_export.exporter.checkpoint.dims import Dims, dims_from_config, expected_shapes
from mars_export.exporter.checkpoint.families import ALIASES, FAMILIES
from mars_export.exporter.checkpoint.knobs import POST, PRE, SANDWICH, HeadNorms, Knobs
from mars_export.exporter.checkpoint.rope import Rope
from mars_export.exporter.graph import step
from mars_export.exporter.graph.hashed import HashedFile
from mars_export.exporter.graph.weights import write_weights

SEQUENCES = [[(37 * i) % 250 for i in range(30)], [5, 9, 200, 41]]
ALLOWED = np.arange(tiny.VOCAB_SIZE) != tiny.MASK
TURNED: dict[str, list[Any]] = {
    "norms": [POST, SANDWICH],
    "head_norms": [
        HeadNorms(),
        HeadNorms(whole=True),
        HeadNorms("self_attn.query_layernorm", "self_attn.key_layernorm", rotated=True),
    ],
    "norm_offset": [1.0],
    "activation": ["gelu_tanh"],
    "fused": [True],
    "interleaved": [True],
    "attention_scale": [0.1],
    "attention_cap": [2.0],
    "query_growth": [(0.5, 8)],
    "embedding_factor": [6.5],
    "residual_factor": [0.4],
    "logit_factor": [0.125],
    "logit_cap": [15.0],
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random tensors for whatever a model must have; equal names have equal numbers."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray:
        shape = self.shapes[name]
        noise = np.random.default_rng(sum(name.encode())).standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            return 1 + 0.2 * noise if name.endswith("norm.weight") else 0.3 * noise
        return noise * np.float32(0.9 if shape[0] == tiny.VOCAB_SIZE else 2 / shape[1] ** 0.5)


def dims_with(**changes: Any) -> Dims:
    config = tiny.config_values(tiny.Tiny("llama", "llama")) | {"model_type": "llama", "head_dim": 12}
    dims = dims_from_config(config)
    knobs = {name: value for name, value in changes.items() if name in Knobs.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in knobs}
    return replace(dims, knobs=replace(dims.knobs, **knobs), **rest)


def tensors_of(dims: Dims) -> Drawn:
    return Drawn(dict(expected_shapes(dims)))


def through_the_graph(dims: Dims, scratch: Path, kv_layout: str) -> list[np.ndarray]:
    spec = step.StepGraph(dims, 4, tiny.MASK, logits=True, kv_layout=kv_layout)
    with HashedFile(scratch / "weights.bin") as file:
        placed = write_weights(file, tensors_of(dims), dims, "float32")
    graph = step.build(spec, placed, "weights.bin", "0")
    onnx.save(graph, scratch / "model.onnx")
    onnx.checker.check_model(str(scratch / "model.onnx"), full_check=True)
    results = segments.run(scratch / "check.onnx", graph, spec, None, ["logits"], 0, SEQUENCES)
    return [result["logits"][:, ALLOWED] for result in results]


def by_the_reference(dims: Dims) -> list[np.ndarray]:
    return [logits[:, ALLOWED] for logits in reference.logits(dims, tensors_of(dims), SEQUENCES)]


def is_followed(dims: Dims, scratch: Path) -> None:
    expected = by_the_reference(dims)
    for kv_layout in ("static", "delta"):
        for ours, theirs in zip(through_the_graph(dims, scratch, kv_layout), expected, strict=True):
            assert np.abs(ours - theirs).max() < 2e-4 * max(1, np.abs(theirs).max() / 10)


SETTINGS = [(name, value) for name, values in TURNED.items() for value in values]


@pytest.mark.parametrize(("knob", "value"), SETTINGS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(SETTINGS)])
def test_a_knob_turned_alone(knob: str, value: Any, tmp_path: Path) -> None:
    turned = dims_with(**{knob: value})
    is_followed(turned, tmp_path)
    if knob != "fused":  # another way to store the same: other tensors
        before, after = by_the_reference(dims_with())[0], by_the_reference(turned)[0]
        assert np.abs(before - after).max() > 0.1, "a knob that does nothing is no knob"


def test_every_knob_has_a_test_and_a_family() -> None:
    names = {field.name for field in fields(Knobs)}
    assert names == TURNED.keys()
    config = {
        "hidden_size": 64,
        "attention_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    }
    turned = set()
    for family in FAMILIES.values():
        knobs = family.knobs_of({**family.defaults, **config})
        turned |= {name for name in names if getattr(knobs, name) != getattr(Knobs(), name)}
    assert turned == names
    assert Knobs().norms == PRE
    assert set(ALIASES.values()) <= FAMILIES.keys()


def test_fused_maps_are_the_same_maps(tmp_path: Path) -> None:
    apart, fused = dims_with(), dims_with(fused=True)
    drawn = tensors_of(apart)

    @dataclass(frozen=True, slots=True)
    class Joined:
        shapes: dict[str, tuple[int, ...]]

        def read(self, name: str) -> np.ndarray:
            if name in drawn.shapes:
                return drawn.read(name)
            parts = apart.knobs.qkv if "qkv_proj" in name else apart.knobs.gate_up
            layer = name.partition("self_attn" if "qkv_proj" in name else "mlp")[0]
            return np.concatenate([drawn.read(f"{layer}{part}.weight") for part in parts])

    joined = Joined(dict(expected_shapes(fused)))
    for ours, theirs in zip(reference.logits(fused, joined, SEQUENCES), by_the_reference(apart), strict=True):
        np.testing.assert_array_equal(ours[:, ALLOWED], theirs)
    with HashedFile(tmp_path / "a") as one, HashedFile(tmp_path / "b") as other:
        write_weights(one, drawn, apart, "float32")
        write_weights(other, joined, fused, "float32")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    "rotation", [(None, 0), (0, None), (None, None), (1, 0), (1, 1)], ids=lambda pair: str(pair)
)
@pytest.mark.parametrize("size", [12, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_which_layers_rotate_and_how_much_of_a_head(
    rotation: tuple[int | None, ...], size: int, interleaved: bool, tmp_path: Path
) -> None:
    bases = [np.float32(base) ** (-np.arange(0, size, 2, dtype=np.float32) / size) for base in (1e4, 20.0)]
    ropes = (Rope(bases[0], 1.0), Rope(bases[1], 1.3))
    turned = dims_with(ropes=ropes, rotation=rotation, interleaved=interleaved)
    is_followed(turned, tmp_path)
    usual = dims_with(ropes=ropes, rotation=(0, 0), interleaved=interleaved)
    assert np.abs(by_the_reference(usual)[0] - by_the_reference(turned)[0]).max() > 0.1


def test_queries_grow_by_whole_lengths() -> None:
    calm, growing = (by_the_reference(dims_with(query_growth=growth))[0] for growth in (None, (0.5, 8)))
    np.testing.assert_array_equal(calm[:8], growing[:8])
    assert np.abs(calm[8:] - growing[8:]).max(-1).min() > 1e-3
