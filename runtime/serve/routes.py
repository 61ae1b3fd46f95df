"""The routes of the server, as one ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from ..session.session import Session
from .api_error import ApiError, encoded
from .keys import Keys
from .metrics import CONTENT_TYPE, Metrics
from .middleware import CLIENT, Middleware
from .models import LazyModel, Models
from .options import ServeOptions
from .page import page, page_headers
from .requests.api_request import PATHS, Bodies, Kind, read_request
from .responses.admission import count_tokens
from .responses.api_response import Service, answer, steer

Handler = Callable[[Request], Awaitable[Any]]


def app(
    sessions: Mapping[str, Session | LazyModel],
    options: ServeOptions | None = None,
    routes: Callable[[Service], Routes] | None = None,
) -> Middleware:
    """Serve `sessions` under their names. A LazyModel is opened for their first request. If its
    lifespan does not run, for example when it is mounted in another application, it warms up at the first
    request. `routes` replaces Routes.

    Raises SessionError if the options do not fit the bundles.
    """
    options = options or ServeOptions()
    models = Models(sessions, options)
    service = Service(models, options, Metrics(models), Keys(options.keys))

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        models.start()
        yield
        models.close(0)

    table = (routes or Routes)(service).table()
    inner = Router(table, redirect_slashes=False, lifespan=lifespan)
    return Middleware(inner, service, options, [route.path for route in table])


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, "application/json")


class Routes:
    """The handlers, by path."""

    def __init__(self, service: Service) -> None:
        self._service, self._models = service, service.models
        self._bodies = Bodies(service.options.max_body, service.options.body_timeout)

    def table(self) -> list[Route]:
        posts: dict[str, Handler] = {
            **{path: partial(self._answer, kind) for path, kind in PATHS.items()},
            "/v1/mars/streams/{id}": self.steer,
            "/v1/messages/count_tokens": self.count_tokens,
        }
        gets: dict[str, Handler] = {
            "/": self.page,
            "/health": self.health,
            "/health/live": self.live,
            "/health/ready": self.health,
            "/metrics": self.metrics,
            "/v1/models": self.list_models,
            "/v1/models/{id:path}": self.model,
        }
        table = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        return table + [Route(path, handler, methods=["GET"]) for path, handler in gets.items()]

    async def _answer(self, kind: Kind, request: Request) -> Any:
        service = self._service
        self._models.start()
        model = None
        try:
            api_request = read_request(kind, await self._bodies.read(request))
            model = api_request.model
            address = request.client.host if request.client is not None else None
            return await answer(service, api_request, request.scope[CLIENT], address, request.receive)
        except ApiError as refusal:
            is_known = model is not None and model in self._models.models
            service.metrics.refused(str(model) if is_known else "", refusal.status)
            raise

    async def steer(self, request: Request) -> Response:
        body = await self._bodies.read(request)
        name, client = request.path_params["id"], request.scope[CLIENT]
        return _json(steer(self._service.streams, name, client, body))

    async def count_tokens(self, request: Request) -> Response:
        api_request = read_request("messages", await self._bodies.read(request))
        return _json({"input_tokens": await count_tokens(self._models, api_request)})

    async def page(self, _: Request) -> Response:
        return Response(page(), headers=page_headers())

    async def health(self, _: Request) -> Response:
        self._models.start()
        if self._models.is_ready:
            return _json({"status": "ok"})
        status = "failed" if self._models.faults else "not ready"
        return _json({"status": status}, 503, {"retry-after": "5"})

    async def live(self, _: Request) -> Response:
        if self._models.is_live:
            return _json({"status": "ok"})
        return _json({"status": "failed"}, 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def list_models(self, _: Request) -> Response:
        entries = [entry for model in self._models.models.values() for entry in model.entries()]
        return _json({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        model, _ = self._models.find(name)
        return _json(model.entry(name))
