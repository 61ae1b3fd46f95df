"""Writes batcher.json: who is read, who decodes and what each row gets at which step, when rows come and go.

`PYTHONPATH=tests python tests/conformance/make_batcher.py`, then read the diff. What a row gets is what it
gets alone: the simulations of make_loops.py (at a tau) and make_exact.py (null). When it gets it comes from
the slow simulation here. In step `arrives` a row is added before the step runs; in step `cancelled`, if that
is not null, it is told to end before it runs. `commits` are [step, tokens], one for each forward that gave
the row something. `client` is whose turn it takes, null for nobody's; `max_rows_per_client`, if that is not
null, is how many rows of one are in the batch at most.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.makers import maker, text_of, write
from support.paths import CONFORMANCE

CAPACITY = 10**6
loops, exact = maker("make_loops"), maker("make_exact")


def alone(case: dict[str, Any], row: dict[str, Any]) -> tuple[list[list[int]], str]:
    """What each forward behind the prompt's pieces gives, and how the row ends."""
    limits = {"block": case["block"], "max_slots": None, "max_outputs": None, "max_capacity": CAPACITY}
    if row["tau"] is None:
        found = exact.simulated(limits, row)
    else:
        masks = None if row["masks"] == "full" else row["masks"]
        found = loops.Simulation(
            {**limits, "cache_block": 1}, {**row, "taus": [row["tau"]], "masks": masks}
        ).result()
    return found["runs"], found["finish_reason"]


class Simulated:
    """One row on its way through a batch."""

    def __init__(self, case: dict[str, Any], row: dict[str, Any]) -> None:
        self.row, self.piece, self.read = row, case["prefill_tokens"], 0
        self.runs, self.reason = alone(case, row)
        self.commits: list[list[Any]] = []
        self.is_cancelled = False

    @property
    def length(self) -> int:
        return len(self.row["prompt"])

    @property
    def pieces(self) -> int:
        """Of the prompt, that are left."""
        return -(-self.length // self.piece) - self.read // self.piece

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or len(self.commits) == len(self.runs)

    def commit(self, step: int) -> None:
        self.commits.append([step, self.runs[len(self.commits)]])


class Batch:
    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.rows = [Simulated(case, row) for row in case["rows"]]
        self.waiting: list[Simulated] = []
        self.readers: list[Simulated] = []  # shorter prompts first
        self.decoders: list[Simulated] = []
        self.turn = 0
        self.order: list[str | None] = []  # clients of rows that wait: whose turn comes first

    def turns(self) -> list[Simulated]:
        """Rows that wait, in the order of their turns: the first of each client, then the second of each."""
        found: list[Simulated] = []
        left = {client: [row for row in self.waiting if row.row["client"] == client] for client in self.order}
        while any(left.values()):
            found += [rows.pop(0) for rows in left.values() if rows]
        return found

    def is_welcome(self, row: Simulated) -> bool:
        most, client = self.case["max_rows_per_client"], row.row["client"]
        if most is None or client is None:
            return True
        return [each.row["client"] for each in self.readers + self.decoders].count(client) < most

    def run(self) -> int:
        """Steps until nobody is left."""
        step = 0
        while step <= max(row.row["arrives"] for row in self.rows) or self.left():
            for row in self.rows:
                if row.row["arrives"] == step:
                    self.waiting.append(row)
                    if row.row["client"] not in self.order:
                        self.order.append(row.row["client"])
                if row.row["cancelled"] == step and not row.is_over:
                    row.is_cancelled = True
            self.step(step)
            step += 1
        return step

    def left(self) -> list[Simulated]:
        return self.waiting + self.readers + self.decoders

    def drop(self) -> None:
        for rows in (self.waiting, self.readers, self.decoders):
            rows[:] = [row for row in rows if not row.is_over]
        self.forget()

    def forget(self) -> None:
        here = {row.row["client"] for row in self.waiting}
        self.order = [client for client in self.order if client in here]

    def step(self, step: int) -> None:
        self.drop()
        left = self.case["prefill_tokens"]
        while (row := self.reading()) is not None:
            piece = min(row.piece, row.length - row.read)  # begun at 0: each but the last is whole
            if piece > left:
                break
            left -= piece
            self.turn += 1
            row.read += piece
            if row.read == row.length:
                self.readers.remove(row)
                self.decoders.append(row)
                row.commit(step)
            self.drop()
        for row in self.decoders:
            row.commit(step)
        self.drop()

    def reading(self) -> Simulated | None:
        self.start_waiting()
        if not self.readers:
            return None
        last = self.readers[-1]
        return last if self.turn % 2 == 1 and last.pieces > 1 else self.readers[0]

    def start_waiting(self) -> None:
        if len(self.readers) + len(self.decoders) == self.case["max_rows"]:
            return
        for row in self.turns():
            if not self.is_welcome(row):
                continue
            if self.readers:
                if self.readers[-1].pieces <= 1:
                    return
                if 2 * row.pieces > self.readers[0].pieces:
                    continue
            self.waiting.remove(row)
            self.readers.insert(0, row)
            self.order.remove(row.row["client"])
            self.order.append(row.row["client"])  # its turn is over
            self.forget()
            return


def cases() -> list[dict[str, Any]]:
    draw, clients = random.Random(3101), random.Random(3102)
    made = []
    for i in range(100):
        case: dict[str, Any] = {"name": f"batch {i}", "block": draw.choice([1, 2, 4, 8])}
        case |= {"max_rows": draw.choice([1, 2, 3, 5]), "prefill_tokens": draw.choice([4, 16, 128])}
        case["max_rows_per_client"] = clients.choice([None, None, 1, 2]) if i >= 60 else None
        longest, rows = draw.choice([3, 20, 150]), []
        for _ in range(draw.choice([1, 3, 6, 12])):
            row: dict[str, Any] = {"arrives": draw.choice([0, 0, 1, draw.randint(0, 30)])}
            row["prompt"] = [draw.randint(1, 12) for _ in range(draw.randint(1, longest))]
            row |= {
                "tau": draw.choice([None, None, 1.0, 0.5, 0.2]),
                "masks": draw.choice(["full", "full", 0, 2]),
            }
            row |= {
                "max_new_tokens": draw.choice([1, 2, 5, 17, 40]),
                "eos_ids": draw.choice([[], [], [12], [1, 7]]),
            }
            row |= {"stop_token": draw.choice([None, None, None, 5])}
            row["client"] = clients.choice(["a", "a", "a", "b", "c", None]) if i >= 60 else None
            row["cancelled"] = draw.choice([None, None, None, row["arrives"] + draw.randint(0, 9)])
            rows.append(row)
        case["rows"] = rows
        batch = Batch(case)
        case["steps"] = batch.run()
        for row, done in zip(rows, batch.rows, strict=True):
            reason = "cancelled" if done.is_cancelled else done.reason
            row["expected"] = {"commits": done.commits, "finish_reason": reason}
        made.append(case)
    return made


def files() -> dict[Path, str]:
    return {CONFORMANCE / "batcher.json": text_of(cases())}


if __name__ == "__main__":
    write(files())
