"""prefix.json: what is matched, saved and evicted, request by request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake import FakeCache

from mars_export.runtime.decode.prefix import PrefixCache

CASES = json.loads((Path(__file__).parents[2] / "conformance" / "prefix.json").read_text())


class Small(FakeCache):
    """A row whose entries are the tokens, of as many bytes as a case says."""

    entry_bytes = 0  # type: ignore[assignment]

    def __init__(self, entry_bytes: int) -> None:
        super().__init__(1)
        self.entry_bytes = entry_bytes  # type: ignore[misc]


def held(store: PrefixCache) -> list[tuple[str, int, tuple[int, ...], bool]]:
    entries = store._entries.values()
    assert all(e.saved.data.tolist() == np.frombuffer(e.key, ">u4").tolist() for e in entries)
    return [(*e.group, tuple(e.saved.data.tolist()), e.fixed) for e in entries]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_request_finds_and_leaves_what_it_should(case: dict[str, Any]) -> None:
    store = PrefixCache(case["budget"], case["reproducible_slots"])
    for request in case["requests"]:
        prompt, tokens = request["prompt"], request["prompt"] + request["answer"]
        cache, prefix_handle = Small(case["entry_bytes"]), store.handle(request["salt"], request["marks"])
        assert prefix_handle is not None
        cursor = num_reproducible = prefix_handle.lookup(cache, 0, prompt, request["piece"], 10**6)
        least = case["reproducible_slots"]
        assert cursor == request["cached"]
        assert cache.entries[0, :cursor].tolist() == prompt[:cursor]
        steps = [(slots, moved, False) for slots, moved in request["steps"]]
        for i, (slots, moved, is_piece) in enumerate([*request["reads"], *steps]):
            if i == len(request["reads"]):
                prefix_handle.store(cache, 0, prompt, num_reproducible)
            cache.reserve(cursor + slots, [cursor])
            cache.entries[0, cursor : cursor + moved] = tokens[cursor : cursor + moved]
            if cursor == num_reproducible and (is_piece if least is None else slots >= least):
                num_reproducible += moved
            cursor += moved
        prefix_handle.store(cache, 0, tokens if steps else prompt, num_reproducible)
        wanted = []
        for number, length, fixed in request["entries"]:
            of = case["requests"][number]
            block_size = of["piece"] if case["reproducible_slots"] is None else 1
            wanted.append((of["salt"], block_size, tuple((of["prompt"] + of["answer"])[:length]), fixed))
        assert held(store) == wanted
        stats = store.stats
        assert (stats.evicted, stats.saved, stats.failed) == (request["evicted"], request["saved"], 0)
        assert stats.num_bytes == case["entry_bytes"] * sum(len(ids) for _, _, ids, _ in wanted)
