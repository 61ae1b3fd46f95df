"""A few answers with the runs that were accepted together, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime import GenerationConfig, Session
from ..tasks.tasks import Task


@dataclass(frozen=True, slots=True)
class Run:
    """What one forward added: its text, and how many tokens that was."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Example:
    """One row decoded at a setting. `prompt` is the last message, or the text that was continued."""

    prompt: str
    tau: float
    runs: tuple[Run, ...]

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)


def decode_examples(session: Session, tasks: Sequence[Task], config: GenerationConfig) -> tuple[Example, ...]:
    """Decode each task step by step and keep the runs."""
    return tuple(_example(session, task, config) for task in tasks)


def _example(session: Session, task: Task, config: GenerationConfig) -> Example:
    prompt = task.text if task.text is not None else task.messages[-1].content
    stream = session.stream(task.prompt, config.with_values(max_new_tokens=task.max_new_tokens))
    runs = tuple(Run(event.text, len(event.token_ids)) for event in stream if event.token_ids)
    return Example(prompt, config.tau, runs)
