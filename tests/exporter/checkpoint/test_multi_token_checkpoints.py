"""Checkpoints of other authors, tiny, through the commands: onnx, generate, serve, calibrate and bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import gated, tiny
from support.served import serving
from support.shell import run, succeed

from mars_export import Session
from mars_export.runtime.bundle.open import open_bundle

MADE = tiny.Tiny("idlm", "qwen3", {"head_dim": 20})
PADDING = "280"  # a row of the embedding that no text has
PROMPT, NEW = "the cat in", 12
IDLM = {"model_type": "sdar", "block_size": 3, "use_regular_causal": True, "mask_token_id": tiny.MASK}
# The adapter's settings if there is one, and the words of `onnx` and `trt` after BASE.
KINDS: dict[str, tuple[dict[str, Any] | None, tuple[str, ...]]] = {
    "I-DLM": (None, ()),
    "I-DLM LoRA, merged": ({"rank": 8, "alpha": 16}, ("--mask-token", PADDING, "--block", "4")),
    "I-DLM LoRA, gated": ({"rank": 8, "alpha": 16}, ("--mask-token", PADDING, "--block", "4")),
    "Uno, mask": ({"rank": 4, "alpha": 64}, ("--mask-token", PADDING)),
    "Uno, noise": ({"rank": 4, "alpha": 64}, ("--draft-ids", "noise")),
    "Uno, scale 64": ({"rank": 4, "alpha": 256}, ("--draft-ids", "noise")),
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
    lora = str(gated.write_adapter(base, root / "adapter", MADE, **adapter))
    if "merged" in request.param:
        return [lora, *options]
    return [str(base), "--draft-adapter", lora, *options]


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
        [entry] = server.call("/v1/models").json["data"]
    assert answer.json["choices"][0]["message"]["content"] == one_token
    draft = open_bundle(bundle).manifest.draft
    assert entry["mars"].get("drafts", []) == list(draft.adapters if draft else ())


@pytest.mark.parametrize("words", [kind for kind in KINDS if "gated" in kind or "Uno" in kind], indirect=True)
def test_calibrate_is_refused_without_masks_and_bench_compares_exact_mode(
    bundle: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": word, "answer": "", "score": "contains", "max_new_tokens": 4} for word in ("a", "b")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ("--task", tmp_path / "rows.jsonl")
    done = run("calibrate", bundle, *task, cwd=tmp_path)
    assert done.returncode == 1
    assert "no tau can be calibrated" in " ".join(done.stderr.split())
    done = succeed("bench", bundle, *task, "--rounds", "1", "--json", cwd=tmp_path)
    settings = [line["setting"] for line in json.loads(done.stdout)["compared"]]
    assert [setting["tau"] for setting in settings] == [1.0, None]
