"""/tokenize and /detokenize: text to token ids and back."""

from __future__ import annotations

import asyncio
from typing import Any

from ..decode.config import GenerationConfig
from ..errors import MarsError
from ..rules import is_integer
from ..text.tokenizer import Text
from ..text.toolcalls import dialect_of
from .ask.fields import BodyFields, wrong
from .ask.messages import as_template, read_messages
from .models import Models, Served
from .refusals import Refused


async def tokenize(models: Models, body: dict[str, Any]) -> dict[str, Any]:
    """Ids of a text (`content` or `prompt`), or of `messages` in the chat template."""
    fields = BodyFields(body)
    served, _ = models.find(fields.text("model"))
    text = fields.text("content")
    text = text if text is not None else fields.text("prompt")
    messages, tools = fields.any("messages"), fields.list("tools")
    fields.finish()
    if (text is None) == (messages is None):
        raise Refused(400, "either content or messages is needed", param="content")
    source, info = _text(served), served.session.bundle.manifest.text
    prompt: Any = text
    if text is None:
        dialect = dialect_of(info.chat_template if info is not None else None)
        prompt = as_template(read_messages(messages), dialect)

    def encode() -> list[int]:
        checked = GenerationConfig(tools=tools or None).tools
        return source.encode(prompt, None, None if checked is None else str(checked))

    try:
        ids = await asyncio.to_thread(encode)
    except MarsError as error:
        param = "tools" if error.field == "tools" else "messages" if text is None else "content"
        raise Refused.of(error, param) from None
    return {"tokens": ids, "count": len(ids), "max_model_len": served.context}


async def detokenize(models: Models, body: dict[str, Any]) -> dict[str, Any]:
    fields = BodyFields(body)
    served, _ = models.find(fields.text("model"))
    ids = fields.list("tokens")
    fields.finish()
    size, source = served.session.bundle.manifest.model.vocab_size, _text(served)
    if ids is None or not all(is_integer(i, 0) and i < size for i in ids):
        raise wrong("tokens", f"a list of integers of 0 to {size - 1}", ids)
    try:
        text = await asyncio.to_thread(source.spelled, ids)
    except MarsError as error:
        raise Refused.of(error, "tokens") from None
    return {"content": text, "prompt": text}


def _text(served: Served) -> Text:
    if served.session.text is None:
        raise Refused(400, f"{served.name} has no tokenizer; send token ids", param="model")
    return served.session.text
