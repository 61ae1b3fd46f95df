"""The loop over given sequences: events of each forward, until all sequences have ended."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator

from mars_export.runtime.decode.backend import Backend
from mars_export.runtime.decode.event import Event
from mars_export.runtime.decode.limits import Limits
from mars_export.runtime.decode.schedule import Schedule, run
from mars_export.runtime.decode.sequence import Sequence
from mars_export.runtime.decode.speculation.cost import Cost, LearnedCost
from mars_export.runtime.decode.speculation.planner import StepPlanner


def decode(
    backend: Backend,
    seqs: abc.Sequence[Sequence],
    block: int,
    mask_id: int,
    planner: StepPlanner | None = None,
    cache_block: int = 1,
) -> Iterator[list[Event]]:
    limits = Limits.of_rows(max(1, len(seqs)), cache_block)
    yield from run(Schedule(backend, block, mask_id, limits, planner), seqs)


def planner_of(cost: Cost) -> StepPlanner:
    """A planner to which a step costs just that."""
    learned_cost = LearnedCost(cost)
    learned_cost.fix(cost)
    return StepPlanner(learned_cost)


def outcomes(schedule: Schedule) -> list[Event]:
    """What one step gives."""
    return [each for accepted in schedule.step() for each in accepted]


class NoText:
    """The stream of an answer without text. `push` tells whether a token ends the answer."""

    text, stop_string = "", None

    def __init__(self, push: Callable[[int], bool]) -> None:
        self.push = push

    def read(self) -> str:
        return ""

    finish = read

    def complete(self) -> None:
        pass

    def take_token_texts(self, num_tokens: int) -> tuple[str, ...]:
        return ("",) * num_tokens
