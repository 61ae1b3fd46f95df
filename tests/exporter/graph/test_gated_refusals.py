"""Adapters that cannot act at draft slots only, and draft adapters that would be merged: refused by name."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import gated, shell, tiny
from support.exports import export

from mars_export import CheckpointError, ExportError, GenerationConfig, Session, SessionError
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export import export_onnx
from mars_export.exporter.export_options import ExportOptions
from mars_export.runtime.errors import MarsWarning

MADE = tiny.TINIES["llama"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(MADE, tmp_path_factory.mktemp("stock") / "base")


@pytest.fixture(scope="module")
def plain(base: Path) -> Path:
    return gated.write_adapter(base, base.parent / "plain", MADE)


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    return shutil.copytree(plain, tmp_path / "adapter")


def rename(adapter: Path, old: str, new: str) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({key.replace(old, new): value for key, value in load_file(file).items()}, file)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "DoRA cannot act at draft slots only"),
    ({"modules_to_save": ["lm_head"]}, "`modules_to_save` replaces weights at every slot"),
    ({"trainable_token_indices": [1, 2]}, "`trainable_token_indices` replaces weights at every slot"),
    ({"peft_type": "IA3"}, "peft_type IA3 cannot act at draft slots only"),
]
NAMES = [
    ("model.layers.0.self_attn.q_proj", "sigma_noisy_stream", "a Sigma-Uno adapter"),
    ("base_model.model.model.", "base_model.model.encoder.", "bidirectional attention"),
    ("model.layers.0.self_attn.q_proj", "lm_head", "the Linear maps of layers only, not lm_head.weight"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS)
def test_a_config_that_changes_more_than_draft_slots(
    base: Path, adapter: Path, changes: dict[str, Any], message: str
) -> None:
    tiny.change_config(adapter, "adapter_config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(base), draft_adapters={"a": str(adapter)})


@pytest.mark.parametrize(("old", "new", "message"), NAMES)
def test_tensors_of_another_kind_of_adapter(
    base: Path, adapter: Path, old: str, new: str, message: str
) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    if new == "lm_head":  # of the right shape, so that only its place is wrong
        up = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
        tensors = {
            "base_model.model.lm_head.lora_A.weight": tensors[
                "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
            ],
            "base_model.model.lm_head.lora_B.weight": up[:1].repeat(tiny.VOCAB_SIZE, 0),
        }
        save_file(tensors, file)
    else:
        rename(adapter, old, new)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(base), draft_adapters={"a": str(adapter)})


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [(np.nan, CheckpointError, "lora_A.weight.*NaN"), (1e30, ExportError, "in fp32, gives NaN or Inf")],
)
def test_an_adapter_that_overflows_is_not_exported(
    base: Path, adapter: Path, tmp_path: Path, value: float, error: type, message: str
) -> None:
    """Draft slots with infinite keys or values would change the stock model's text."""
    file = adapter / "adapter_model.safetensors"
    save_file({k: np.full_like(v, value) if "lora_A" in k else v for k, v in load_file(file).items()}, file)
    opened = open_checkpoint(str(base), draft_adapters={"a": str(adapter)})
    with pytest.raises(error, match=message):
        export_onnx(opened, tmp_path / "b", ExportOptions(4, allow_drift=True))


def test_an_adapter_of_another_base(base: Path, tmp_path: Path) -> None:
    made = tiny.TINIES["mistral"]
    other = gated.write_adapter(tiny.write(made, tmp_path / "other"), tmp_path / "adapter", made)
    with pytest.raises(CheckpointError, match="the adapter does not fit its base model"):
        open_checkpoint(str(base), draft_adapters={"a": str(other)})


def test_a_draft_adapter_of_nemo_is_not_merged(base: Path, adapter: Path) -> None:
    open_checkpoint(str(adapter))
    (adapter / "automodel_peft_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"automodel_peft_config.json is beside it.*--draft-adapter"):
        open_checkpoint(str(adapter))
    open_checkpoint(str(base), draft_adapters={"a": str(adapter)})


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "scale"),
    [(1, 16, False, 16), (2, 32, False, 16), (4, 64, True, 32), (4, 62, False, None), (4, 31, True, None)],
)
def test_a_large_scale_only_warns(
    rank: int, alpha: int, rslora: bool, scale: float | None, base: Path, tmp_path: Path
) -> None:
    adapter = gated.write_adapter(base, tmp_path / "a", MADE, rank=rank, alpha=alpha, use_rslora=rslora)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert open_checkpoint(str(adapter)).adapter == adapter
    found = [str(each.message) for each in caught if each.category is MarsWarning]
    assert [f"merged at a scale of {scale:g}" in text for text in found] == [True] * (scale is not None)


def test_a_bundle_of_base_and_adapter_names_the_option(base: Path, adapter: Path, tmp_path: Path) -> None:
    root = shutil.copytree(base, tmp_path / "uno")
    shutil.copytree(adapter, root / "adapter")
    tiny.change_config(root, model_type="sdar")
    with pytest.raises(CheckpointError, match="--draft-adapter"):
        open_checkpoint(str(root))
    opened = open_checkpoint(str(base), draft_adapters={"a": str(root)})
    assert opened.drafts is not None
    assert opened.drafts.names == ("a",)


def test_shards_are_read_together(base: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for i, keys in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({key: tensors[key] for key in keys}, adapter / f"adapter_model-{i}.safetensors")
    file.unlink()
    opened = open_checkpoint(str(base), draft_adapters={"a": str(adapter)})
    assert opened.drafts is not None
    assert len(opened.drafts.adapters[0].pairs) == len(tensors) // 2


def test_the_command_names_adapters_and_requests_choose_them(base: Path, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "b"
    run = shell.run(
        "onnx", str(base), "-o", str(target), "--block", "4", "--draft-ids", "noise",
        "--draft-adapter", str(plain), "--draft-adapter", f"other={plain}",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    session = Session.open(target, threads=1)
    draft = session.bundle.manifest.draft
    assert draft is not None
    assert (draft.adapters, draft.low, draft.high) == (("plain", "other"), 1, tiny.NUM_TOKENS)
    assert session.bundle.manifest.tokens.mask is None
    with pytest.raises(SessionError, match="no draft adapter 'third'; it has plain, other") as caught:
        session.generate([1], GenerationConfig(draft="third"))
    assert caught.value.field == "draft"
    for config in (GenerationConfig(tau=0.9), GenerationConfig(exact=False)):
        with pytest.raises(SessionError, match="trained to be verified"):
            session.generate([1], config)
    assert session.generate([tiny.MASK], GenerationConfig(max_new_tokens=2)).token_ids
    with pytest.raises(SessionError, match="outside the vocabulary"):
        session.generate([tiny.VOCAB_SIZE + 1], GenerationConfig(max_new_tokens=2))


def test_a_base_without_a_mask_token_needs_noise_or_a_token(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    stock = tiny.without_mask(shutil.copytree(base, tmp_path / "stock"))
    with pytest.raises(CheckpointError, match=r"give --draft-ids noise.*--mask-token"):
        open_checkpoint(str(stock), draft_adapters={"a": str(adapter)})
    open_checkpoint(str(stock), draft_adapters={"a": str(adapter)}, draft_ids="noise")
    opened = open_checkpoint(str(stock), draft_adapters={"a": str(adapter)}, mask_token="280")
    assert opened.drafts is not None
    assert (opened.drafts.low, opened.drafts.high) == (280, 281)


@pytest.mark.parametrize("given", [["=x"], ["a=x", "a=y"], ["a b=x"], ["a="]])
def test_names_that_are_none_or_given_twice(given: list[str], base: Path, tmp_path: Path) -> None:
    options = [word for each in given for word in ("--draft-adapter", each)]
    run = shell.run("onnx", str(base), "-o", str(tmp_path / "b"), *options)
    assert run.returncode == 1
    assert "--draft-adapter NAME=DIR" in " ".join((run.stdout + run.stderr).split())


def test_a_bundle_without_adapters_refuses_a_name(base: Path, tmp_path: Path) -> None:
    export(base, tmp_path / "b", ExportOptions(4))
    with pytest.raises(SessionError, match="no draft adapter 'a'; it has none"):
        Session.open(tmp_path / "b", threads=1).generate([1], GenerationConfig(draft="a"))
