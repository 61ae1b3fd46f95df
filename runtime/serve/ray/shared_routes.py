"""The routes of a replica, whose metrics and running streams are those of all replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..api_error import ApiError, encoded
from ..metrics import CONTENT_TYPE, exposition
from ..middleware import CLIENT
from ..responses.api_response import Service, steer
from ..routes import Routes

Broadcast = Callable[..., Awaitable[list[Any]]]
"""Calls a method of every replica, by its name and arguments."""


class SharedRoutes(Routes):
    """The routes of a replica: metrics and running streams are those of all replicas."""

    def __init__(self, service: Service, broadcast: Broadcast) -> None:
        super().__init__(service)
        self._broadcast = broadcast

    async def metrics(self, _: Request) -> Response:
        pages = await self._broadcast("metrics")
        return Response(exposition(chain.from_iterable(pages)), media_type=CONTENT_TYPE)

    async def steer(self, request: Request) -> Response:
        """Only one replica has the stream; the others answer 404."""
        body = await self._bodies.read(request)
        answers = await self._broadcast("steer", request.path_params["id"], request.scope[CLIENT], body)
        status, answer = min(answers, key=lambda answer: answer[0])
        return Response(encoded(answer), status, media_type="application/json")


def steered(service: Service, name: str, client: str | None, body: Any) -> tuple[int, dict[str, Any]]:
    """Status and body of one replica's answer."""
    try:
        return 200, steer(service.streams, name, client, body)
    except ApiError as refusal:
        return refusal.status, refusal.body
