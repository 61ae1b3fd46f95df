"""The graph for ONNX Runtime on CUDA, here on the CPU: the numbers of the graph beside it, and nothing that
is slow on a GPU or that a captured step cannot replay. `--log-cli-level=INFO` prints a line for each family.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from support import families, tiny
from support.agreement import LOOPS, config, follow
from support.exports import export
from support.fixtures import Exported, Named, Oracles
from support.graphs import KEPT, shape_of

from mars_export import Session, SessionError
from mars_export.exporter.check.selfcheck import BOUNDS
from mars_export.runtime.bundle.open import Bundle, open_bundle
from mars_export.runtime.decode.backend import StepInput
from mars_export.runtime.device import variants

# Kernels of onnxruntime-gpu 1.31 and of the CPU package that computes here.
KERNELS = {
    "com.microsoft": {"SkipSimplifiedLayerNormalization", "QuickGelu"},
    "": {
        "Add", "And", "ArgMax", "Attention", "Cast", "Concat", "Cos", "Div", "Exp", "Expand", "Gather",
        "GatherElements", "GatherND", "Gelu", "Gemm", "Greater", "LessOrEqual", "Log", "MatMul", "Mul",
        "RMSNormalization", "Range", "Reciprocal", "ReduceSum", "Reshape", "RotaryEmbedding", "Shape",
        "Sin", "Slice", "Split", "Squeeze", "Sub", "Tanh", "TensorScatter", "TopK", "Unsqueeze",
    },
}  # fmt: skip
FREE = ("Cast", "Concat", "Expand", "Reshape")  # in a layer: of constants, or only another shape
FLASH = 3  # kernels of Attention without a mask: its lengths, its parts, and their sum
MAX_LAUNCHES = 20  # Llama has 18
# More, by the start of a family's name: no kernel of 1.31 adds a product's bias or a second norm's result to
# something, and norms over all heads together (OLMo 2) have two lengths, so two norms and two rotations.
MORE = {"gemma2-mha": 2, "gemma3": 1, "exaone4": 1, "olmo2": 5}
# (slots, entries that are kept of each row): a prompt, one token, blocks, and rejected masks.
STEPS = ((12, (12, 7, 1)), (1, (1, 1, 1)), (6, (2, 6, 4)), (11, (1, 11, 3)), (6, (6, 1, 2)))


def run(path: Path, variant: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Logits, confidences and tokens of three rows of several lengths, step by step."""
    backend = Session.open(path, threads=1, cache_bytes=0, variant=variant).backend
    cache, random = backend.new_cache(3), np.random.default_rng(1)
    lengths, results = np.zeros(3, np.int64), []
    for slots, kept in STEPS:
        cache.reserve(int(lengths.max()) + slots, lengths.tolist())
        ids = random.integers(0, 250, (3, slots))
        index = np.tile(np.arange(max(0, slots - 6), slots), (3, 1))
        out = backend.step(cache, 0, StepInput(ids, lengths, index), True)
        assert out.logits is not None
        results.append((out.logits[..., KEPT], out.confidence, out.token_ids))
        lengths = lengths + kept
    return results


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    def bundle(name: str, precision: str) -> Path:
        root = tmp_path_factory.mktemp("cuda")
        checkpoint = tiny.write(families.ALL[name], root / "checkpoint")
        codes = {"group": 16, "accuracy_level": 0} if precision.startswith("int") else {}
        options = {"precision": precision, "allow_drift": True, "reference": False, **codes}
        export(checkpoint, root / "bundle", block=6, metrics=True, **options)
        return root / "bundle"

    return bundle


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", [name for name in families.ALL if name not in families.HYBRIDS])
def test_numbers_of_every_family(name: str, precision: str, written: Callable[[str, str], Path]) -> None:
    path = written(name, precision)
    pairs = list(zip(run(path, "model"), run(path, f"{precision}-cuda"), strict=True))
    logit = max(float(np.abs(a[0] - b[0]).max()) for a, b in pairs)
    confidence = max(float(np.abs(a[1] - b[1]).max()) for a, b in pairs)
    differ, total = sum(int((a[2] != b[2]).sum()) for a, b in pairs), sum(a[2].size for a, _ in pairs)
    graph = onnx.load(path / f"{precision}-cuda.onnx", load_external_data=False).graph
    most = launches(graph)
    words = "%-15s %s: logits %.1e, confidences %.1e, %d of %d tokens differ; %d launches a layer"
    logging.getLogger(__name__).info(words, name, precision, logit, confidence, differ, total, most)
    check_copies(optimized(path / f"{precision}-cuda.onnx"))
    assert most <= MAX_LAUNCHES + sum(more for start, more in MORE.items() if name.startswith(start))
    if precision == "fp32":
        assert (logit < 1e-4, confidence < 1e-4, differ) == (True, True, 0)
    else:
        size = max(float(np.abs(a[0]).max()) for a, _ in pairs)
        assert 0 < logit < BOUNDS["float16"][0] * size
        assert differ <= 0.05 * total


def launches(graph: onnx.GraphProto) -> int:
    """Kernels of the layer that has most, and checks of every node."""
    capped = {n.input[3] for n in graph.node if n.op_type == "Attention" and n.input[3]}
    for node in graph.node:
        assert node.op_type in KERNELS[node.domain], node.name
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "TensorScatter":
            assert (attributes["axis"], attributes["mode"]) == (1, b"linear")
        if node.op_type == "Attention":
            if node.input[3] in capped:
                assert "window" in node.input[3], "only a window needs a mask"
            else:
                assert node.input[6] == "valid_length"
                assert attributes["is_causal"] == 1
        if node.name.startswith("layers."):
            assert node.op_type != "Transpose"
    counts: Counter[str] = Counter()
    for node in graph.node:
        if node.name.startswith("layers.") and node.op_type not in FREE:
            counts[node.name.split(".")[1]] += FLASH if node.op_type == "Attention" else 1
    return max(counts.values())


def optimized(path: Path) -> onnx.GraphProto:
    """The graph that ONNX Runtime makes of it: the fusions here are CUDA's, too."""
    options, target = onnxruntime.SessionOptions(), path.parents[1] / "optimized.onnx"
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return onnx.load(target, load_external_data=False).graph


def check_copies(graph: onnx.GraphProto) -> None:
    """A captured step must not copy from the host, whose memory is another one's when it is replayed."""
    constants = {t.name: t for t in graph.initializer}
    for node in graph.node:
        assert node.op_type not in ("ScatterND", "Expand")
        assert node.op_type != "Concat" or node.name in ("logits_shape", "packed_shape")
        if node.op_type == "Split":
            sizes = onnx.numpy_helper.to_array(constants[node.input[1]])
            assert len({*sizes.tolist()}) == 1, f"{node.name}: unequal parts are copied from the host"


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_quantized_weights_are_multiplied_in_fp16(
    name: str, precision: str, written: Callable[[str, str], Path]
) -> None:
    path = written(name, precision)
    pairs = list(zip(run(path, "model"), run(path, f"{precision}-cuda"), strict=True))
    assert max(float(np.abs(a[0] - b[0]).max()) for a, b in pairs) < 0.5
    assert np.mean([float(np.abs(a[0] - b[0]).mean()) for a, b in pairs]) < 0.05
    graph = optimized(path / f"{precision}-cuda.onnx")
    check_copies(graph)
    nodes = graph.node
    kinds = Counter(node.op_type for node in nodes)
    layers = open_bundle(path).manifest.model.num_layers
    assert (kinds["MatMulNBits"], kinds["DequantizeLinear"]) == (4 * layers + 1, 0)
    assert not [node.name for node in nodes if node.name.endswith(".cast")], "folded when it is loaded"


@pytest.mark.parametrize("loop", ["cursor", "block-8"])
def test_answers_are_the_oracles(loop: str, bundles: Named, oracles: Oracles) -> None:
    session = Session.open(bundles("mistral"), threads=1, variant="fp32-cuda")
    follow(session, oracles("mistral"), 0.6, cache_block=LOOPS[loop])


def test_kept_entries_are_those_of_this_layout(exported: Exported, tmp_path: Path) -> None:
    """In memory and in a file; the session of the other graph has its own."""
    prompt, found = [i % 250 for i in range(320)], []
    for variant in ("fp32-cuda", "fp32-cuda", "model"):
        session = Session.open(exported(tiny.WIDE), threads=1, variant=variant, prefix_dir=tmp_path)
        answers = [session.generate(prompt, config(1.0)) for _ in range(2)]
        assert session._prefixes is not None
        session._prefixes.copies.wait()
        found += [(a.token_ids, a.stats.cached_tokens) for a in answers]
    assert len({tokens for tokens, _ in found}) == 1
    assert [cached > 0 for _, cached in found] == [False, True, True, True, False, True]


def test_the_contract(bundles: Named) -> None:
    model = onnx.load(bundles("llama") / "fp32-cuda.onnx", load_external_data=False)
    plain = onnx.load(bundles("llama") / "model.onnx", load_external_data=False)
    shapes = {v.name: shape_of(v) for v in [*model.graph.input, *model.graph.output]}
    expected = {v.name: shape_of(v) for v in [*plain.graph.input, *plain.graph.output]}
    assert shapes["present.1.value"] == (onnx.TensorProto.FLOAT, ["batch", "capacity", 24])
    assert {n: s for n, s in shapes.items() if "." not in n} == {
        n: s for n, s in expected.items() if "." not in n
    }
    assert shapes.keys() == expected.keys()
    assert {p.key: p.value for p in model.metadata_props}["mars.kv_layout"] == "cuda"
    assert len(model.SerializeToString()) < len(plain.SerializeToString()) + 4096
    here, beside = (
        open_bundle(bundles("llama")).variant("fp32-cuda"),
        open_bundle(bundles("llama")).variant("model"),
    )
    assert here == replace(beside, name="fp32-cuda", file="fp32-cuda.onnx", kv_layout="cuda", drift=None)


def test_it_is_chosen_on_cuda(bundles: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(bundles("llama"))
    assert [variants.choose(bundle, device).name for device in ("cpu", "cuda")] == ["model", "fp32-cuda"]
    monkeypatch.setattr(variants, "version_and_devices", lambda: ("1.27.1", ["cuda"]))
    assert variants.choose(bundle, "cuda").name == "model"
    with pytest.raises(SessionError, match=r"needs ONNX Runtime 1\.28 or newer, 1\.27\.1 is installed"):
        Session.open(bundles("llama"), variant="fp32-cuda")


@pytest.mark.parametrize(
    "fields", [{"precision": "bf16"}, {"precision": "w8a8"}, {"kv_layout": "appended"}], ids=lambda f: str(f)
)
def test_graphs_without_one(fields: dict[str, str], exported: Exported) -> None:
    bundle: Bundle = open_bundle(exported("llama", allow_drift=True, **fields))
    assert [v.name for v in bundle.manifest.variants] == ["model"]
