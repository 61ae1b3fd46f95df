"""What the replicas of a fleet answer together, without Ray."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import need

need("prometheus_client", "serve")

from mars_export.runtime.serve import app  # noqa: E402
from mars_export.runtime.serve.middleware import CLIENT  # noqa: E402
from mars_export.runtime.serve.ray.shared_routes import SharedRoutes  # noqa: E402
from mars_export.runtime.serve.responses.api_response import Service  # noqa: E402


@pytest.fixture
def service(sessions: Sessions) -> Service:
    return app({"tiny": sessions(MAIN)}).service


def test_the_metrics_of_all_replicas_are_one_page(service: Service) -> None:
    async def everyone(_: str) -> list[Any]:
        return [service.metrics.families(name) for name in ('a"', "b")]

    page = asyncio.run(SharedRoutes(service, everyone).metrics(None))  # type: ignore[arg-type]
    lines = bytes(page.body).decode().splitlines()
    assert lines.count("# TYPE mars_forwards_total counter") == 1
    assert [line for line in lines if line.startswith("mars_forwards_total")] == [
        'mars_forwards_total{model="tiny",replica="a\\""} 0.0',
        'mars_forwards_total{model="tiny",replica="b"} 0.0',
    ]
    assert not [line for line in lines if "_created" in line]


@pytest.mark.parametrize(
    ("answers", "status"),
    [([(404, {}), (200, {"id": "x"})], 200), ([(400, {}), (404, {})], 400), ([(404, {}), (404, {})], 404)],
)
def test_the_replica_that_has_the_stream_answers(service: Service, answers: list[Any], status: int) -> None:
    async def everyone(*asked: Any) -> list[Any]:
        assert asked == ("steer", "x", 1, {"tau": 1})
        return answers

    class Steering:
        path_params, scope = {"id": "x"}, {CLIENT: 1}

    routes = SharedRoutes(service, everyone)

    async def read(_: object) -> dict[str, int]:
        return {"tau": 1}

    routes._bodies.read = read  # type: ignore[method-assign,assignment]
    answer = asyncio.run(routes.steer(Steering()))  # type: ignore[arg-type]
    assert answer.status_code == status
    assert json.loads(bytes(answer.body)) == next(body for code, body in answers if code == status)
