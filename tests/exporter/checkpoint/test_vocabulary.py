"""Tokenizer files of a checkpoint: the mask token, the ends of a sequence, the chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import tiny
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.checkpoint.vocabulary import Vocabulary
from mars_export.runtime.errors import CheckpointError


@pytest.fixture
def directory(checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(checkpoints("llama"), tmp_path / "llama")


def vocabulary(directory: Path, mask_token: str | None = None) -> Vocabulary:
    return open_checkpoint(str(directory), mask_token=mask_token).vocabulary


def settings(directory: Path, **changes: object) -> None:
    tiny.change_config(directory, "tokenizer_config.json", **changes)


def drop_token(directory: Path, token: str) -> None:
    raw = json.loads((directory / "tokenizer.json").read_text())
    raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] != token]
    (directory / "tokenizer.json").write_text(json.dumps(raw))


def test_the_tokenizer_s_mask_token(directory: Path) -> None:
    found = vocabulary(directory)
    assert (found.mask_token, found.mask_token_id) == ("<|mask|>", tiny.MASK)
    settings(directory, mask_token={"content": "<|im_start|>", "special": True})
    assert vocabulary(directory).mask_token_id == tiny.IM_START
    settings(directory, mask_token=None)  # the authors' own
    assert vocabulary(directory).mask_token_id == tiny.MASK


def test_no_mask_token_is_no_mars_checkpoint(directory: Path) -> None:
    settings(directory, mask_token=None)
    drop_token(directory, "<|mask|>")
    with pytest.raises(
        CheckpointError, match=r"no mask token, so this is not a MARS checkpoint;.*--mask-token"
    ):
        vocabulary(directory)


def test_a_named_mask_token(directory: Path) -> None:
    assert vocabulary(directory, "<|im_start|>").mask_token_id == tiny.IM_START
    assert vocabulary(directory, "280").mask_token_id == 280
    with pytest.raises(CheckpointError, match="no token `<mask>`; give --mask-token one of its tokens"):
        vocabulary(directory, "<mask>")


@pytest.mark.parametrize("wanted", ["288", "99999"])
def test_a_mask_id_outside_the_embedding(wanted: str, directory: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=f"has id {wanted}, outside the embedding of 288 rows.*resize the embedding.*--mask-token",
    ):
        vocabulary(directory, wanted)


def test_ends_come_from_all_three_places(directory: Path) -> None:
    settings(directory, eos_token="<|im_end|>")
    tiny.change_config(directory, eos_token_id=[tiny.MASK, 5])  # the mask is no end
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    assert vocabulary(directory).eos_token_ids == (9, 8, tiny.IM_END, 5)


def test_no_end_at_all(directory: Path) -> None:
    settings(directory, eos_token=None)
    tiny.change_config(directory, eos_token_id=None)
    (directory / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"no end-of-sequence token in generation_config.json"):
        vocabulary(directory)


def test_an_end_outside_the_embedding(directory: Path) -> None:
    tiny.change_config(directory, eos_token_id=[5, 288])
    with pytest.raises(CheckpointError, match=r"end-of-sequence ids outside the embedding of 288 rows: 288"):
        vocabulary(directory)


def test_padding_falls_back_to_an_end(directory: Path) -> None:
    assert vocabulary(directory).pad_token_id == tiny.ENDOFTEXT
    settings(directory, pad_token=None)
    assert vocabulary(directory).pad_token_id == vocabulary(directory).eos_token_ids[0]


def test_the_chat_template_s_places(directory: Path) -> None:
    assert vocabulary(directory).chat_template == tiny.CHAT_TEMPLATE
    settings(
        directory,
        chat_template=[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}],
    )
    assert vocabulary(directory).chat_template == "named"
    (directory / "chat_template.jinja").write_text("of its own")
    assert vocabulary(directory).chat_template == "of its own"
    settings(directory, chat_template=None)
    (directory / "chat_template.jinja").unlink()
    assert vocabulary(directory).chat_template is None


def test_tokens_may_be_objects(directory: Path) -> None:
    settings(directory, bos_token={"content": "<|endoftext|>"}, eos_token={"content": "<|im_end|>"})
    found = vocabulary(directory)
    assert (found.bos_token, found.eos_token) == ("<|endoftext|>", "<|im_end|>")


def test_a_chat_template_that_is_none(directory: Path) -> None:
    settings(directory, chat_template=5)
    with pytest.raises(CheckpointError, match="chat_template is int, a string is expected"):
        vocabulary(directory)


PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
ADDED = [
    {
        "added_tokens_decoder": {
            str(269 + i): {"content": f"<{i}>", "special": i > 1, **PLAIN} for i in range(4)
        }
    },
    {"extra_special_tokens": ["<0>", "<1>"]},
    {"additional_special_tokens": ["<1>", {"content": "<0>", "__type": "AddedToken", **PLAIN}]},
    {"extra_special_tokens": {"image_token": "<0>"}, "unk_token": "<1>"},
    {"bos_token": {"content": "<0>", **PLAIN}, "mask_token": "<1>"},
]
TRUNCATION = {"direction": "Right", "max_length": 3, "stride": 0, "strategy": "LongestFirst"}
PADDING = {"strategy": {"Fixed": 40}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 1}
FILES = [
    {"added_tokens.json": {"<1>": 269, "<0>": 270}},
    {"special_tokens_map.json": {"mask_token": "<0>", "cls_token": {"content": "<1>", **PLAIN}}},
    {"tokenizer.json": {"truncation": TRUNCATION}},
    {"tokenizer.json": {"padding": {**PADDING, "pad_type_id": 0, "pad_token": "<0>"}}},
]
WORDS = "<|im_start|>a <0>b<1> <2><3> the inner<|mask|>"


def same_as_transformers(directory: Path) -> None:
    """Ids and special tokens of the export are those of transformers, which truncates only if asked."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = vocabulary(directory)
    ours = Tokenizer.from_str(found.tokenizer_json)
    assert ours.encode(WORDS, add_special_tokens=False).ids == tokenizer.encode(
        WORDS, add_special_tokens=False
    )
    assert found.bos_token == tokenizer.bos_token
    assert found.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("added", ADDED, ids=lambda added: next(iter(added)))
def test_tokens_that_the_config_adds(added: dict[str, object], directory: Path) -> None:
    if isinstance(added.get("bos_token"), dict):  # older files, which transformers 5 refuses
        settings(directory, **added)
        found = vocabulary(directory)
        assert (found.bos_token, found.mask_token_id) == ("<0>", 270)
        return
    settings(directory, **added)
    same_as_transformers(directory)


@pytest.mark.parametrize("files", FILES, ids=str)
def test_other_files_of_a_tokenizer(files: dict[str, dict[str, object]], directory: Path) -> None:
    for name, values in files.items():
        if not (directory / name).exists():
            (directory / name).write_text("{}")
        tiny.change_config(directory, name, **values)
    same_as_transformers(directory)


def test_an_older_vocabulary_of_an_adapter_comes_before_its_base_s(directory: Path, tmp_path: Path) -> None:
    """vocab.json and merges.txt beside added_tokens.json, as slow tokenizers are saved."""
    older = tmp_path / "older"
    older.mkdir()
    raw = json.loads(tiny.tokenizer().to_str())["model"]
    (older / "vocab.json").write_text(json.dumps(raw["vocab"]))
    (older / "merges.txt").write_text("\n".join(" ".join(pair) for pair in raw["merges"]))
    specials = {token: 265 + i for i, token in enumerate((*tiny.SPECIALS[:3], "<0>", "<|mask|>"))}
    (older / "added_tokens.json").write_text(json.dumps(specials))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "mask_token": "<|mask|>"}
    (older / "tokenizer_config.json").write_text(json.dumps(config))
    found = open_checkpoint(str(directory), tokenizer=str(older)).vocabulary
    ids = Tokenizer.from_str(found.tokenizer_json).encode(WORDS, add_special_tokens=False).ids
    assert ids == AutoTokenizer.from_pretrained(older).encode(WORDS, add_special_tokens=False)
    assert found.mask_token_id == 269
