"""Admitting a request: its settings, its level, its places in the batcher."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ...batcher.request import Request
from ...bundle.turns import SWITCH
from ...decode.config import GenerationConfig, repeatable
from ...errors import MarsError
from ...session.session import Session
from ...text.tokenizer import Message
from ...text.toolcalls import dialect_of
from ..ask.messages import as_template
from ..ask.request import Ask
from ..models.adaptive import EXACT
from ..models.models import Models
from ..models.open_model import OpenModel
from ..options import ServeOptions
from ..refusals import Refused


@dataclass(slots=True)
class Admitted:
    """The batcher's requests for one ask, in the order of its choices, and their settings."""

    ask: Ask
    model: OpenModel
    config: GenerationConfig
    profile: str | None
    level: str | None
    requests: list[Request]

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.ask.model or self.model.name

    def close(self) -> None:
        """Cancel running requests, which end before their next step, and let the model be closed."""
        _end(self.model, self.requests)


def _end(model: OpenModel, requests: list[Request]) -> None:
    for request in requests:
        request.cancel()
    model.users -= 1


async def admit(models: Models, options: ServeOptions, ask: Ask, client: Hashable) -> Admitted:
    """Open the model if it is closed, and submit the requests of an ask. Raises Refused; no request runs
    then.
    """
    model, profile = await models.take(ask.model)
    requests: list[Request] = []
    try:
        batcher, session = model.running(), model.session
        if profile is not None and ask.knobs:
            name = sorted(ask.knobs)[0]
            raise Refused(
                400, f"the model's name has a profile, which sets {name}; use one of them", param=name
            )
        profile = profile or ask.profile
        # In a thread, because checking a large schema would block the event loop.
        config, level = await asyncio.to_thread(_config, model, options, ask, profile)
        for prompt in ask.prompts:
            for i in range(ask.n):
                request = await batcher.asubmit(
                    prompt if ask.kind == "text" else _messages(session, prompt),
                    config.with_values(seed=(config.seed + i) % 2**64) if i else config,
                    deadline=options.request_timeout,
                    client=client,
                    executor=model.compiling if config.is_structured else None,
                    tools=None if ask.tools is None or ask.tools.must else json.dumps(ask.tools.functions),
                    template=_template(session, ask),
                )
                requests.append(request)
    except BaseException as error:
        _end(model, requests)
        if not isinstance(error, MarsError):
            raise
        model.running()  # raises another error if the server is closing
        raise _refused(error, ask) from None
    return Admitted(ask, model, config, profile or (level if level != EXACT else None), level, requests)


def _config(
    model: OpenModel, options: ServeOptions, ask: Ask, profile: str | None
) -> tuple[GenerationConfig, str | None]:
    """The settings, and the level of load if it chose among them. Raises MarsError unless the bundle and the
    limits allow them.
    """
    settings: dict[str, Any] = {"max_new_tokens": model.default_tokens, **ask.settings}
    if ask.tools is not None:
        GenerationConfig(tools=ask.tools.functions)  # raises for invalid tools
        if ask.tools.must:
            settings["tools"] = ask.tools.functions
    if ask.settings.get("temperature") and not ask.has_seed:
        settings["seed"] = secrets.randbits(63)
    config, level = GenerationConfig(**settings), None
    if profile is not None:
        try:
            config = config.with_profile(model.session.profile(profile))
        except MarsError as error:
            raise Refused.of(error, "profile") from None
    elif model.adaptive is not None and not ask.knobs:
        level = EXACT
        # Profiles are calibrated on greedy, unstructured answers.
        if not config.host_chooses and not config.is_structured:
            level = model.adaptive.names[model.choose_level()]
            config = config.with_profile(model.levels[level])
    config = repeatable(config, has_window="window" in ask.knobs, has_seed=ask.has_seed)
    if ask.logprobs and config.metric != "probability":
        raise Refused(400, f"logprobs are of probabilities, not of the {config.metric}", param="logprobs")
    model.session.check(config)
    options.limits.check(config)
    return config, level


def _template(session: Session, ask: Ask) -> Mapping[str, Any]:
    """The variables of the chat template that a request sets. Raises Refused for thinking that the bundle
    cannot switch.
    """
    info = session.bundle.manifest.text
    if ask.thinking is None or info is None or session.text is None:
        return ask.template
    if SWITCH in session.text.settings:
        return {SWITCH: ask.thinking, **ask.template}
    if ask.thinking == (info.thinking is not None):
        return ask.template
    how = "has no marks for thinking" if ask.thinking else f"has no variable {SWITCH}, so it always thinks"
    raise Refused(
        400,
        f"the chat template of this model {how}",
        param=ask.names["thinking"],
        code="unsupported_by_model",
    )


async def count_tokens(models: Models, ask: Ask) -> int:
    """The number of tokens of a chat's prompt. Raises Refused."""
    model, _ = await models.take(ask.model)
    try:
        session = model.session
        tools = None if ask.tools is None else str(GenerationConfig(tools=ask.tools.functions).tools)
        messages, template = _messages(session, ask.prompts[0]), _template(session, ask)
        return len(await asyncio.to_thread(session.encode, messages, None, tools, template))
    except MarsError as error:
        raise _refused(error, ask) from None
    finally:
        model.users -= 1


def _messages(session: Session, messages: list[dict[str, Any]]) -> list[Message]:
    text = session.bundle.manifest.text
    return as_template(messages, dialect_of(text.chat_template if text is not None else None))


def _refused(error: MarsError, ask: Ask) -> Refused:
    """The response to an error. An error without a field is about the prompt."""
    name = error.field
    if name in (None, "prompt"):
        name = "prompts" if ask.kind == "text" else "messages"
    return Refused.of(error, ask.names.get(str(name), name))
