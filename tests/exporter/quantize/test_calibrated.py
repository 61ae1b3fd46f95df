"""Calibrated codes: GPTQ against rounding and against trying everything, and whole bundles."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.calibration_rows import write_rows
from support.exports import export
from support.fixtures import Named

from mars_export import GenerationConfig, Session
from mars_export.exporter.check import reference
from mars_export.exporter.checkpoint import default, names
from mars_export.exporter.checkpoint.open import Checkpoint, open_checkpoint
from mars_export.exporter.codes import Codec, CodeSource, Quantization
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.quantize import calibrated as calibration
from mars_export.exporter.quantize.calibrated import CalibratedTensors, Moments, choose_codes, quick_products
from mars_export.exporter.quantize.quantizer import choose_quantizer
from mars_export.exporter.quantize.text import read_text
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.errors import ExportError

FP32 = np.dtype(np.float32)
CODECS = [Codec("int4", 16), Codec("int4", 16, False), Codec("int4", 16, False, True), Codec("int8", None)]
OPTIONS: dict[str, Any] = {"block": 4, "precision": "int4", "group": 16, "allow_drift": True}


def inputs(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Correlated inputs [count, width], some much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator) @ torch.randn(width, width, generator=generator)
    return x * torch.logspace(-1, 1, width)


def moments(x: torch.Tensor, bits: int = 4) -> torch.Tensor:
    sums = Moments(x.shape[1], bits)
    for part in x.split(100):
        sums.add(part)
    return sums.sums


def matrix(outputs: int, width: int) -> torch.Tensor:
    return torch.randn(outputs, width, generator=torch.Generator().manual_seed(7)) / width**0.5


def error(made: Any, weight: torch.Tensor, x: torch.Tensor) -> float:
    """Of the products with x, squared."""
    decoded = torch.from_numpy(made.decoded().reshape(weight.shape))
    return float(((x @ (decoded - weight).T) ** 2).sum())


BY_CODEC = pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.dtype}-{c.group_size}-{c.multiplied}")


@BY_CODEC
def test_products_of_correlated_inputs_lose_much_less_than_by_rounding(codec: Codec) -> None:
    weight, (x, fresh) = matrix(24, 48), inputs(800, 48).split(400)
    made = choose_codes(weight, moments(x), codec, FP32)
    plain = codec.encode(weight.numpy(), FP32)
    assert error(made, weight, x) < 0.55 * error(plain, weight, x)
    assert error(made, weight, fresh) < 0.55 * error(plain, weight, fresh)
    assert made.codes.shape == plain.codes.shape and made.codes.dtype == plain.codes.dtype
    assert made.codes.min() >= codec.lowest and made.codes.max() <= codec.highest
    assert (made.scales == plain.scales).all()


@BY_CODEC
def test_a_short_text_does_not_make_other_texts_worse_than_by_rounding(codec: Codec) -> None:
    weight, (x, fresh) = matrix(24, 48), inputs(1000, 48).split([12, 988])
    made = choose_codes(weight, moments(x, codec.bits), codec, FP32)
    assert error(made, weight, fresh) < error(codec.encode(weight.numpy(), FP32), weight, fresh)


@BY_CODEC
def test_codes_are_those_of_gptq_column_by_column(codec: Codec) -> None:
    """Each column's loss is spread by the inverse of the moments of the columns that are left, in fp64."""
    weight, sums = matrix(24, 48), moments(inputs(400, 48))
    made, plain = choose_codes(weight, sums, codec, FP32), codec.encode(weight.numpy(), FP32)
    rest, units = weight.double().numpy(), np.repeat(plain.units, 48 // plain.units.shape[1], 1)
    zeros = np.zeros_like(units) if plain.zeros is None else np.repeat(plain.zeros, 16, 1).astype(float)
    usual = np.sort(np.diag(sums))[: math.ceil(calibration.USUAL[codec.bits] * 48)].mean()
    left, all_moments = list(np.argsort(-np.diag(sums), kind="stable")), sums.double().numpy()
    all_moments += np.eye(48) * calibration.DAMPING * usual
    codes = np.empty_like(rest)
    while left:
        inverse, first = np.linalg.inv(all_moments[np.ix_(left, left)]), left[0]
        code = np.rint(rest[:, first] / units[:, first] + zeros[:, first]).clip(codec.lowest, codec.highest)
        loss = rest[:, first] - (code - zeros[:, first]) * units[:, first]
        codes[:, first] = code
        rest[:, left] -= loss[:, None] * inverse[0] / inverse[0, 0]
        left = left[1:]
    assert (made.codes.reshape(24, 48) == codes).mean() > 0.98


@pytest.mark.parametrize(
    "sums",
    [
        torch.zeros(48, 48),
        torch.ones(48, 48) * 1e6,  # one direction only
        moments(inputs(5, 48)),  # fewer tokens than inputs
        torch.diag(torch.tensor([1e12, *[0.0] * 47])),
        moments(inputs(400, 48)) * 1e-20,
    ],
)
def test_singular_moments_give_codes_all_the_same(sums: torch.Tensor) -> None:
    weight = matrix(24, 48)
    weight[3, :16] = 0
    made = choose_codes(weight, sums, Codec("int4", 16), FP32)
    decoded = made.decoded()
    assert np.isfinite(decoded).all()
    assert (decoded[3, 0] == 0).all()
    if not sums.any():
        assert (made.codes == Codec("int4", 16).encode(weight.numpy(), FP32).codes).all()


def test_a_huge_input_keeps_its_product_with_8_bits_and_does_not_decide_every_code() -> None:
    """As that of a first token: huge in two channels that are otherwise as large as others."""
    weight, (x, fresh) = matrix(24, 48), inputs(500, 48).split([400, 100])
    huge = torch.zeros(1, 48)
    huge[0, 10], huge[0, 20] = 1e6, 3e5
    for codec, loss in (Codec("int4", 16), 1.1), (Codec("int8", None), 1.5):
        made = choose_codes(weight, moments(torch.cat([huge, x]), codec.bits), codec, FP32)
        without = choose_codes(weight, moments(x, codec.bits), codec, FP32)
        assert error(made, weight, fresh) < loss * error(without, weight, fresh)
    assert error(made, weight, huge) < 0.1 * error(without, weight, huge)


# --- texts ---


def calibrated(checkpoint: Checkpoint, seed: int = 0) -> CalibratedTensors:
    generator = np.random.default_rng(seed)
    sequences = [
        generator.integers(0, 12, 5 + i).tolist() for i in range(40)
    ]  # few tokens: inputs go together
    return CalibratedTensors(checkpoint.tensors, checkpoint.dims, Quantization("int4", 16), sequences)


@pytest.mark.parametrize("name", tiny.TINIES)
def test_every_map_of_each_family_loses_less_than_by_rounding(name: str, checkpoints: Named) -> None:
    """Products with what goes into them for sequences that were not calibrated with; then what the next layer
    is calibrated with.
    """
    checkpoint = open_checkpoint(str(checkpoints(name)))
    dims, codec, tensors = checkpoint.dims, CODECS[0], calibrated(checkpoint)
    before = [x.clone() for x in tensors._hidden]
    fresh = [np.random.default_rng(99).integers(0, 12, 60).tolist() for _ in range(4)]
    weights = reference.layer_weights(checkpoint.tensors, 0)
    chosen, losses = dict(weights), {}

    def watch(part: str, x: torch.Tensor) -> None:
        weight = weights[f"{part}.weight"]
        made = tensors.encoded(names.weight(0, part), FP32)
        chosen[f"{part}.weight"] = torch.from_numpy(made.decoded().reshape(weight.shape))
        losses[part] = error(made, weight, x) / error(codec.encode(weight.numpy(), FP32), weight, x)

    embedded = reference.embedded(dims, checkpoint.tensors, fresh)
    reference.layer(dims, 0, weights, embedded, *reference.places([60] * 4), watch)
    assert set(losses) == {*dims.quirks.qkv, names.O, *dims.quirks.gate_up, names.DOWN}
    assert all(loss < 0.9 for loss in losses.values()), losses
    for x, after, batch in zip(before, tensors._hidden, tensors._batches, strict=True):
        places = reference.places([len(sequence) for sequence in batch])
        with quick_products():
            assert torch.equal(reference.layer(dims, 0, chosen, x, *places), after)


def test_two_runs_choose_the_same_codes(checkpoint: Checkpoint) -> None:
    first, second = calibrated(checkpoint), calibrated(checkpoint)
    other = calibrated(checkpoint, seed=1)
    assert isinstance(first, CodeSource)
    differ = 0
    for i in range(checkpoint.dims.num_layers):
        for part in (names.Q, names.K, names.V, names.O, names.GATE, names.UP, names.DOWN):
            a, b, c = (t.encoded(names.weight(i, part), FP32).codes for t in (first, second, other))
            assert (a == b).all()
            differ += int((a != c).sum())
    assert differ, "the text makes no difference"


def test_an_interrupted_export_continues_with_the_codes_that_fit(
    checkpoints: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C or SIGTERM in the second layer keeps the first one's codes. They are used for the same
    checkpoint, text and options only, and not if their file is damaged; the bundle is that of an
    uninterrupted export.
    """
    rows, target, kept = write_rows(tmp_path / "rows.jsonl"), tmp_path / "b", tmp_path / ".b.codes"
    other_rows = write_rows(tmp_path / "other.jsonl", 13)
    plain = ExportOptions(**OPTIONS, calibration_text=rows)
    choose, chosen = calibration.choose_codes, 0
    stops = itertools.cycle((KeyboardInterrupt, SystemExit))

    def run(name: str, options: ExportOptions, last: int = 100) -> int:
        """How often codes are chosen; Ctrl-C in the layer after `last` of them."""
        nonlocal chosen
        chosen = 0

        def counted(*arguments: Any) -> Any:
            nonlocal chosen
            if chosen == last:
                raise next(stops)
            chosen += 1
            return choose(*arguments)

        monkeypatch.setattr(calibration, "choose_codes", counted)
        export_onnx(open_checkpoint(str(checkpoints(name))), target, options, force=True)
        return chosen

    def interrupt() -> Path:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run("llama", plain, 6)
        assert chosen == 6
        (file,) = kept.iterdir()
        return file

    assert run("llama", plain) == 8 and not kept.exists()
    whole = (target / "weights.bin").read_bytes()
    interrupt()
    assert run("llama", plain) == 4 and not kept.exists()
    assert (target / "weights.bin").read_bytes() == whole
    for name, options in {
        "qwen2": plain,
        "llama": replace(plain, asymmetric=True),
        "llama ": replace(plain, calibration_text=other_rows),
    }.items():
        interrupt()
        assert run(name.strip(), options) == 8 and not kept.exists()
    for damage in (lambda data: data[:-200], lambda data: b"", lambda data: data[:300] + b"x" + data[301:]):
        file = interrupt()
        file.write_bytes(damage(file.read_bytes()))
        assert run("llama", plain) == 8
        assert (target / "weights.bin").read_bytes() == whole


def test_activations_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    spec = tiny.TINIES["llama"]
    model = tiny.build(spec)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight.mul_(1e30)
        model.model.layers[1].mlp.up_proj.weight.mul_(1e30)
    tiny.save(model, tmp_path / "c")
    rows = write_rows(tmp_path / "rows.jsonl")
    options = ExportOptions(**OPTIONS, calibration_text=rows)
    with pytest.raises(
        ExportError, match=r"layer 1 gives NaN or Inf .* mlp.down_proj\)\. Nothing was written"
    ):
        export(tmp_path / "c", tmp_path / "b", options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "rows.jsonl"]


@pytest.mark.parametrize("precision", ["int4", "int8", "w8a8"])
def test_a_bundle_says_what_chose_its_codes_and_runs(
    precision: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    options = {**OPTIONS, "precision": precision}
    seen = []
    manifest = export_onnx(
        checkpoint,
        tmp_path / "a",
        ExportOptions(**options, calibration_text=rows),
        progress=lambda *each: seen.append(each),
    )
    export_onnx(checkpoint, tmp_path / "b", ExportOptions(**options, calibration_text=rows))
    export_onnx(checkpoint, tmp_path / "c", ExportOptions(**options, quantizer="round"))
    kept = [(tmp_path / name / "weights.bin").read_bytes() for name in "abc"]
    assert kept[0] == kept[1] != kept[2]
    assert [done for phase, done, _ in seen if phase == "codes"] == [0, 1, 1, 2]
    made = [open_bundle(tmp_path / name).manifest.variants[0].quantization for name in "ac"]
    assert made[0] == manifest.variants[0].quantization
    assert made[0] is not None and made[0].quantizer is not None
    text = read_text(rows, checkpoint, 4)
    assert (made[0].quantizer.name, made[0].quantizer.text_sha256) == ("gptq", text.sha256)
    assert (made[0].quantizer.sequences, made[0].quantizer.tokens) == (36, text.num_tokens)
    assert made[1] is not None and made[1].quantizer is not None
    assert (made[1].quantizer.name, made[1].quantizer.text_sha256) == ("round", None)
    assert (
        Session.open(tmp_path / "a", threads=1).generate("the", GenerationConfig(max_new_tokens=5)).token_ids
    )


def test_what_is_chosen_when_nothing_is_said(checkpoint: Checkpoint, tmp_path: Path) -> None:
    ours = replace(checkpoint, source=default.NAME)
    rows = tmp_path / "rows.jsonl"
    four, eight = Quantization("int4"), Quantization("int8")

    def chosen(*asked: Any) -> tuple[str, Path | None]:
        made = choose_quantizer(*asked)
        assert made is not None
        return made.name, made.text

    assert choose_quantizer(ours, None) is None
    w8a8 = Quantization("w8a8")
    assert (
        chosen(ours, w8a8) == chosen(checkpoint, w8a8) == chosen(checkpoint, w8a8, "gptq") == ("gptq", None)
    )
    assert chosen(ours, w8a8, "round") == ("round", None)
    assert chosen(checkpoint, w8a8, "auto", rows) == ("gptq", rows)
    assert (
        chosen(ours, four)
        == chosen(ours, four, "gptq")
        == chosen(ours, eight, "gptq")
        == ("gptq", default.calibration_text())
    )
    assert chosen(ours, eight) == chosen(checkpoint, eight) == chosen(ours, four, "round") == ("round", None)
    assert chosen(checkpoint, four, "auto", rows) == chosen(checkpoint, eight, "auto", rows) == ("gptq", rows)
    fallback = choose_quantizer(checkpoint, four)
    assert fallback is not None and fallback.name == "round" and "--calibration-text FILE" in fallback.reason
    for asked, message in (
        (
            (checkpoint, four, "gptq"),
            "--quantizer gptq needs a text .*--calibration-text FILE.*--quantizer round",
        ),
        ((checkpoint, four, "round", rows), "--quantizer round reads no text"),
        ((checkpoint, None, "gptq"), "are for --precision int4, int8, w8a8, w4a8"),
        ((checkpoint, None, "auto", rows), "are for --precision int4, int8, w8a8, w4a8"),
        ((checkpoint, four, "awq"), "must be one of auto, gptq, round, not awq"),
    ):
        with pytest.raises(ExportError, match=message):
            choose_quantizer(*asked)


def test_the_built_in_rows_are_of_the_calibration_splits() -> None:
    from support.paths import ROOT

    def prompts(path: Path) -> set[str]:
        return {json.dumps(json.loads(line)["messages"]) for line in path.read_text().splitlines()}

    data, example = ROOT / "calibration" / "tasks" / "data", ROOT / "examples" / "default-checkpoint" / "data"
    ours = prompts(default.calibration_text())
    known = set().union(
        *map(prompts, data.glob("*.calibration.jsonl")), prompts(example / "chat.calibration.jsonl")
    )
    assert len(ours) == 100 and ours <= known
    assert not ours & set().union(*map(prompts, example.glob("*.test.jsonl")))
