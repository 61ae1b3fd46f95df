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
from ..models.adaptive import EXACT
from ..models.models import Models
from ..models.open_model import OpenModel
from ..options import ServeOptions
from ..refusals import Refused
from ..requests.api_request import ApiRequest
from ..requests.messages import as_template


@dataclass(slots=True)
class Admitted:
    """The batcher's requests for one API request, in the order of its choices, and their settings."""

    api_request: ApiRequest
    model: OpenModel
    config: GenerationConfig
    profile: str | None
    level: str | None
    requests: list[Request]

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.api_request.model or self.model.name

    def close(self) -> None:
        """Cancel running requests, which end before their next step, and let the model be closed."""
        _end(self.model, self.requests)


def _end(model: OpenModel, requests: list[Request]) -> None:
    for request in requests:
        request.cancel()
    model.users -= 1


async def admit(models: Models, options: ServeOptions, api_request: ApiRequest, client: Hashable) -> Admitted:
    """Open the model if it is closed, and submit its requests to the batcher. Raises Refused; no request runs
    then.
    """
    model, profile = await models.take(api_request.model)
    requests: list[Request] = []
    try:
        batcher, session = model.running(), model.session
        if profile is not None and api_request.tau_settings:
            name = sorted(api_request.tau_settings)[0]
            raise Refused(
                400, f"the model's name has a profile, which sets {name}; use one of them", param=name
            )
        profile = profile or api_request.profile
        # In a thread, because checking a large schema would block the event loop.
        config, level = await asyncio.to_thread(_config, model, options, api_request, profile)
        for prompt in api_request.prompts:
            for i in range(api_request.n):
                request = await batcher.asubmit(
                    prompt if api_request.kind == "text" else _messages(session, prompt),
                    config.with_values(seed=(config.seed + i) % 2**64) if i else config,
                    deadline=options.request_timeout,
                    client=client,
                    executor=model.compiling if config.is_structured else None,
                    tools=None
                    if api_request.tools is None or api_request.tools.must
                    else json.dumps(api_request.tools.functions),
                    template=_template(session, api_request),
                )
                requests.append(request)
    except BaseException as error:
        _end(model, requests)
        if not isinstance(error, MarsError):
            raise
        model.running()  # raises another error if the server is closing
        raise _refused(error, api_request) from None
    return Admitted(
        api_request, model, config, profile or (level if level != EXACT else None), level, requests
    )


def _config(
    model: OpenModel, options: ServeOptions, api_request: ApiRequest, profile: str | None
) -> tuple[GenerationConfig, str | None]:
    """The settings, and the level of load if it chose among them. Raises MarsError unless the bundle and the
    limits allow them.
    """
    settings: dict[str, Any] = {"max_new_tokens": model.default_tokens, **api_request.settings}
    if api_request.tools is not None:
        GenerationConfig(tools=api_request.tools.functions)  # raises for invalid tools
        if api_request.tools.must:
            settings["tools"] = api_request.tools.functions
    if api_request.settings.get("temperature") and not api_request.has_seed:
        settings["seed"] = secrets.randbits(63)
    config, level = GenerationConfig(**settings), None
    if profile is not None:
        try:
            config = config.with_profile(model.session.profile(profile))
        except MarsError as error:
            raise Refused.of(error, "profile") from None
    elif model.adaptive is not None and not api_request.tau_settings:
        level = EXACT
        # Profiles are calibrated on greedy, unstructured answers.
        if not config.host_chooses and not config.is_structured:
            level = model.adaptive.names[model.choose_level()]
            config = config.with_profile(model.levels[level])
    config = repeatable(config, has_masks="masks" in api_request.tau_settings, has_seed=api_request.has_seed)
    if api_request.logprobs and config.metric != "probability":
        raise Refused(400, f"logprobs are of probabilities, not of the {config.metric}", param="logprobs")
    model.session.check(config)
    options.limits.check(config)
    return config, level


def _template(session: Session, api_request: ApiRequest) -> Mapping[str, Any]:
    """The variables of the chat template that a request sets. Raises Refused for thinking that the bundle
    cannot switch.
    """
    info = session.bundle.manifest.text
    if api_request.thinking is None or info is None or session.text is None:
        return api_request.template
    if SWITCH in session.text.settings:
        return {SWITCH: api_request.thinking, **api_request.template}
    if api_request.thinking == (info.thinking is not None):
        return api_request.template
    how = (
        "has no marks for thinking"
        if api_request.thinking
        else f"has no variable {SWITCH}, so it always thinks"
    )
    raise Refused(
        400,
        f"the chat template of this model {how}",
        param=api_request.names["thinking"],
        code="unsupported_by_model",
    )


async def count_tokens(models: Models, api_request: ApiRequest) -> int:
    """The number of tokens of a chat's prompt. Raises Refused."""
    model, _ = await models.take(api_request.model)
    try:
        session = model.session
        tools = (
            None
            if api_request.tools is None
            else str(GenerationConfig(tools=api_request.tools.functions).tools)
        )
        messages, template = _messages(session, api_request.prompts[0]), _template(session, api_request)
        return len(await asyncio.to_thread(session.encode, messages, None, tools, template))
    except MarsError as error:
        raise _refused(error, api_request) from None
    finally:
        model.users -= 1


def _messages(session: Session, messages: list[dict[str, Any]]) -> list[Message]:
    text = session.bundle.manifest.text
    return as_template(messages, dialect_of(text.chat_template if text is not None else None))


def _refused(error: MarsError, api_request: ApiRequest) -> Refused:
    """The response to an error. An error without a field is about the prompt."""
    name = error.field
    if name in (None, "prompt"):
        name = "prompts" if api_request.kind == "text" else "messages"
    return Refused.of(error, api_request.names.get(str(name), name))
