"""Checkpoints of other authors, tiny, through the commands: onnx, generate and serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import lora, tiny
from support.served import serving
from support.shell import run, succeed

from mars_export import CheckpointError, Session
from mars_export.exporter.checkpoint.open import open_checkpoint

MADE = tiny.Tiny("idlm", "qwen3", {"head_dim": 20})
PADDING = "280"  # a row of the embedding that no text has
PROMPT, NEW = "the cat in", 12
IDLM = {"model_type": "sdar", "block_size": 3, "use_regular_causal": True, "mask_token_id": tiny.MASK}
# The adapter's settings if there is one, and the words of `onnx` and `trt` after BASE.
KINDS: dict[str, tuple[dict[str, Any] | None, tuple[str, ...]]] = {
    "I-DLM": (None, ()),
    "I-DLM LoRA": ({"rank": 8, "alpha": 16}, ("--mask-token", PADDING, "--block", "4")),
}


@pytest.fixture(scope="module", params=KINDS)
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What follows `mars-export onnx` or `trt`."""
    root, (adapter, options) = tmp_path_factory.mktemp("kind"), KINDS[request.param]
    base = tiny.write(MADE, root / "base")
    if adapter is None:
        tiny.change_config(base, **IDLM)
        return [str(base), *options]
    tiny.without_mask(base)
    return [str(lora.write_adapter(base, root / "adapter", MADE, **adapter)), *options]


@pytest.fixture(scope="module")
def bundle(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kind") / "b"
    succeed("onnx", *words, "-o", target)
    return target


@pytest.fixture(scope="module")
def one_token(bundle: Path) -> str:
    done = succeed("generate", bundle, "-p", PROMPT, "--tau", "1", "--max-new-tokens", str(NEW), "--json")
    return json.loads(done.stdout)["text"]


def test_generate_and_serve(bundle: Path, one_token: str) -> None:
    done = run("generate", bundle, "-p", PROMPT, "--max-new-tokens", str(NEW), "--json")
    assert json.loads(done.stdout)["text"] == one_token
    with serving({"tiny": Session.open(bundle, threads=1)}) as server:
        answer = server.chat(messages=[{"role": "user", "content": PROMPT}], max_tokens=NEW)
    assert answer.json["choices"][0]["message"]["content"] == one_token


@pytest.mark.parametrize("place", ["beside an adapter", "in a checkpoint"])
def test_an_adapter_of_draft_slots_is_refused(place: str, tmp_path: Path) -> None:
    base = tiny.write(MADE, tmp_path / "base")
    if place == "in a checkpoint":
        tiny.change_config(base, **IDLM)
        lora.write_adapter(base, base / "adapter", MADE)
        given = base
    else:
        given = lora.write_adapter(base, tmp_path / "adapter", MADE)
        (given / "automodel_peft_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="acts at draft slots only, which cannot be exported"):
        open_checkpoint(str(given))
