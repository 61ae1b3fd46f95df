"""Ray's head is lost while requests run, and comes back: what clients see, with its state in Redis and
without.

Redis is a program of its own (`apt-get install redis-server`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.fleets import CHATS, PYTHON, chat, check, run
from support.missing import lacking
from support.tiny import Named

from serving import fleet
from serving.cluster import Cluster

CLIENTS = 6
AWAY = 8.0  # seconds without a head
BACK = 180.0  # seconds in which a new head must have what the old one had


def arguments(bundle: Any) -> dict[str, Any]:
    """Fronts take CPUs, and the head has none: they are where the replicas are."""
    bundles = {"tiny": str(bundle)}
    return {"bundles": bundles, "replicas": 2, "threads": 1, "fronts": 2, "front_cpus": 0.5}


@pytest.fixture(scope="module")
def cluster(bundles: Named) -> Iterator[Cluster]:
    if shutil.which("redis-server") is None:
        lacking("redis-server is not installed: apt-get install redis-server")
    with Cluster(PYTHON, 3, has_redis=True) as started:
        started.deploy(arguments(bundles("llama")))
        yield started


def answered(answers: list[tuple[int, fleet.Told]], expected: list[str]) -> dict[str, int]:
    """Every request once, with the right text or an error event after its beginning; the counts."""
    found = fleet.verdict([told for _, told in answers], [expected[i % CHATS] for i, _ in answers])
    assert found.pop("wrong") == {}
    return found


async def back(cluster: Cluster, lost: int) -> None:
    """Until two replicas answer that were not lost."""
    until = time.monotonic() + BACK
    while lost in (there := cluster.processes("worker", fleet.REPLICA)) or len(there) != 2:
        assert time.monotonic() < until, f"{len(there)} replicas"
        await asyncio.sleep(0.2)
    await fleet.wait_for(cluster.port, 2)


def kill_a_replica(cluster: Cluster) -> int:
    pid = cluster.processes("worker", fleet.REPLICA)[0]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_fronts_and_replicas_are_off_the_head(cluster: Cluster) -> None:
    assert cluster.processes("head", b"ray::ServeReplica") == []
    assert len(cluster.processes("worker", b"ray::ServeReplica:mars:mars-front")) == 2
    assert len(cluster.processes("worker", fleet.REPLICA)) == 2


def test_a_restart_of_the_gcs_is_not_seen(cluster: Cluster, expected: list[str]) -> None:
    async def restart() -> None:
        gone = cluster.kill_gcs()
        await asyncio.sleep(AWAY)
        cluster.start_gcs(gone)
        await asyncio.sleep(AWAY)

    counts = answered(run(fleet.during(cluster.port, chat, CLIENTS, restart())), expected)
    assert counts["whole"] == counts["requests"] > 2 * CLIENTS
    lost = kill_a_replica(cluster)
    run(back(cluster, lost))
    check(run(fleet.closed(cluster.port, [chat(i) for i in range(CHATS)], 4)), expected)


def test_a_head_that_is_lost_is_not_missed_and_the_next_one_goes_on(
    cluster: Cluster, expected: list[str]
) -> None:
    """While there is none a replica is killed, too: the other one answers until both are there again."""
    controller = cluster.processes("head", b"ray::ServeController")

    async def restart() -> None:
        cluster.kill("head")
        await asyncio.sleep(AWAY / 2)
        lost = kill_a_replica(cluster)
        await asyncio.sleep(AWAY / 2)
        assert len(cluster.processes("worker", fleet.REPLICA)) == 1, "who started it?"
        await asyncio.to_thread(cluster.start_head)
        await back(cluster, lost)

    counts = answered(run(fleet.during(cluster.port, chat, CLIENTS, restart())), expected)
    assert counts["whole"] > 2 * CLIENTS and counts["ended_by_an_error"] <= CLIENTS
    [anew] = cluster.processes("head", b"ray::ServeController")
    assert [anew] != controller
    check(run(fleet.closed(cluster.port, [chat(i) for i in range(CHATS)], 4)), expected)
    for port in (cluster.port, cluster.head_port):
        run(fleet.wait_for(port, 2))


def test_without_redis_answers_go_on_until_the_next_head_ends_them(
    bundles: Named, expected: list[str]
) -> None:
    """The next head knows nothing of the nodes that wait for it, and has them end themselves."""
    with Cluster(PYTHON, 3, has_redis=False) as alone:
        alone.deploy(arguments(bundles("llama")))

        async def lose() -> None:
            alone.kill("head")
            await asyncio.sleep(AWAY)

        counts = answered(run(fleet.during(alone.port, chat, CLIENTS, lose())), expected)
        assert counts["whole"] == counts["requests"] > 2 * CLIENTS
        alone.start_head()
        until = time.monotonic() + BACK
        while alone.processes("worker", b"ray::Serve"):
            assert time.monotonic() < until, "they outlive it"
            time.sleep(0.5)
