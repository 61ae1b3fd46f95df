"""Another version of a bundle takes the place of the one that is served, under load: nothing is dropped."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.fleets import CHATS, PYTHON, Fleet, chat, run
from support.tiny import Named

from serving import fleet
from serving.fleet import Told


async def updated(served: Fleet, bundle: Path, log: Path) -> tuple[list[tuple[int, Told]], int]:
    """Requests by eight clients from before the update until after it; its exit code."""
    words = [PYTHON, "-m", "mars_export.cli", "serve", str(bundle), "--ray", "--replicas=2", "--threads=1"]
    with log.open("w") as out:
        update = await asyncio.create_subprocess_exec(*words, "--address", "auto", stdout=out, stderr=out)
        answers = await fleet.during(served.port, chat, 8, asyncio.wait_for(update.wait(), 240))
    return answers, update.returncode or 0


def test_a_new_version_takes_over_without_a_dropped_request(
    serve: Callable[..., Any], bundles: Named, tmp_path: Path
) -> None:
    second = tmp_path / "llama"  # the same name, other weights
    shutil.copytree(bundles("mistral"), second)
    with serve() as served:
        before = set(fleet.processes(served.pid))
        answers, code = run(updated(served, second, tmp_path / "log"))
        assert code == 0, (tmp_path / "log").read_text(errors="replace")[-2000:]
        run(fleet.wait_for(served.port, 2))
        assert not before & set(fleet.processes(served.pid)), "both replicas are new"
        after = run(fleet.closed(served.port, [chat(i) for i in range(CHATS)], 2))
    found = [(i % CHATS, told.text, told.status, told.ends, told.code, told.broken) for i, told in answers]
    new = [told.text for told in after]
    assert [told.ends for told in after] == [2] * CHATS and not set(new) & set(served.expected)
    wrong = [
        answer for answer in found
        if answer[1] not in (served.expected[answer[0]], new[answer[0]]) or answer[2:] != (200, 2, "", "")
    ]  # fmt: skip
    assert wrong == []
    versions = Counter("new" if text == new[i] else "old" for i, text, *_ in found)
    assert len(found) > 50 and versions["old"] > 8, versions
