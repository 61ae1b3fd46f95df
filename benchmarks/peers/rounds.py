"""Interleaved rounds: every system answers a row before the next row, so that a change of the machine's load
affects all equally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from peers.catalog import Entry
from peers.measure import Round
from peers.process import PeerError
from peers.protocol import Reply, Request
from peers.rows import Prompts


class Answers(Protocol):
    """What a round needs of a process."""

    def answer(self, request: Request) -> Reply: ...


Tell = Callable[[str], None]


def run_round(
    entries: Sequence[Entry], processes: Mapping[str, Answers], prompts: Prompts, start: int, tell: Tell
) -> tuple[dict[str, Round], dict[str, str]]:
    """One pass over the rows: the rounds by label, and why an entry failed; that one is asked no more.

    Entry number `start` (modulo their count) begins, so that no one always comes after the same other.
    """
    replies: dict[str, list[Reply]] = {entry.label: [] for entry in entries}
    failed: dict[str, str] = {}
    batch = entries[0].batch
    order = [*entries[start % len(entries) :], *entries[: start % len(entries)]]
    for number, request in enumerate(requests(prompts, batch)):
        for entry in order:
            if entry.label in failed:
                continue
            tell(f"rows {number * batch + 1}-{number * batch + len(request.prompts)}: {entry.label}")
            try:
                reply = processes[entry.program].answer(
                    Request(request.prompts, request.limits, request.eos, request.mask, dict(entry.settings))
                )
            except PeerError as error:
                failed[entry.label] = str(error)
            else:
                replies[entry.label].append(reply)
    return {label: Round.of(found) for label, found in replies.items() if label not in failed}, failed


def requests(prompts: Prompts, batch: int) -> Iterator[Request]:
    """The rows in groups of `batch`; the last group may be smaller."""
    for at in range(0, len(prompts.ids), batch):
        yield Request(
            [list(ids) for ids in prompts.ids[at : at + batch]],
            prompts.limits(at, at + batch),
            list(prompts.eos),
            prompts.mask,
            {},
        )
