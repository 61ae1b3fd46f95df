"""From what is asked to requests that run: settings, level, places. Knows no HTTP."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from ...batcher.request import Request
from ...decode.config import GenerationConfig, repeatable
from ...errors import MarsError
from ...session.session import Session
from ...text.tokenizer import Message
from ...text.toolcalls import dialect_of
from ..adaptive import EXACT
from ..ask.messages import as_template
from ..ask.request import Ask
from ..models import Models, Served
from ..options import ServeOptions
from ..refusals import Refused

PARAMS = {"max_new_tokens": "max_tokens", "eos_ids": "ignore_eos", "schema": "response_format"}
"""Fields of a request that set a config's of another name."""


@dataclass(slots=True)
class Admitted:
    """The requests of one ask, in the order of its choices, and what they were given."""

    ask: Ask
    served: Served
    config: GenerationConfig
    profile: str | None
    level: str | None
    requests: list[Request]

    @property
    def model(self) -> str:
        """The name that answers carry."""
        named = self.ask.model is not None and self.ask.model != self.served.name
        return str(self.ask.model) if named else self.served.name

    def cancel(self) -> None:
        """Those that still run end before their next step."""
        for request in self.requests:
            request.cancel()
            self.served.left(request)


async def admit(models: Models, options: ServeOptions, ask: Ask, client: Hashable) -> Admitted:
    """Give the ask its places. Raises Refused, and leaves nothing behind then."""
    served, profile = models.find(ask.model)
    batcher = served.running()
    if profile is not None and ask.given:
        named = sorted(ask.given)[0]
        raise Refused(400, f"the model's name has a profile, which sets {named}; give one", param=named)
    if ask.is_structured:  # a schema of a megabyte is looked through elsewhere: nobody waits for it here
        config, level = await asyncio.to_thread(_config, served, ask, profile or ask.profile)
    else:
        config, level = _config(served, ask, profile or ask.profile)
    _check(served.session, options, ask, config)
    profile = profile or ask.profile or (level if level != EXACT else None)
    admitted = Admitted(ask, served, config, profile, level, [])
    try:
        for prompt, number in ((prompt, i) for prompt in ask.prompts for i in range(ask.n)):
            own = config.with_values(seed=(config.seed + number) % 2**64) if number else config
            given = await _prompt(served.session, ask, prompt, options.limits.max_prompt_tokens)
            turn = served.compiling.of(client) if config.is_structured else None
            request = await batcher.asubmit(
                given, own, deadline=options.request_timeout, client=client, turn=turn
            )
            admitted.requests.append(request)
            served.entered(request)
    except MarsError as error:
        admitted.cancel()
        served.running()  # or it was closed meanwhile, which is nobody's mistake
        raise _refused(error, ask) from None
    except BaseException:
        admitted.cancel()
        raise
    return admitted


def _config(served: Served, ask: Ask, profile: str | None) -> tuple[GenerationConfig, str | None]:
    """The settings, and the level of load that chose among them."""
    session = served.session
    most = served.default_tokens if ask.max_tokens is None else ask.max_tokens
    settings: dict[str, Any] = {"max_new_tokens": most, **ask.settings}
    if ask.tools is not None and ask.tools.must:
        settings["tools"] = ask.tools.functions
    if ask.settings.get("temperature") and not ask.has_seed:
        settings["seed"] = secrets.randbits(63)
    try:
        if ask.tools is not None:
            GenerationConfig(tools=ask.tools.functions)  # what a model is told of must be tools, too
        config = GenerationConfig(**settings)
    except MarsError as error:
        raise _refused(error, ask) from None
    level = None
    if profile is not None:
        try:
            chosen = session.profile(profile)
        except MarsError as error:
            raise Refused.of(error, "profile") from None
        config = _with_knob(config, chosen)
    elif served.adaptive is not None and not ask.given:
        level = EXACT
        # A bound that was tested with the likeliest tokens says nothing of others.
        if config.is_greedy and not config.needs_logits and not config.is_structured:
            level = served.adaptive.names[served.level]
            config = _with_knob(config, served.levels[level])
    return repeatable(config, has_window="window" in ask.given, has_seed=ask.has_seed), level


def _with_knob(config: GenerationConfig, chosen: GenerationConfig) -> GenerationConfig:
    if chosen.exact:
        return config
    return config.with_values(tau=chosen.tau, metric=chosen.metric, window=chosen.window)


def _check(session: Session, options: ServeOptions, ask: Ask, config: GenerationConfig) -> None:
    """Whether this bundle and these limits give what is asked for."""
    if ask.logprobs and config.metric != "probability":
        raise Refused(400, f"logprobs are of probabilities, not of the {config.metric}", param="logprobs")
    try:
        session.check(config)
        options.limits.check(config)
    except MarsError as error:
        raise _refused(error, ask) from None


async def _prompt(session: Session, ask: Ask, prompt: Any, most: int | None) -> Any:
    """What a batcher takes: token ids where the model is told of tools that it need not call."""
    if ask.kind == "text":
        return prompt
    text = session.bundle.manifest.text
    messages: list[Message] = as_template(
        prompt, dialect_of(text.chat_template if text is not None else None)
    )
    if ask.tools is None or ask.tools.must:
        return messages
    tools = json.dumps(ask.tools.functions)
    return await asyncio.to_thread(session.encode, messages, most, tools)


def _refused(error: MarsError, ask: Ask) -> Refused:
    """What names no field is about the prompt."""
    if error.field in (None, "prompt"):
        return Refused.of(error, "messages" if ask.kind == "chat" else "prompt")
    return Refused.of(error, PARAMS.get(str(error.field), error.field))
