"""The routes of the server, as one ASGI application, and the chat page."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.resources import files
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from ..session.session import Session
from .api_error import ApiError, encoded
from .keys import Keys
from .metrics import CONTENT_TYPE, Metrics, exposition
from .middleware import CLIENT, Middleware
from .models import LazyModel, Models
from .options import ServeOptions
from .requests.api_request import PATHS, Bodies, Kind, read_request
from .responses.admission import count_tokens
from .responses.api_response import Service, begin, steer

SCRIPTS = ("chats.js", "models.js", "answer.js", "talk.js", "controls.js")


@cache
def page() -> bytes:
    """The HTML with its style and its script in it, UTF-8."""
    web = files(__package__).joinpath("web")
    style = web.joinpath("page.css").read_bytes()
    script = b"\n".join(web.joinpath(name).read_bytes() for name in SCRIPTS)
    html = web.joinpath("page.html").read_bytes()
    html = html.replace(b"<style></style>", b"<style>\n%b</style>" % style)
    return html.replace(b"<script></script>", b"<script>\n%b</script>" % script)


@cache
def page_headers() -> dict[str, str]:
    """The headers of the page."""
    policy = [
        "default-src 'none'",
        f"script-src '{_hash('script')}'",
        f"style-src '{_hash('style')}'",
        "connect-src 'self'",
        "img-src data:",  # the icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text can become HTML
        "trusted-types 'none'",
    ]
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _hash(element: str) -> str:
    """The hash of an element's content, white space included, as browsers compute it."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>".encode(), page(), re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode()


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
            return await begin(service, api_request, request.scope[CLIENT], address, request.receive)
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
