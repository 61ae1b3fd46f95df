"""Reads the tokenizer files of a checkpoint: tokenizer.json, chat template, special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...runtime.errors import CheckpointError
from ...runtime.rules import is_integer
from .dims import MAX_SIZE
from .stock import ALIASES, silence
from .tensors import check_size, read_json, read_text, reading, shown

# The mask tokens of published checkpoints whose tokenizers do not name one: of MARS, and of MTP-LM (arXiv
# 2602.06019), whose tokenizers have 32 such tokens and whose models are trained with the first.
KNOWN_MASKS = ("<|mask|>", "<|mtp_special_token_0|>")
# The files that a tokenizer may be stored in, beside merges.txt. The first is read as it is.
VOCABULARIES = "tokenizer.json", "vocab.json", "tokenizer.model", "tekken.json", "tiktoken.model", "vocab.txt"
# Files that transformers reads.
TEXTS = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
ADDED_TOKENS = ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokenizer_json` is the text of a Hugging Face `tokenizer.json`; ids index the embedding. There is no
    mask token if the checkpoint is read without masks.
    """

    tokenizer_json: str
    mask_token_id: int | None
    mask_token: str | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    named_mask: str | None = None  # the mask token that the tokenizer names
    tool_template: str | None = None  # the chat template of requests with tools, if it is another one
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # more variables of the templates


def read_vocabulary(
    directories: Sequence[Path],
    config: dict[str, Any],
    vocab_size: int,
    mask_token: str | None,
    where: str,
    *,
    masks: bool = True,
) -> Vocabulary:
    """Read the tokenizer as transformers does, from the first of `directories` that has a vocabulary, and
    other files from the first that has them: an adapter's come before its base's.

    `mask_token` is a token's text or its id as a decimal number; None means the mask token that the tokenizer
    names, one of `KNOWN_MASKS`, or the `mask_token_id` of `config`. `where` names the checkpoint in
    messages. Raises CheckpointError if there is no mask token although `masks` are used, if tokenizer and
    config name different ones, and if its id is outside the embedding.
    """
    loaded = _load_tokenizer(directories, config)
    tokenizer: Tokenizer = loaded.backend_tokenizer
    name, mask_id = None, None
    if masks:
        name, mask_id = _find_mask(where, tokenizer, loaded.mask_token, config, mask_token)
    elif mask_token is not None:
        raise CheckpointError(f"{where}: --mask-token has no effect without masks; leave it out")
    if mask_id is not None and not 0 <= mask_id < vocab_size:
        raise CheckpointError(
            f"{where}: the mask token `{name}` has id {mask_id}, outside the embedding of {vocab_size} rows;"
            " resize the embedding when fine-tuning, or name another token with --mask-token"
        )
    eos = _eos_ids(where, directories, config, loaded.eos_token_id, mask_id)
    outside = [shown(i) for i in eos if not 0 <= i < vocab_size]
    if outside:
        raise CheckpointError(
            f"{where}: end-of-sequence ids outside the embedding of {vocab_size} rows: {', '.join(outside)};"
            " correct generation_config.json or config.json"
        )
    pad = loaded.pad_token_id
    templates = _chat_templates(directories)
    return Vocabulary(
        tokenizer_json=tokenizer.to_str(),
        mask_token_id=mask_id,
        mask_token=name,
        eos_token_ids=tuple(eos),
        pad_token_id=pad if pad is not None and pad < vocab_size else eos[0],
        bos_token=loaded.bos_token,
        eos_token=loaded.eos_token,
        chat_template=templates.get("default"),
        named_mask=_own_mask(tokenizer, loaded.mask_token)[0],
        tool_template=templates.get("tool_use"),
        special_tokens={n: token for n in SPECIAL_TOKENS[2:] if (token := getattr(loaded, n)) is not None},
    )


def _first(directories: Sequence[Path], name: str) -> Path | None:
    return next((d / name for d in directories if (d / name).is_file()), None)


def _read_text(path: Path) -> str:
    with reading(path):
        return read_text(path)


def _load_tokenizer(directories: Sequence[Path], config: dict[str, Any]) -> Any:
    """transformers' tokenizer: tokenizer.json or an older vocabulary, with the tokens that
    tokenizer_config.json and added_tokens.json add, and without the truncation and padding of its training.
    """
    vocabularies = ((d, name) for d in directories for name in VOCABULARIES if (d / name).is_file())
    directory, name = next(vocabularies, (None, ""))
    if directory is None:
        raise CheckpointError(
            f"{directories[-1]}: no tokenizer.json; save the tokenizer beside the weights:"
            " `tokenizer.save_pretrained(path)`"
        )
    for path in (path for pattern in TEXTS for path in directory.glob(pattern)):
        with reading(path):
            check_size(path)
    settings = _merged_settings(directories)
    special = {n: _content(settings, n) for n in SPECIAL_TOKENS if n in settings}
    # An adapter without a vocabulary adds its tokens to those of the base.
    own = _merged_settings(directories[: directories.index(directory) + 1])
    added = {n: own[n] for n in ADDED_TOKENS if n in own}
    with reading(f"{directory / name} and the other files of the tokenizer"), silence():
        from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

        if name == "tokenizer.json":  # as it is, whatever class transformers would build of it
            loaded = PreTrainedTokenizerFast.from_pretrained(directory, **special, **added)
        else:
            kind = AutoConfig.for_model(ALIASES.get(config["model_type"], config["model_type"]))
            loaded = AutoTokenizer.from_pretrained(
                directory, config=kind, trust_remote_code=False, **special, **added
            )
        if max(loaded.get_vocab().values(), default=0) >= MAX_SIZE:  # it could not be written again
            raise CheckpointError(
                f"{directory / name}: token ids beyond {MAX_SIZE}; save the tokenizer again"
            )
        loaded.backend_tokenizer.no_truncation()
        loaded.backend_tokenizer.no_padding()
        return loaded


def _merged_settings(directories: Sequence[Path]) -> dict[str, Any]:
    """tokenizer_config.json, and what special_tokens_map.json says if the former has no added tokens."""
    merged: dict[str, Any] = {}
    for directory in reversed(directories):
        files = [directory / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
        config, older = (read_json(path) if path.is_file() else {} for path in files)
        older = {} if "added_tokens_decoder" in config else older
        merged |= {name: value for name, value in (config | older).items() if value is not None}
    return merged


def _content(settings: dict[str, Any], name: str) -> str | None:
    """The text of a special token, which is a string or an object with a string."""
    token = settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"tokenizer_config.json: `{name}` must be a string, not {shown(token)}")
    return text


def _find_mask(
    where: str, tokenizer: Tokenizer, named: str | None, config: dict[str, Any], name: str | None
) -> tuple[str, int]:
    if name is not None:
        token_id = tokenizer.token_to_id(name)
        if token_id is None and name.isascii() and name.isdecimal() and len(name) < 10:
            return tokenizer.id_to_token(int(name)) or name, int(name)
        if token_id is None:
            raise CheckpointError(
                f"{where}: the tokenizer has no token `{name[:80]}`; give --mask-token one of its"
                " tokens or an id"
            )
        return name, token_id
    (name, token_id), declared = _own_mask(tokenizer, named), config.get("mask_token_id")
    if token_id is None and is_integer(declared, 0) and declared < 2**31:
        return tokenizer.id_to_token(declared) or str(declared), declared
    if token_id is not None and declared not in (None, token_id):
        raise CheckpointError(
            f"{where}: the mask token is `{name}` (id {token_id}) by the tokenizer, and id {shown(declared)}"
            " by config.json; say with --mask-token which one the model was trained with"
        )
    if name is not None and token_id is not None:
        return name, token_id
    raise CheckpointError(
        f"{where}: the tokenizer has no mask token, so this is not a MARS checkpoint;"
        " if the model was tuned with some other token as its mask, name it with --mask-token; a model that"
        " was not tuned with masks needs --no-masks"
    )


def _own_mask(tokenizer: Tokenizer, named: str | None) -> tuple[str | None, int | None]:
    for name in (named, *KNOWN_MASKS):
        if name is not None and (token_id := tokenizer.token_to_id(name)) is not None:
            return name, token_id
    return None, None


def _eos_ids(
    where: str, directories: Sequence[Path], config: dict[str, Any], named: int | None, mask_id: int | None
) -> list[int]:
    """The end-of-sequence ids of generation_config.json, the tokenizer (the end of a chat turn) and
    config.json, in this order, without the mask.
    """
    ids: list[int] = []
    path = _first(directories, "generation_config.json")
    for value in (read_json(path).get("eos_token_id") if path else None, named, config.get("eos_token_id")):
        values = value if isinstance(value, list) else [value]
        ids += [v for v in values if type(v) is int and v not in (*ids, mask_id)]
    if not ids:
        raise CheckpointError(
            f"{where}: no end-of-sequence token in generation_config.json, tokenizer_config.json or"
            " config.json; set eos_token"
        )
    return ids


def _chat_templates(directories: Sequence[Path]) -> Mapping[str, str]:
    """The chat templates by their names: `default`, and others such as `tool_use`."""
    for directory in directories:
        files = {
            path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
        }
        if (path := directory / "chat_template.jinja").is_file():
            files["default"] = path
        if files:
            return {name: _read_text(path) for name, path in files.items()}
        path = directory / "tokenizer_config.json"
        found = read_json(path).get("chat_template") if path.is_file() else None
        if found is None:
            continue
        if isinstance(found, list):
            templates = {str(t.get("name")): t.get("template") for t in found if isinstance(t, dict)}
        else:
            templates = {"default": found}
        if wrong := [t for t in templates.values() if not isinstance(t, str)]:
            raise CheckpointError(
                f"{path}: chat_template is {type(wrong[0]).__name__}, a string is expected; correct it"
            )
        return {name: str(template) for name, template in templates.items()}
    return {}
