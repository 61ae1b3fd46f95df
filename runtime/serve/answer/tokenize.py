"""/tokenize and /detokenize: text to token ids and back."""

from __future__ import annotations

import asyncio
from typing import Any

from ...decode.config import GenerationConfig
from ...errors import MarsError
from ...rules import is_integer
from ...text.tokenizer import Text
from ...text.toolcalls import dialect_of
from ..ask.fields import Field, a_list, read_fields, text, wrong
from ..ask.messages import as_template, read_messages
from ..models.models import Models
from ..models.served import Served
from ..refusals import Refused

TO_IDS = {
    "model": Field(text),
    "prompt": Field(text, "content"),
    "content": Field(text),
    "messages": Field(read_messages),
    "tools": Field(a_list),
}
TO_TEXT = {"model": Field(text), "tokens": Field(a_list, is_needed=True)}


async def tokenize(models: Models, body: dict[str, Any]) -> dict[str, Any]:
    """Ids of a text (`content` or `prompt`), or of `messages` in the chat template."""
    values, names = read_fields(body, TO_IDS)
    with await models.take(values.get("model")) as lease:
        return await _tokenized(lease.served, values, names)


async def _tokenized(served: Served, values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    if ("content" in values) == ("messages" in values):
        raise Refused(400, "either content or messages is needed", param="content")
    source, info = _text(served), served.session.bundle.manifest.text
    prompt: Any = values.get("content")
    if prompt is None:
        dialect = dialect_of(info.chat_template if info is not None else None)
        prompt = as_template(values["messages"], dialect)

    def encode() -> list[int]:
        checked = GenerationConfig(tools=values.get("tools") or None).tools
        return source.encode(prompt, None, None if checked is None else str(checked))

    try:
        ids = await asyncio.to_thread(encode)
    except MarsError as error:
        param = (
            "tools" if error.field == "tools" else "messages" if "messages" in values else names["content"]
        )
        raise Refused.of(error, param) from None
    return {"tokens": ids, "count": len(ids), "max_model_len": served.context}


async def detokenize(models: Models, body: dict[str, Any]) -> dict[str, Any]:
    values, _ = read_fields(body, TO_TEXT)
    with await models.take(values.get("model")) as lease:
        return await _detokenized(lease.served, values)


async def _detokenized(served: Served, values: dict[str, Any]) -> dict[str, Any]:
    ids = values["tokens"]
    size, source = served.session.bundle.manifest.model.vocab_size, _text(served)
    if not all(is_integer(i, 0) and i < size for i in ids):
        raise wrong("tokens", f"a list of integers of 0 to {size - 1}", ids)
    try:
        spelled = await asyncio.to_thread(source.spelled, ids)
    except MarsError as error:
        raise Refused.of(error, "tokens") from None
    return {"content": spelled, "prompt": spelled}


def _text(served: Served) -> Text:
    if served.session.text is None:
        raise Refused(400, f"{served.name} has no tokenizer; send token ids", param="model")
    return served.session.text
