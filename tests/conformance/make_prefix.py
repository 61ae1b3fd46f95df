"""Writes prefix.json: what a store of KV entries matches, saves and evicts, in every implementation.

`PYTHONPATH=tests python tests/conformance/make_prefix.py`, then read the diff. Expected values come from the
slow simulation here: lists that are searched from end to end. A case has one store: `budget` bytes,
`entry_bytes` for each token, `reproducible_slots` of its device (null: entries depend on the step), and
`stored`, the bundle's prefixes with the `piece` that they belong to (null for reproducible devices). Requests
come one after the other:

    piece, salt, marks   as the row's; `marks` are lengths of the prompt that are entries of their own
    reads                [slots, entries that became final, whether it is a whole piece], of the prompt
    answer, steps        the answer's ids and [slots, entries that became final]; the row leaves behind them

The row gives its entries after the reads, and again after the steps if it has any. `cached` is what it began
with, `stored` whether a prefix of the bundle gave that. `entries`: what is there when the row has left, the
least recently used first: [index of a request whose prompt and answer begin with it, length, fixed], of that
request's salt, and of its piece where `reproducible_slots` is null.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from support.makers import write
from support.paths import CONFORMANCE

Ids = tuple[int, ...]


class Entry:
    def __init__(self, salt: str, block_size: int, ids: Ids, fixed: bool, request: int) -> None:
        self.salt, self.block_size, self.ids, self.fixed, self.request = salt, block_size, ids, fixed, request


class Store:
    """Everything by looking at everything; the first entry is the least recently used."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.entries: list[Entry] = []
        self.evicted = self.saved = 0

    def num_bytes(self) -> int:
        return sum(len(e.ids) for e in self.entries) * int(self.case["entry_bytes"])

    def touch(self, entry: Entry) -> None:
        self.entries = [e for e in self.entries if e is not entry] + [entry]

    def match(self, salt: str, block_size: int, ids: Ids, marks: list[int]) -> int:
        mine = [e for e in self.entries if (e.salt, e.block_size) == (salt, block_size)]
        own = max((common(e.ids, ids) for e in mine), default=0)
        if not own:
            return 0
        best = [e for e in mine if common(e.ids, ids) == own]
        exact = [e for e in best if len(e.ids) == own]
        behind = [e for e in best if e.ids >= ids]
        # The very beginning; else the next in the order of ids, else the one before.
        order = exact or sorted(behind, key=lambda e: e.ids) or sorted(best, key=lambda e: e.ids)[::-1]
        self.touch(order[0])
        for mark in marks:
            for e in mine:
                if e.ids == ids[:mark]:
                    self.touch(e)
        return own

    def save(self, salt: str, block_size: int, ids: Ids, fixed: bool, request: int) -> None:
        size = len(ids) * int(self.case["entry_bytes"])
        if size > self.case["budget"]:
            return
        mine = [e for e in self.entries if (e.salt, e.block_size) == (salt, block_size)]
        if fixed:
            same = [e for e in mine if e.ids == ids]
        else:
            same = sorted((e for e in mine if e.ids[: len(ids)] == ids), key=lambda e: e.ids)[:1]
        if same:
            same[0].fixed = same[0].fixed or fixed
            self.touch(same[0])
            return
        gone = [e for e in mine if not e.fixed and ids[: len(e.ids)] == e.ids]
        self.entries = [e for e in self.entries if all(e is not g for g in gone)]
        while self.entries and self.num_bytes() + size > self.case["budget"]:
            del self.entries[0]
            self.evicted += 1
        self.entries.append(Entry(salt, block_size, ids, fixed, request))
        self.saved += 1


def common(one: Ids, other: Ids) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


class Request:
    """One row against the store; what it asks for is drawn as it goes, what is expected is noted."""

    def __init__(self, store: Store, number: int, prompt: Ids, draw: random.Random) -> None:
        self.store, self.number, self.prompt, self.draw = store, number, prompt, draw
        self.reproducible_slots = store.case["reproducible_slots"]
        self.salt = draw.choice(["", "", "", "b"])
        self.piece = draw.choice(store.case["pieces"])
        self.block_size = self.piece if self.reproducible_slots is None else 1
        mark = store.case["mark"]
        self.marks = [min(mark, len(prompt))] if mark else []
        self.num_reproducible = 0
        self.takes_part = self.reproducible_slots is None or self.piece >= self.reproducible_slots

    def lookup(self) -> int:
        if not self.takes_part:
            return 0
        last = (len(self.prompt) - 1) // self.piece * self.piece
        most = (
            last if self.reproducible_slots is None else max(last, len(self.prompt) - self.reproducible_slots)
        )
        length = self.store.match(self.salt, self.block_size, self.prompt[:most], self.floored())
        if self.reproducible_slots is None:
            length -= length % self.piece
        elif length and length < last:
            length -= max(0, self.reproducible_slots - (self.piece - length % self.piece))
        self.num_reproducible = max(0, length)
        return self.num_reproducible

    def floored(self) -> list[int]:
        return [mark // self.block_size * self.block_size for mark in self.marks]

    def saw(self, before: int, slots: int, moved: int, is_piece: bool) -> None:
        if before == self.num_reproducible and (
            is_piece if self.reproducible_slots is None else slots >= self.reproducible_slots
        ):
            self.num_reproducible = before + moved

    def keep(self, tokens: Ids) -> None:
        if not self.takes_part:
            return
        for length, fixed in [*((mark, True) for mark in self.floored()), (self.num_reproducible, False)]:
            if 0 < length <= self.num_reproducible:
                self.store.save(self.salt, self.block_size, tokens[:length], fixed, self.number)

    def run(self) -> dict[str, Any]:
        draw, one_token = self.draw, self.draw.random() < 0.2
        cached = self.lookup()
        cursor, reads, steps = cached, [], []
        cut = draw.randint(0, 3) if draw.random() < 0.15 else None
        while cursor < len(self.prompt) and (cut is None or len(reads) < cut):
            piece = min(self.piece - cursor % self.piece, len(self.prompt) - cursor)
            whole = cursor + piece < len(self.prompt)
            slots = piece if whole or one_token else piece + draw.randint(0, 4)
            reads.append([slots, piece, whole])
            self.saw(cursor, slots, piece, whole)
            cursor += piece
        self.keep(self.prompt)
        answer = tuple(draw.randint(1, 3) for _ in range(draw.randint(0, 12))) if cut is None else ()
        tokens = self.prompt + answer
        while cursor < len(tokens):
            moved = 1 if one_token else min(draw.randint(1, 4), len(tokens) - cursor)
            slots = moved if one_token else moved + draw.choice([0, 0, 1, 3])
            steps.append([slots, moved])
            self.saw(cursor, slots, moved, is_piece=False)
            cursor += moved
        if steps:
            self.keep(tokens)
        return {
            "salt": self.salt, "piece": self.piece, "marks": self.marks, "prompt": self.prompt,
            "reads": reads,
            "answer": answer, "steps": steps, "cached": cached,
            "entries": [[e.request, len(e.ids), e.fixed] for e in self.store.entries],
            "evicted": self.store.evicted, "saved": self.store.saved,
        }  # fmt: skip


def cases() -> list[dict[str, Any]]:
    draw = random.Random(1717)
    made = []
    for i in range(40):
        reproducible_slots = draw.choice([None, 1, 2, 2, 3])
        pieces = draw.choice([[8], [8], [4, 8], [1, 2, 5], [16]])
        histories: list[Ids] = [tuple(draw.randint(1, 3) for _ in range(draw.randint(5, 20)))]
        case: dict[str, Any] = {
            "name": f"prefix {i}", "budget": draw.choice([60, 200, 500, 1000, 10**6]), "entry_bytes": 5,
            "reproducible_slots": reproducible_slots, "pieces": pieces, "mark": draw.choice([0, 3, 8]),
        }  # fmt: skip
        store, requests = Store(case), []
        for number in range(draw.choice([6, 15, 30])):
            history = draw.choice(histories)
            cut = draw.choice([len(history), len(history), draw.randint(0, len(history))])
            more = tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 9)))
            request = Request(store, number, history[:cut] + more, draw).run()
            requests.append(request)
            histories = [*histories, (*request["prompt"], *request["answer"])][-8:]
        made.append({**case, "requests": requests})
    return made


def files() -> dict[Path, str]:
    lines = []
    for case in cases():
        requests = ",\n  ".join(json.dumps(r, separators=(",", ":")) for r in case.pop("requests"))
        lines.append(f'{json.dumps(case)[:-1]}, "requests": [\n  {requests}]}}')
    return {CONFORMANCE / "prefix.json": "[\n" + ",\n".join(lines) + "\n]\n"}


if __name__ == "__main__":
    write(files())
