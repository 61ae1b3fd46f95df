"""Both loops over given rows: events of each forward, until all rows have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mars_export.runtime.decode.backend import Backend
from mars_export.runtime.decode.blocks import BlockSchedule, check_blocks
from mars_export.runtime.decode.pace.policy import Policy
from mars_export.runtime.decode.row import Accepted, Row
from mars_export.runtime.decode.schedule import Limits, Schedule, run


def decode(
    backend: Backend, rows: Sequence[Row], block: int, mask_id: int, policy: Policy | None = None
) -> Iterator[list[Accepted]]:
    limits = Limits.of_rows(max(1, len(rows)))
    yield from run(Schedule(backend, block, mask_id, limits, policy), rows)


def decode_blocks(
    backend: Backend, rows: Sequence[Row], block: int, mask_id: int, cache_block: int
) -> Iterator[list[Accepted]]:
    check_blocks(backend, rows, cache_block)
    limits = Limits.of_rows(max(1, len(rows)))
    yield from run(BlockSchedule(backend, block, mask_id, limits, cache_block), rows)
