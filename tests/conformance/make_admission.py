"""Writes admission.json: whom a batcher lets in, beside whom, and why it does not.

`PYTHONPATH=tests python tests/conformance/make_admission.py`, then read the diff. `events` happen in their
order: [client, rows, held, answer] is a request of `client` (null: nobody's) at a batch of `rows` rows that
holds `held` requests without one, and its answer, null when it gets a place; [client] is one of `client` that
is over. The expected answers come from seating requests one by one in the rows, never from our counting.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.makers import text_of, write
from support.paths import CONFORMANCE


def num_seated(here: Iterable[str | None], rows: int, most: int | None) -> int:
    """Requests of `here` that sit in rows, once all that can have sat down."""
    seated: list[str | None] = []
    for client in here:
        is_welcome = client is None or most is None or seated.count(client) < most
        if is_welcome and len(seated) < rows:
            seated.append(client)
    return len(seated)


def answer(case: dict[str, Any], here: list[str | None], client: str | None, rows: int, held: int) -> Any:
    everybody = [*here, client]
    waiting = len(everybody) - num_seated(everybody, rows, case["max_rows_per_client"])
    if waiting > case["max_waiting"] or held >= case["max_rows"] + case["max_waiting"]:
        return "max_waiting"
    places = case["max_rows"] + case["max_waiting"]
    share = max(1, int(case["client_share"] * places))
    return "client_share" if client is not None and here.count(client) >= share else None


def cases() -> list[dict[str, Any]]:
    draw, made = random.Random(3201), []
    for i in range(40):
        case: dict[str, Any] = {"name": f"places {i}", "max_rows": draw.choice([1, 2, 4, 8])}
        case |= {"max_waiting": draw.choice([1, 3, 10]), "client_share": draw.choice([1.0, 1.0, 0.5, 0.125])}
        case |= {"max_rows_per_client": draw.choice([None, None, 1, 2]), "events": []}
        here: list[str | None] = []
        for _ in range(60):
            if here and draw.random() < 0.3:
                case["events"].append([here.pop(draw.randrange(len(here)))])
                continue
            client = draw.choice(["flood", "flood", "flood", "a", "b", None])
            rows = case["max_rows"] if draw.random() < 0.8 else draw.randint(1, case["max_rows"])
            places = case["max_rows"] + case["max_waiting"]
            held = draw.choice([0, 0, 0, draw.randint(0, places + 1)])
            said = answer(case, here, client, rows, held)
            case["events"].append([client, rows, held, said])
            if said is None:
                here.append(client)
        made.append(case)
    return made


def files() -> dict[Path, str]:
    return {CONFORMANCE / "admission.json": text_of(cases())}


if __name__ == "__main__":
    write(files())
