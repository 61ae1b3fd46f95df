"""Agents and frameworks against a running server: which of those installed here work with it.

    mars-export serve mars.bundle
    pip install openai-agents 'pydantic-ai-slim[openai,anthropic]' litellm
    python frameworks.py http://localhost:8000

`instructor` needs an environment of its own while it needs an older `openai` than the others.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from pydantic import BaseModel

QUESTION = "Turn on the light in the hall."
KEY = "none"


class Light(BaseModel):
    """Switch a light."""

    room: str
    is_on: bool


def with_instructor(url: str, model: str) -> list[str]:
    """A typed answer by a tool of a chat, by a schema, and by a tool of a response."""
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
        light = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            response_model=Light,
            max_retries=0,
        )
        found.append(f"{mode.name}: {light}")
    return found


def with_pydantic_ai(url: str, model: str) -> list[str]:
    """A typed answer over each of the three protocols."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    models = (
        OpenAIChatModel(model, provider=chat),
        OpenAIResponsesModel(model, provider=chat),
        AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key=KEY)),
    )
    return [f"{type(m).__name__}: {Agent(m, output_type=Light).run_sync(QUESTION).output}" for m in models]


def with_openai_agents(url: str, model: str) -> list[str]:
    """An agent that calls a function and ends with its result, over responses and over chats."""
    import agents
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def switch(room: str, is_on: bool) -> str:
        """Switch a light."""
        return f"the light in {room} is {'on' if is_on else 'off'}"

    async def run(kind: type[agents.Model]) -> str:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        agent = agents.Agent(
            "lights",
            instructions="Switch lights.",
            tools=[switch],
            tool_use_behavior="stop_on_first_tool",
            model=kind(model, client),
            model_settings=agents.ModelSettings(tool_choice="required"),
        )
        return f"{kind.__name__}: {(await agents.Runner.run(agent, QUESTION)).final_output}"

    kinds = (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel)
    return [asyncio.run(run(kind)) for kind in kinds]


def with_litellm(url: str, model: str) -> list[str]:
    """A chat over OpenAI's protocol, streamed, and over Anthropic's."""
    import litellm

    messages = [{"role": "user", "content": QUESTION}]
    asked = {"messages": messages, "api_key": KEY, "max_tokens": 24}
    chunks = litellm.completion(f"openai/{model}", api_base=f"{url}/v1", stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    answer = litellm.completion(f"anthropic/{model}", api_base=url, **asked)
    return [f"openai: {text!r}", f"anthropic: {answer.choices[0].message.content!r}"]


CLIENTS: dict[str, Callable[[str, str], list[str]]] = {
    "instructor": with_instructor,
    "pydantic-ai": with_pydantic_ai,
    "openai-agents": with_openai_agents,
    "litellm": with_litellm,
}


def main() -> None:
    from openai import OpenAI

    url = sys.argv[1].rstrip("/")
    model = OpenAI(base_url=f"{url}/v1", api_key=KEY).models.list().data[0].id
    failed = []
    for name, run in CLIENTS.items():
        try:
            lines = run(url, model)
        except ImportError as error:
            lines = [f"not installed ({error.name})"]
        except Exception as error:  # of any framework
            failed.append(name)
            lines = [f"FAILED: {type(error).__name__}: {error}"]
        print(*(f"{name}: {line}" for line in lines), sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
