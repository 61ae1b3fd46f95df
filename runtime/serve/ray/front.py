"""The front: an ASGI application that sends requests to replicas."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from .. import page
from ..ask.bodies import Bodies
from ..ask.request import PATHS, Ask, Kind, read_ask
from ..door import Door
from ..keys import Keys
from ..options import ServeOptions
from ..refusals import Refused, encoded
from .affinity import keys_of
from .call import Call, Headers, Part, Whole
from .front_metrics import FrontCounters, merged
from .relay import Relay

REPLICAS = "mars_front_replicas"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
PASSED_ON = (b"authorization", b"x-api-key", b"content-type", b"user-agent")
Handler = Callable[[Request], Awaitable[Any]]


class ReplicaPool(Protocol):
    """The replicas of one bundle."""

    def send(self, call: Call) -> AsyncGenerator[Part, None]:
        """The parts of one replica's answer. Raises Lost and Refused."""

    async def ask(self, call: Call) -> list[Whole]:
        """The answers of all replicas that answer."""


class Front:
    """Sends requests to the pools of bundles. A request without a model goes to the first one."""

    def __init__(
        self, pools: Mapping[str, ReplicaPool], options: ServeOptions, counts: FrontCounters
    ) -> None:
        self.keys = Keys(options.keys)
        self._pools, self._options, self._counts = dict(pools), options, counts
        self._bodies = Bodies(options.max_body, options.body_timeout)

    def table(self) -> list[Route]:
        posts: dict[str, Handler] = {
            **{path: partial(self._answer, kind) for path, kind in PATHS.items()},
            "/v1/mars/streams/{id}": self._steer,
            "/v1/messages/count_tokens": self._pass_on,
        }
        gets: dict[str, Handler] = {
            "/": self._page,
            "/health": self._health,
            "/health/live": self._live,
            "/health/ready": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._list_models,
            "/v1/models/{id}": self._model,
        }
        table = [Route(path, _called(handler), methods=["POST"]) for path, handler in posts.items()]
        return table + [Route(path, _called(handler), methods=["GET"]) for path, handler in gets.items()]

    # --- to one replica ---

    async def _answer(self, kind: Kind, request: Request) -> Any:
        name = ""
        try:
            body = await self._bodies.read(request)
            ask = read_ask(kind, body)  # refuses invalid requests here
            name = self._find(ask.model)
        except Refused:
            self._counts.add("mars_front_requests", name, "refused")
            raise
        if ask.settings.get("temperature") and not ask.has_seed:
            body["seed"] = secrets.randbits(63)  # so that another replica would draw the same tokens
        return self._relay(request, name, body, ask)

    async def _pass_on(self, request: Request) -> Any:
        body = await self._bodies.read(request)
        model = body.get("model")
        name = self._find(model if isinstance(model, str) else None)
        return self._relay(request, name, body)

    def _relay(self, request: Request, name: str, body: Any, ask: Ask | None = None) -> Relay:
        call = replace(_call(request, encoded(body)), keys=() if ask is None else keys_of(ask))

        def attempt(avoid: frozenset[str]) -> AsyncGenerator[Part, None]:
            return self._pools[name].send(replace(call, avoid=avoid))

        def done(relay: Relay) -> None:
            self._counts.add("mars_front_requests", name, relay.outcome)
            self._counts.add("mars_front_retries", name, number=relay.retries)

        options = self._options
        return Relay(
            attempt,
            is_stream=ask is not None and ask.stream,
            is_typed=ask is not None and ask.is_typed,
            ping=options.ping,
            patience=options.queue_timeout,
            done=done,
        )

    def _find(self, model: str | None) -> str:
        """The bundle of a model's name. The replica checks the profile after the colon."""
        if model is None:
            return next(iter(self._pools))
        for at in (len(model), *(i for i, character in enumerate(model) if character == ":")):
            if model[:at] in self._pools:
                return model[:at]
        raise Refused(
            404,
            f"no model {model[:200]!r} (there are: {', '.join(self._pools)})",
            param="model",
            code="model_not_found",
        )

    # --- to all replicas ---

    async def _steer(self, request: Request) -> Response:
        """Only one replica has the stream; the others answer 404."""
        call = _call(request, encoded(await self._bodies.read(request)))
        answers = [answer for pool in self._pools.values() for answer in await pool.ask(call)]
        for answer in sorted(answers, key=lambda answer: answer.status == 404):
            return Response(answer.body, answer.status, media_type="application/json")
        raise Refused(503, "no replica answers; try again", code="closing", headers={"retry-after": "5"})

    async def _health(self, request: Request) -> Response:
        silent = []
        for name, pool in self._pools.items():
            if not any(answer.status == 200 for answer in await pool.ask(_call(request))):
                silent.append(name)
        if silent:
            return _json({"status": "not ready", "models": silent}, 503, {"retry-after": "5"})
        return _json({"status": "ok"})

    async def _live(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        pages: dict[str, str] = {}
        replicas = []
        for name, pool in self._pools.items():
            answers = await pool.ask(_call(request))
            pages |= {answer.replica: answer.body.decode() for answer in answers if answer.status == 200}
            replicas.append(f"{REPLICAS}{{model={json.dumps(name)}}} {len(answers)}\n")
        head = f"# HELP {REPLICAS} Replicas that answered this scrape.\n# TYPE {REPLICAS} gauge\n"
        text = merged(pages) + head + "".join(replicas) + self._counts.text()
        return Response(text.encode(), media_type=METRICS)

    async def _list_models(self, request: Request) -> Response:
        return _json({"object": "list", "data": await self._entries(request)})

    async def _model(self, request: Request) -> Response:
        model = request.path_params["id"]
        self._find(model)
        for entry in await self._entries(request):
            if entry["id"] == model:
                return _json(entry)
        raise Refused(404, f"no model {model[:200]!r}", param="model", code="model_not_found")

    async def _entries(self, request: Request) -> list[dict[str, Any]]:
        """The entries of each bundle, which are the same in all replicas."""
        call = replace(_call(request), path="/v1/models")
        entries: list[dict[str, Any]] = []
        for pool in self._pools.values():
            answers = [answer for answer in await pool.ask(call) if answer.status == 200]
            for entry in json.loads(answers[0].body)["data"] if answers else []:
                entry["mars"]["replicas"] = len(answers)
                entries.append(entry)
        return entries

    async def _page(self, _: Request) -> Response:
        return Response(page.page(), headers=page.headers())


def new_front(pools: Mapping[str, ReplicaPool], options: ServeOptions, counts: FrontCounters) -> Door[Front]:
    """The ASGI application of a front."""
    front = Front(pools, options, counts)
    table = front.table()
    inner = Router(table, redirect_slashes=False)
    return Door(inner, front, front.keys, options, [route.path for route in table])


def _called(handler: Handler) -> Handler:
    """`handler` as a plain function, which Route requires."""

    async def handle(request: Request) -> Any:
        return await handler(request)

    return handle


def _call(request: Request, body: bytes = b"") -> Call:
    headers: Headers = tuple((name, value) for name, value in request.headers.raw if name in PASSED_ON)
    return Call(request.method, request.url.path, headers, body)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, "application/json")
