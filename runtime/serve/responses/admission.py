"""Admitting a request: its settings, its places in the batcher."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ...batcher.request import Items, Request
from ...bundle.turns import SWITCH
from ...decode.config import GenerationConfig
from ...decode.limits import Limits
from ...errors import MarsError
from ...session.session import Session
from ...text.prompts import Chat, Prompt
from ..api_error import ApiError
from ..loaded_model import LoadedModel
from ..models import Models
from ..requests.api_request import ApiRequest
from ..requests.fields import as_template


@dataclass(slots=True)
class Admitted:
    """The batcher's requests for one API request, in the order of its choices, and their settings."""

    api_request: ApiRequest
    model: LoadedModel
    config: GenerationConfig
    profile: str | None
    requests: list[Request]

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.api_request.model or self.model.name


async def submit_all(
    models: Models,
    api_request: ApiRequest,
    client: Hashable,
    arrived_at: float,
    timeout: float,
    items: Items,
    cleanup: ExitStack,
) -> Admitted:
    """Submit the requests of `api_request` to the batcher of its model, which fills `items`. They end
    `timeout` seconds after `arrived_at` (perf_counter), or with `cleanup`, which also releases the model.
    Raises ApiError.
    """
    model, profile = await models.take(api_request.model, cleanup)
    try:
        batcher, session = model.running(), model.session
        _check_places(batcher.limits, api_request)
        if profile is not None and api_request.profile is not None:
            raise ApiError(
                400, "the model's name already selects a profile; remove this one", param="profile"
            )
        profile = profile or api_request.profile
        # In a thread, because checking a large schema would block the event loop.
        configs, tools = await asyncio.to_thread(_configs, model, api_request, profile)
        requests: list[Request] = []
        for i, prompt in enumerate(_prompts(session, api_request, tools)):
            for config in configs:
                request = await batcher.asubmit(
                    prompt,
                    # Equal prompts get different samples.
                    config.with_values(seed=(config.seed + i * api_request.n) % 2**64),
                    arrived_at=arrived_at,
                    deadline=timeout,
                    client=client,
                    executor=model.compiling if config.is_structured else None,
                )
                cleanup.callback(request.cancel)
                request.attach(items)
                requests.append(request)
                prompt = prompt.as_ids(request.prompt) if isinstance(prompt, Chat) else request.prompt
    except MarsError as error:
        model.running()  # raises another error if the server is closing
        raise _refused(error, api_request) from None
    return Admitted(api_request, model, configs[0], profile, requests)


def _check_places(limits: Limits, api_request: ApiRequest) -> None:
    """Refuse a request with more answers than one client can ever have in the batcher."""
    number, places = len(api_request.prompts) * api_request.n, limits.max_answers
    if number > places:
        raise ApiError(
            400,
            f"{number} answers are requested, and this server accepts at most {places} per client;"
            " request fewer",
            param="n" if api_request.n > 1 else api_request.names["prompts"],
            code="limit_exceeded",
        )


def _configs(
    model: LoadedModel, api_request: ApiRequest, profile: str | None
) -> tuple[list[GenerationConfig], str | None]:
    """The settings of the `n` answers to a prompt, and the text of the tools. Raises MarsError."""
    settings: dict[str, Any] = {"max_new_tokens": model.default_tokens, **api_request.settings}
    tools = _tools(api_request)
    if api_request.tools is not None and (api_request.tools.must or "schema" in settings):
        settings["tools"] = tools
    if api_request.settings.get("temperature") and not api_request.has_seed:
        settings["seed"] = secrets.randbits(63)
    config = model.session.config(profile, **settings)
    if api_request.logprobs and config.metric != "probability":
        raise ApiError(400, f"logprobs are of probabilities, not of the {config.metric}", param="logprobs")
    seeds = [(config.seed + i) % 2**64 for i in range(1, api_request.n)]
    return [config, *(config.with_values(seed=seed) for seed in seeds)], tools


def _tools(api_request: ApiRequest) -> str | None:
    """The functions that the prompt lists, as JSON text. Raises SessionError for invalid ones."""
    tools = api_request.tools
    return None if tools is None else str(GenerationConfig(tools=tools.functions).tools)


def _template(session: Session, api_request: ApiRequest) -> Mapping[str, Any]:
    """The variables of the chat template that a request sets. Raises ApiError for thinking that the bundle
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
    raise ApiError(
        400,
        f"the chat template of this model {how}",
        param=api_request.names["thinking"],
        code="unsupported_by_model",
    )


async def count_tokens(models: Models, api_request: ApiRequest) -> int:
    """The number of tokens of a chat's prompt. Raises ApiError."""
    with ExitStack() as cleanup:
        model, _ = await models.take(api_request.model, cleanup)
        try:
            [prompt] = _prompts(model.session, api_request, _tools(api_request))
            return len(await asyncio.to_thread(model.session.encode, prompt))
        except MarsError as error:
            raise _refused(error, api_request) from None


def _prompts(session: Session, api_request: ApiRequest, tools: str | None) -> list[Prompt]:
    """The prompts as the session takes them: texts, token ids or chats. Raises ApiError."""
    if api_request.kind == "text":
        return api_request.prompts
    template = _template(session, api_request)
    return [Chat(as_template(messages), tools, template) for messages in api_request.prompts]


def _refused(error: MarsError, api_request: ApiRequest) -> ApiError:
    """The response to an error. An error without a field is about the prompt."""
    name = error.field
    if name in (None, "prompt"):
        name = "prompts" if api_request.kind == "text" else "messages"
    return ApiError.from_error(error, api_request.names.get(str(name), name))
