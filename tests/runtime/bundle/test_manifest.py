"""The manifest: every way it can be wrong has a test, and nothing that is not one opens."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from support.fields import with_field
from support.manifests import ENGINE, GOOD, changed
from support.paths import CONFORMANCE

from mars_export import BundleError
from mars_export.runtime.bundle.files import FileEntry
from mars_export.runtime.bundle.manifest import FORMAT_VERSION, parse_manifest
from mars_export.runtime.bundle.variant_info import QuantizerInfo


def test_the_good_one_is_read_as_it_was() -> None:
    assert parse_manifest(GOOD.to_json()) == GOOD


def test_unknown_fields_are_for_later_minor_versions() -> None:
    assert parse_manifest(changed("novelty", {"x": 1})) == GOOD
    newer = parse_manifest(changed("format_version", "1.7"))
    assert newer.format_version == "1.7"


@pytest.mark.parametrize(
    ("version", "side"),
    [
        ("2.0", "update mars-export"),
        ("13.1", "update mars-export"),
        ("0.9", "export the bundle again with this mars-export"),
    ],
)
def test_another_major_version_says_which_side_to_update(version: str, side: str) -> None:
    with pytest.raises(
        BundleError,
        match=f"bundle format {version}, this runtime reads {FORMAT_VERSION.split('.')[0]}.x: {side}",
    ):
        parse_manifest(changed("format_version", version))


@pytest.mark.parametrize("version", [..., None, "\u0661.9", "9" * 5000, 1, 1.0, "", "one", "-1.0", "²", [1]])
def test_no_version_is_no_bundle(version: Any) -> None:
    with pytest.raises(BundleError, match="no `format_version`; this is not a mars-export bundle"):
        parse_manifest(changed("format_version", version))


COUNTS = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "context_length",
)  # fmt: skip
WRONG: list[tuple[str, Any, str]] = [
    *[
        (f"model.{name}", value, rf"model.{name}: an integer of 1 to")
        for name in COUNTS
        for value in (..., 0, "8", 1.5, True, 2**32)
    ],
    *[
        (path, value, rf"{path}: a non-empty string is expected")
        for path in ("producer", "source", "model.type")
        for value in (..., "", 7, None)
    ],
    ("model", ..., "model: an object is expected"),
    ("model", [1], "model: an object is expected"),
    ("block", 0, "block: an integer of 1 to 4096"),
    ("tokens", None, "tokens: an object is expected"),
    ("tokens.mask", 288, "tokens.mask: integers of 0 to 287 are expected"),
    ("tokens.mask", -1, "tokens.mask: an integer of 0 to"),
    ("tokens.eos", 267, "tokens.eos: a list is expected"),
    ("tokens.eos", [288], "tokens.eos: integers of 0 to 287 are expected"),
    ("tokens.eos", ["267"], r"tokens.eos\[0\]: an integer of 0 to"),
    ("tokens.eos", [268], "tokens: the mask token cannot end a sequence"),
    ("variants.0.quantization", "int4", r"quantization: an object is expected"),
    (
        "variants.0.quantization",
        {"group_size": 0, "symmetric": True, "head": "int8", "embedding": "int8"},
        "group_size: an integer of 1 to",
    ),
    *[
        (
            "variants.0.quantization",
            {"group_size": 32, "symmetric": True, "head": "int8", "embedding": "int8", "quantizer": wrong},
            f"quantizer{problem}",
        )
        for wrong, problem in (
            ("gptq", ": an object is expected"),
            ({"name": ""}, ".name: a non-empty string"),
            ({"name": "gptq", "sequences": -1}, ".sequences: an integer of 0 to"),
            ({"name": "gptq", "text_sha256": 3}, ".text_sha256: a non-empty string"),
        )
    ],
    *[
        ("profiles.0.masks", value, r"profiles\[0\].masks: \"auto\", \"full\" or an integer")
        for value in (-1, 1.5, True, "all", "", [])
    ],
    ("profiles.0.tau", 10**400, "tau: a finite number is expected"),
    ("profiles.0.tau", float("nan"), "tau: a finite number is expected"),
    ("text.tokenizer", ..., "text.tokenizer: a non-empty string"),
    ("text.tokenizer", "other.json", "text uses `other.json`, which `files` does not list"),
    ("text.chat_template", 5, "text.chat_template: a non-empty string"),
    ("variants", ..., "variants: a list is expected"),
    ("variants", [], "variants: empty: nothing to run"),
    ("variants", [3], r"variants\[0\]: an object is expected"),
    ("variants.0.name", None, r"variants\[0\].name: a non-empty string"),
    ("variants.0.name", "fixed", "variants: `fixed` is listed twice"),
    (
        "variants.0.backend",
        "opencl",
        r"variants\[0\].backend: one of onnx, tensorrt, tensorrt_rtx is expected, not 'opencl'",
    ),
    ("variants.0.file", ..., r"variants\[0\].file: a non-empty string"),
    ("variants.0.file", "gone.onnx", "variant model uses `gone.onnx`, which `files` does not list"),
    ("variants.0.weights", "gone.bin", "variant model uses `gone.bin`, which `files` does not list"),
    ("variants.0.precision", "float12", r"variants\[0\].precision: one of"),
    ("variants.0.kv_dtype", "int4", r"variants\[0\].kv_dtype: one of"),
    ("variants.0.kv_dtype", "int8", "int8 is for w8a8 and w4a8 graphs of ONNX Runtime in the in-place"),
    ("variants.0.kv_layout", "paged", r"variants\[0\].kv_layout: one of in-place, appended, cuda"),
    ("variants.0.outputs", ["token_ids"], r"variants\[0\].outputs: token_ids and confidence are needed"),
    (
        "variants.0.outputs",
        ["token_ids", "confidence", "hidden"],
        r"variants\[0\].outputs: token_ids and confidence are needed",
    ),
    (
        "variants.0.outputs",
        ["token_ids", "confidence", "topk_ids"],
        r"variants\[0\].outputs: topk_ids and topk_logprobs must both be listed, or neither",
    ),
    ("variants.0.outputs", ["token_ids", "confidence", 3], r"variants\[0\].outputs\[2\]: a non-empty string"),
    ("variants.0.outputs", "token_ids", r"variants\[0\].outputs: a list is expected"),
    *[
        (f"variants.1.{name}", value, rf"variants\[1\].{name}: an integer of 1 to")
        for name in ("batch", "slots", "capacity")
        for value in (0, "1", 1.5)
    ],
    ("variants.0.drift.positions", -1, r"drift.positions: an integer"),
    ("variants.0.drift.max_logit_error", "0", r"drift.max_logit_error: a finite number"),
    ("variants.0.drift.max_confidence_error", ..., r"drift.max_confidence_error: a finite number"),
    ("files", ..., "files: a list is expected"),
    ("files.0", "model.onnx", r"files\[0\]: an object is expected"),
    ("files.0.path", ..., r"files\[0\].path: a plain file name"),
    ("files.0.size", -1, r"files\[0\].size: an integer of 0 to"),
    ("files.1", json.loads(GOOD.to_json())["files"][0], "files: `model.onnx` is listed twice"),
    ("profiles", {}, "profiles: a list is expected"),
    ("profiles.0.tau", None, r"profiles\[0\].tau: a finite number"),
    ("profiles.0.metric", "luck", r"profiles\[0\].metric: one of"),
    ("profiles.0.variant", "gone", "profile `math` is for variant `gone`, which is missing"),
    ("profiles.0.evidence", 3, r"profiles\[0\].evidence: an object is expected"),
    ("model.num_kv_heads", 3, "model: 4 heads cannot share 3 key/value heads"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        parse_manifest(changed(path, value))


def test_python_and_libmars_refuse_the_same_manifests() -> None:
    """`manifest_test.cpp` reads the same file. A null field is missing."""
    file = json.loads((CONFORMANCE / "manifests.json").read_text(encoding="utf-8"))
    text = json.dumps(file["manifest"])
    accepted = []
    for path, value in [["/novelty", None], *file["good"], *file["wrong"]]:
        with suppress(BundleError):
            parse_manifest(with_field(text, path[1:].replace("/", "."), value))
            accepted.append([path, value])
    assert accepted == [["/novelty", None], *file["good"]]


WITH_ENGINE = replace(
    GOOD,
    variants=(
        *GOOD.variants,
        replace(
            GOOD.variants[0],
            name="rtx",
            backend="tensorrt_rtx",
            file="rtx.engine",
            capacity=64,
            engine=ENGINE,
        ),
    ),
    files=(*GOOD.files, *(FileEntry(name, 3, GOOD.files[0].sha256) for name in ("rtx.engine", "rtx.onnx"))),
)
HALF_TOP_K = ["token_ids", "confidence", "topk_logprobs"]
WRONG_ENGINES: list[tuple[str, Any, str]] = [
    ("outputs", HALF_TOP_K, "outputs: topk_ids and topk_logprobs must both be listed, or neither"),
    ("engine", 3, r"variants\[2\].engine: an object is expected"),
    ("engine.tf32", 1, "engine.tf32: true or false is expected"),
    ("engine.version", None, r"engine.version: a non-empty string"),
    ("engine.compute_capabilities", [86], r"engine.compute_capabilities\[0\]: a non-empty string"),
    ("engine.ranges", [], r"engine.ranges: at least one is expected"),
    ("engine.ranges", [7], r"engine.ranges\[0\]: an object is expected"),
    ("engine.ranges.0.name", "warmup", r"ranges\[0\].name: one of decode, prefill"),
    ("engine.ranges.0.slots.opt", 16, r"ranges\[0\].slots: min 1, opt 16, max 15 are not in order"),
    ("engine.ranges.0.batch.min", 0, r"ranges\[0\].batch.min: an integer of 1 to"),
    ("engine.ranges.0.batch.max", 2**40, r"ranges\[0\].batch.max: an integer of 1 to"),
    ("engine.graph", "../x.onnx", r"variant rtx uses `../x.onnx`, which `files` does not list"),
    ("engine.graph_sha256", ..., r"engine.graph_sha256: a non-empty string"),
]


def test_an_engine_is_read_as_it_was_written() -> None:
    assert parse_manifest(WITH_ENGINE.to_json()) == WITH_ENGINE
    assert parse_manifest(changed("variants.2.engine.tf32", ..., WITH_ENGINE)) == WITH_ENGINE


@pytest.mark.parametrize(("path", "value", "message"), WRONG_ENGINES, ids=lambda value: str(value)[:40])
def test_a_wrong_engine_field_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        parse_manifest(changed(f"variants.2.{path}", value, WITH_ENGINE))


@pytest.mark.parametrize(
    ("given", "meaning"), [(..., "full"), (None, "full"), ("full", "full"), ("auto", "auto"), (0, 0), (3, 3)]
)
def test_the_masks_of_a_profile(given: Any, meaning: Any) -> None:
    assert parse_manifest(changed("profiles.0.masks", given)).profiles[0].masks == meaning


def test_what_chose_the_codes_may_be_unknown() -> None:
    stored = {"group_size": 32, "symmetric": True, "head": "int8", "embedding": "int8"}
    info = parse_manifest(changed("variants.0.quantization", stored)).variants[0].quantization
    assert info is not None and info.quantizer is None
    stored["quantizer"] = {"name": "gptq", "text_sha256": "0" * 64, "sequences": 3, "tokens": 9}
    info = parse_manifest(changed("variants.0.quantization", stored)).variants[0].quantization
    assert info is not None and info.quantizer == QuantizerInfo("gptq", "0" * 64, 3, 9)


UNSAFE = [
    "../weights.bin", "/etc/passwd", "sub/weights.bin", "..", ".", ".hidden", "C:\\weights.bin", "a\\b",
    "weights.bin\0", "weights.bin\n", "nul:", "é", "-rf", "x" * 300,
]  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE)
def test_a_file_name_that_leads_elsewhere(name: str) -> None:
    with pytest.raises(BundleError, match="a plain file name is expected"):
        parse_manifest(changed("files.2.path", name))


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_numbers_that_are_none(value: str) -> None:
    text = changed("profiles.0.tau", 123456.5).replace("123456.5", value)
    with pytest.raises(BundleError, match=r"profiles\[0\].tau: a finite number"):
        parse_manifest(text)


def test_all_problems_are_listed_at_once() -> None:
    whole = json.loads(GOOD.to_json())
    whole["block"], whole["producer"], whole["model"]["num_heads"] = 0, 3, "4"
    with pytest.raises(BundleError) as caught:
        parse_manifest(json.dumps(whole), "there/manifest.json")
    assert str(caught.value).startswith("3 problems in the manifest:")
    for line in (
        "there/manifest.json.producer:",
        "there/manifest.json.model.num_heads:",
        "there/manifest.json.block:",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '"x"', "null", "[" * 100_000, '{"a":' * 100_000, "9" * 10_000],
    ids=lambda text: text[:5],
)
def test_text_that_is_no_manifest(text: str) -> None:
    with pytest.raises(BundleError):
        parse_manifest(text)
