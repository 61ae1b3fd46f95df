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
from ..models.model import Lease
from ..models.models import Models
from ..models.served import Served
from ..options import ServeOptions
from ..refusals import Refused


@dataclass(slots=True)
class Admitted:
    """The batcher's requests for one ask, in the order of its choices, and their settings."""

    ask: Ask
    lease: Lease
    config: GenerationConfig
    profile: str | None
    level: str | None
    requests: list[Request]

    @property
    def served(self) -> Served:
        return self.lease.served

    @property
    def model(self) -> str:
        """The model name in answers."""
        named = self.ask.model is not None and self.ask.model != self.served.name
        return str(self.ask.model) if named else self.served.name

    def cancel(self) -> None:
        """Cancel running requests, which end before their next step, and let the model be closed."""
        for request in self.requests:
            request.cancel()
            self.served.left(request)
        self.lease.release()


async def admit(models: Models, options: ServeOptions, ask: Ask, client: Hashable) -> Admitted:
    """Open the model if it is closed, and submit the requests of an ask. Raises Refused; no request runs
    then.
    """
    lease = await models.take(ask.model)
    try:
        return await _submitted(lease, options, ask, client)
    except BaseException:
        lease.release()
        raise


async def _submitted(lease: Lease, options: ServeOptions, ask: Ask, client: Hashable) -> Admitted:
    served, profile = lease.served, lease.profile
    batcher = served.running()
    if profile is not None and ask.knobs:
        name = sorted(ask.knobs)[0]
        raise Refused(400, f"the model's name has a profile, which sets {name}; use one of them", param=name)
    if ask.is_structured:  # checking a large schema would block the event loop
        config, level = await asyncio.to_thread(_config, served, ask, profile or ask.profile)
    else:
        config, level = _config(served, ask, profile or ask.profile)
    _check(served.session, options, ask, config)
    profile = profile or ask.profile or (level if level != EXACT else None)
    admitted = Admitted(ask, lease, config, profile, level, [])
    try:
        for prompt, number in ((prompt, i) for prompt in ask.prompts for i in range(ask.n)):
            seeded = config.with_values(seed=(config.seed + number) % 2**64) if number else config
            turn = served.compiling.of(client) if config.is_structured else None
            request = await batcher.asubmit(
                prompt if ask.kind == "text" else _messages(served.session, prompt),
                seeded,
                deadline=options.request_timeout,
                client=client,
                turn=turn,
                tools=None if ask.tools is None or ask.tools.must else json.dumps(ask.tools.functions),
                template=_template(served.session, ask),
            )
            admitted.requests.append(request)
            served.entered(request)
    except MarsError as error:
        admitted.cancel()
        served.running()  # raises another error if the server is closing
        raise _refused(error, ask) from None
    except BaseException:
        admitted.cancel()
        raise
    return admitted


def _config(served: Served, ask: Ask, profile: str | None) -> tuple[GenerationConfig, str | None]:
    """The settings, and the level of load if it chose among them."""
    session = served.session
    settings: dict[str, Any] = {"max_new_tokens": served.default_tokens, **ask.settings}
    if ask.tools is not None and ask.tools.must:
        settings["tools"] = ask.tools.functions
    if ask.settings.get("temperature") and not ask.has_seed:
        settings["seed"] = secrets.randbits(63)
    try:
        if ask.tools is not None:
            GenerationConfig(tools=ask.tools.functions)  # raises for invalid tools
        config = GenerationConfig(**settings)
    except MarsError as error:
        raise _refused(error, ask) from None
    level = None
    if profile is not None:
        try:
            config = config.with_profile(session.profile(profile))
        except MarsError as error:
            raise Refused.of(error, "profile") from None
    elif served.adaptive is not None and not ask.knobs:
        level = EXACT
        # Profiles are calibrated on greedy, unstructured answers.
        if not config.host_chooses and not config.is_structured:
            level = served.adaptive.names[served.choose_level()]
            config = config.with_profile(served.levels[level])
    return repeatable(config, has_window="window" in ask.knobs, has_seed=ask.has_seed), level


def _check(session: Session, options: ServeOptions, ask: Ask, config: GenerationConfig) -> None:
    """Raise Refused unless the bundle and the limits allow the settings."""
    if ask.logprobs and config.metric != "probability":
        raise Refused(400, f"logprobs are of probabilities, not of the {config.metric}", param="logprobs")
    try:
        session.check(config)
        options.limits.check(config)
    except MarsError as error:
        raise _refused(error, ask) from None


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
    with await models.take(ask.model) as lease:
        session = lease.served.session
        messages = _messages(session, ask.prompts[0])
        try:
            checked = None if ask.tools is None else GenerationConfig(tools=ask.tools.functions).tools
            tools = None if checked is None else str(checked)
            ids = await asyncio.to_thread(session.encode, messages, None, tools, _template(session, ask))
            return len(ids)
        except MarsError as error:
            raise _refused(error, ask) from None


def _messages(session: Session, messages: list[dict[str, Any]]) -> list[Message]:
    text = session.bundle.manifest.text
    return as_template(messages, dialect_of(text.chat_template if text is not None else None))


def _refused(error: MarsError, ask: Ask) -> Refused:
    """The response to an error. An error without a field is about the prompt."""
    name = error.field
    if name in (None, "prompt"):
        name = "prompts" if ask.kind == "text" else "messages"
    return Refused.of(error, ask.names.get(str(name), name))
