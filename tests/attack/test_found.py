"""What the long forms of `make attack` found, each by its smallest reproduction."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from support.manifests import rehash
from support.paths import BUNDLE
from support.tiny import Named

from mars_export import Batcher, BundleError, CheckpointError, Session, SessionError
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.machine import forget_peak, peak


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLE, tmp_path / "foreign.bundle"))


def test_nothing_is_printed_when_a_graph_cannot_be_loaded(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime's fallback printed to the standard output, where programs expect their JSON (seed 2853)."""
    graph = path / "model.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"GatherND", b"Gather\xf9D", 1).replace(b"Add", b"A\xf9d"))
    rehash(path)
    with pytest.raises(SessionError, match="cannot load the graph"):
        Session.open(path, threads=1)
    assert capfd.readouterr().out == ""


@pytest.fixture
def checkpoint(checkpoints: Named, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints("llama"), tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_huge_text_of_a_checkpoint_is_not_read(name: str, checkpoint: Path) -> None:
    """A hole of 6 GB in a text's place was read whole (checkpoint seeds 42, 135, 236)."""
    with (checkpoint / name).open("wb") as file:
        file.truncate(6 << 30)
    forget_peak()
    before = peak()
    with pytest.raises(CheckpointError, match=f"{name}: (not readable|cannot be used) .*more than"):
        open_checkpoint(str(checkpoint))
    assert peak() - before < 500e6


def test_a_huge_file_that_is_no_gguf_is_not_hashed(tmp_path: Path) -> None:
    """Six gigabytes of nothing took 5.4 s of processor time (checkpoint seed 977)."""
    with (tmp_path / "model.gguf").open("wb") as file:
        file.truncate(6 << 30)
    start = time.process_time()
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        open_checkpoint(str(tmp_path / "model.gguf"))
    assert time.process_time() - start < 2


@pytest.mark.parametrize("base", ["x" * 5000, "~nobody-of-this-name", "\0"])
def test_a_base_that_is_no_path(base: str, tmp_path: Path) -> None:
    """The operating system's own errors came through (checkpoint seed 4214)."""
    config = {"peft_type": "LORA", "r": 1, "base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as told:
        open_checkpoint(str(tmp_path))
    assert len(str(told.value)) < 500


def test_shards_with_names_that_no_file_has(checkpoint: Path) -> None:
    """As above (checkpoint seed 9989); and all names of a thousand missing shards were printed."""
    (checkpoint / "model.safetensors").unlink()
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x" * 10_000}}))
    with pytest.raises(CheckpointError, match="shard names must be plain file names") as told:
        open_checkpoint(str(checkpoint))
    assert len(str(told.value)) < 500
    index.write_text(json.dumps({"weight_map": {str(i): f"{i:0250}" for i in range(1000)}}))
    with pytest.raises(
        CheckpointError, match="1000 of 1000 shards of model.safetensors.index.json are missing"
    ) as told:
        open_checkpoint(str(checkpoint))
    assert len(str(told.value)) < 5000


def test_a_manifest_s_long_names_are_cut_in_messages(path: Path) -> None:
    """Twenty problems with a name of 10,000 characters each were a message of 200,000 (seed 18831)."""
    manifest = json.loads((path / "manifest.json").read_text())
    setting = {"name": "a", "tau": 1.0, "metric": "probability", "evidence": {}}
    manifest["profiles"] = [setting | {"variant": "x" * 90_000, "variant_sha256": "0"}] * 30
    (path / "manifest.json").write_text(json.dumps(manifest))
    rehash(path)
    with pytest.raises(BundleError, match="is for variant `xxx.*which is missing") as told:
        open_bundle(path)
    assert len(str(told.value)) < 25_000


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own RuntimeError came through under a memory limit (run 6)."""

    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    session = Session.open(BUNDLE, threads=1)
    monkeypatch.setattr("threading.Thread.start", start)
    with pytest.raises(SessionError, match="thread cannot be started .*free memory"):
        Batcher(session)
