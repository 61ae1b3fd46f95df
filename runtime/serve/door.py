"""What every request passes before its route, whatever the route: who may call from where, errors of ours as
answers, and a line in the log. Reads no body.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .keys import Keys
from .options import HEADER_BYTES, ServeOptions
from .refusals import CLOSE, Refused, encoded

LOG = logging.getLogger("mars_export.serve")
OPEN_PATHS = ("/health", "/")  # without a key: a probe has none, and the page asks for it
CLIENT = "mars.client"
METHODS, ALLOWED = "GET, POST, OPTIONS", "authorization, content-type"


class Keyed(Protocol):
    """Anything that knows who may call."""

    @property
    def keys(self) -> Keys: ...


S = TypeVar("S", bound=Keyed)


class Door(Generic[S]):
    """An ASGI application around another. The number of the caller's key is `scope["mars.client"]`."""

    def __init__(self, inner: ASGIApp, service: S, options: ServeOptions) -> None:
        self._inner, self.service, self._options = inner, service, options
        self._keys = service.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        began, status = perf_counter(), 0
        headers = Headers(scope=scope)
        origin = headers.get("origin")

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(MutableHeaders(scope=message), origin)
            await send(message)

        try:
            try:
                _check_form(scope, headers)
                self._check_source(headers, origin)
                if scope["method"] == "OPTIONS" and self._is_friend(origin):
                    await respond(sending, 204, b"", _preflight())
                    return
                scope[CLIENT] = self._client(scope["path"], headers)
                scope["app"] = self  # so that the router raises where there is no route
                await self._inner(scope, receive, sending)
            except (Refused, HTTPException) as error:
                refusal = error if isinstance(error, Refused) else _no_route(error)
                if status == 0:
                    await respond(sending, refusal.status, encoded(refusal.body), refusal.headers)
            except Exception as error:
                LOG.error("%s %s failed: %s", scope["method"], scope["path"][:200], type(error).__name__)
                LOG.debug("what failed", exc_info=error)
                if status != 0:
                    raise
                refusal = Refused(500, "the server failed; its log says more", code="failed")
                await respond(sending, 500, encoded(refusal.body), {})
        finally:
            fields = {
                "method": scope["method"], "path": scope["path"][:200], "status": status,
                "ms": round(1000 * (perf_counter() - began), 1),
            }  # fmt: skip
            LOG.log(logging.INFO if status >= 400 else logging.DEBUG, "request", extra={"fields": fields})

    def _client(self, path: str, headers: Headers) -> int | None:
        """The number of the caller's key; None on a server that has none."""
        if self._keys.is_open:
            return None
        client = self._keys.find(headers.get("authorization"))
        if client is None and path not in OPEN_PATHS:
            raise Refused(
                401,
                "an API key is needed: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return client

    def _check_source(self, headers: Headers, origin: str | None) -> None:
        """A page of somebody else's must not reach this server through its reader's browser: neither under a
        name that was made to point here, nor by a request across origins.
        """
        host = headers.get("host", "")
        if self._options.hosts is not None and host and host_name(host) not in self._options.hosts:
            raise Refused(
                403,
                f"this server does not answer as {host[:100]!r}; call it by the address that it listens on",
                code="wrong_host",
            )
        if origin is None or self._is_friend(origin) or _netloc(origin) == host.lower():
            return
        raise Refused(
            403,
            f"pages of {origin[:100]!r} may not call this server; --cors-origin allows it",
            code="wrong_origin",
        )

    def _is_friend(self, origin: str | None) -> bool:
        return origin is not None and (
            origin in self._options.cors_origins or "*" in self._options.cors_origins
        )

    def _add_headers(self, headers: MutableHeaders, origin: str | None) -> None:
        headers["x-content-type-options"] = "nosniff"
        if self._is_friend(origin):
            assert origin is not None
            headers["access-control-allow-origin"] = origin
            headers.add_vary_header("Origin")


def _check_form(scope: Scope, headers: Headers) -> None:
    """What the HTTP parser lets through."""
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    if size + sum(len(name) + len(value) + 4 for name, value in headers.raw) > HEADER_BYTES:
        raise Refused(431, f"the headers are larger than {HEADER_BYTES} bytes", headers=CLOSE)
    if scope.get("http_version") not in ("1.0", "1.1", "2", "3"):
        raise Refused(400, "HTTP/1.1 is spoken here", headers=CLOSE)
    if "content-length" in headers and "transfer-encoding" in headers:
        # A proxy in front may have read the one and this server the other: what follows is not trusted.
        raise Refused(400, "a body has a length or comes in chunks, not both", headers=CLOSE)


def _no_route(error: HTTPException) -> Refused:
    words = {404: "there is nothing at this path", 405: "this path takes another method"}
    message = words.get(error.status_code, str(error.detail))
    return Refused(error.status_code, message, headers=error.headers)


async def respond(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    lines += [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.lower().strip()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _preflight() -> dict[str, str]:
    return {
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": ALLOWED,
        "access-control-max-age": "600",
    }
