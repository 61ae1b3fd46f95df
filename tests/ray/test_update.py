"""Another version of a bundle takes the place of the one that is served, under load: nothing is dropped.

A module of its own: `--address auto` finds the only Ray that runs.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.fleets import CHATS, Told, ask, chat, closed, command, run, wait_for
from support.tiny import Named


def test_a_new_version_takes_over_without_a_dropped_request(
    serve: Callable[..., Any], bundles: Named, tmp_path: Path
) -> None:
    second = tmp_path / "llama"  # the same name, other weights
    shutil.copytree(bundles("mistral"), second)
    with serve() as served:
        before = set(served.processes())
        answers: list[tuple[int, Told]] = []

        async def updated() -> int:
            words = command(second, "--ray", "--replicas=2", "--address", "auto")
            update = await asyncio.create_subprocess_exec(*words)

            async def client(number: int) -> None:
                while update.returncode is None:
                    answers.append((number % CHATS, await ask(served.port, chat(number))))
                    number += 1

            clients = asyncio.gather(*(client(i) for i in range(8)))
            code = await asyncio.wait_for(update.wait(), 240)
            await clients
            return code

        assert run(updated()) == 0
        run(wait_for(served.port, 2))
        assert not before & set(served.processes()), "both replicas are new"
        new = [told.text for told in run(closed(served.port, range(CHATS), 2))]
    assert not set(new) & set(served.expected)
    wrong = [
        told for i, told in answers if not told.is_whole or told.text not in (served.expected[i], new[i])
    ]
    assert wrong == []
    assert len(answers) > 50 and sum(told.text == served.expected[i] for i, told in answers) > 8
