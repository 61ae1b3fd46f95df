"""Tokenizer files of a checkpoint: tokenizer.json, chat template, and the ids of the mask, end and padding tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...runtime.errors import CheckpointError
from .tensors import read_json

AUTHORS_MASK = "<|mask|>"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokenizer_json` is the text of a Hugging Face `tokenizer.json`; ids index the embedding."""

    tokenizer_json: str
    mask_token_id: int
    mask_token: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


def read_vocabulary(
    directories: Sequence[Path], config: dict[str, Any], vocab_size: int, mask_token: str | None
) -> Vocabulary:
    """Read the tokenizer from the first of `directories` that has each file (an adapter's wins over its base's).

    `mask_token` is a token's text or its id as a decimal number; None looks for the tokenizer's own mask token, then for
    the authors' `<|mask|>`. Raises CheckpointError when there is no mask token or its id lies outside the embedding.
    """
    where = directories[0]
    text = _tokenizer_json(directories)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(
            f"{where}: tokenizer.json is not readable ({error}); download it again"
        ) from error
    settings = _merged_settings(directories)
    name, mask_id = _find_mask(where, tokenizer, settings, mask_token)
    if not 0 <= mask_id < vocab_size:
        raise CheckpointError(
            f"{where}: the mask token `{name}` has id {mask_id}, outside the embedding of {vocab_size} rows;"
            " resize the embedding when fine-tuning, or name another token with --mask-token"
        )
    eos = _eos_ids(where, directories, config, tokenizer, settings, mask_id)
    outside = [str(i) for i in eos if not 0 <= i < vocab_size]
    if outside:
        raise CheckpointError(
            f"{where}: end-of-sequence ids outside the embedding of {vocab_size} rows: {', '.join(outside)};"
            " correct generation_config.json or config.json"
        )
    pad = _token_id(tokenizer, settings.get("pad_token"))
    return Vocabulary(
        tokenizer_json=text,
        mask_token_id=mask_id,
        mask_token=name,
        eos_token_ids=tuple(eos),
        pad_token_id=pad if pad is not None and pad < vocab_size else eos[0],
        bos_token=_content(settings.get("bos_token")),
        eos_token=_content(settings.get("eos_token")),
        chat_template=_chat_template(directories, settings),
    )


def _first(directories: Sequence[Path], name: str) -> Path | None:
    return next((d / name for d in directories if (d / name).is_file()), None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not readable as text ({error}); download it again") from error


def _tokenizer_json(directories: Sequence[Path]) -> str:
    path = _first(directories, "tokenizer.json")
    if path is not None:
        return _read_text(path)
    if _first(directories, "vocab.json") is None and _first(directories, "tokenizer.model") is None:
        raise CheckpointError(
            f"{directories[-1]}: no tokenizer.json; save the tokenizer beside the weights: `tokenizer.save_pretrained(path)`"
        )
    from transformers import AutoTokenizer

    directory = next(
        d for d in directories if (d / "vocab.json").is_file() or (d / "tokenizer.model").is_file()
    )
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return str(tokenizer.backend_tokenizer.to_str())


def _merged_settings(directories: Sequence[Path]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for directory in reversed(directories):
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (directory / name).is_file():
                merged |= {k: v for k, v in read_json(directory / name).items() if v is not None}
    return merged


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    text = _content(token)
    return None if text is None else tokenizer.token_to_id(text)


def _find_mask(
    where: Path, tokenizer: Tokenizer, settings: dict[str, Any], wanted: str | None
) -> tuple[str, int]:
    if wanted is not None:
        found = tokenizer.token_to_id(wanted)
        if found is None and wanted.isdecimal():
            return tokenizer.id_to_token(int(wanted)) or wanted, int(wanted)
        if found is None:
            raise CheckpointError(
                f"{where}: the tokenizer has no token `{wanted}`; give --mask-token one that it has, or the mask's id"
            )
        return wanted, found
    for name in (_content(settings.get("mask_token")), AUTHORS_MASK):
        if name is not None and (found := tokenizer.token_to_id(name)) is not None:
            return name, found
    raise CheckpointError(
        f"{where}: the tokenizer has no mask token, so this is not a MARS checkpoint;"
        " if the model was tuned with some other token as its mask, name it with --mask-token"
    )


def _eos_ids(
    where: Path,
    directories: Sequence[Path],
    config: dict[str, Any],
    tokenizer: Tokenizer,
    settings: dict[str, Any],
    mask_id: int,
) -> list[int]:
    """generation_config.json knows best (several ids), then the tokenizer (chat end), then config.json. The mask ends nothing."""
    ids: list[int] = []
    path = _first(directories, "generation_config.json")
    for value in (
        read_json(path).get("eos_token_id") if path else None,
        _token_id(tokenizer, settings.get("eos_token")),
        config.get("eos_token_id"),
    ):
        values = value if isinstance(value, list) else [value]
        ids += [v for v in values if isinstance(v, int) and v not in (*ids, mask_id)]
    if not ids:
        raise CheckpointError(
            f"{where}: no end-of-sequence token in generation_config.json, tokenizer_config.json or config.json; set eos_token"
        )
    return ids


def _chat_template(directories: Sequence[Path], settings: dict[str, Any]) -> str | None:
    path = _first(directories, "chat_template.jinja")
    own = _first(directories, "tokenizer_config.json")
    template = settings.get("chat_template")
    if path is not None and (
        own is None or directories.index(path.parent) <= directories.index(own.parent) or template is None
    ):
        return _read_text(path)
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
