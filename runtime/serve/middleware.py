"""Middleware around all routes: API keys, Host and Origin checks, error responses, and the request log."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api_error import CLOSE, ApiError, encoded
from .options import HEADER_BYTES, ServeOptions
from .responses.api_response import Service

LOG = logging.getLogger("mars_export.serve")
# Need no key: probes have none, and the page asks for it.
OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/")
CLIENT = "mars.client"
ABSOLUTE = re.compile("https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
PREFLIGHT = {"access-control-allow-methods": "GET, POST, OPTIONS", "access-control-max-age": "600"}


class Middleware:
    """An ASGI application around another one, which serves `service`. `scope["mars.client"]` is the
    digest of the caller's key. A 404 names `paths`.
    """

    def __init__(self, inner: ASGIApp, service: Service, options: ServeOptions, paths: Sequence[str]) -> None:
        self._inner, self.service, self._paths = inner, service, paths
        self._keys, self._hosts, self._origins = service.keys, options.hosts, options.cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        # uvicorn starts a request when it has read the head. If the body that came with it is malformed, it
        # closes the connection by the next turn of the event loop, and then drops an answer. Now it would
        # raise.
        await asyncio.sleep(0)
        began, status = perf_counter(), 0
        if (target := ABSOLUTE.fullmatch(scope["path"])) is not None:
            # As to a proxy: the target names the host, and the Host header does not count (RFC 9112).
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {**scope, "path": target[2] or "/", "headers": [(b"host", target[1].encode()), *others]}
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        is_friend = origin is not None and (origin in self._origins or "*" in self._origins)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-content-type-options"] = "nosniff"
                if origin is not None and is_friend:
                    added["access-control-allow-origin"] = origin
                    added.add_vary_header("Origin")
            await send(message)

        async def refuse(refusal: ApiError) -> None:
            if status == 0:
                # Clients of Anthropic's API read errors by this type.
                typed = {"type": "error"} if scope["path"].startswith("/v1/messages") else {}
                body = encoded(typed | refusal.body)
                response = Response(body, refusal.status, refusal.headers, "application/json")
                await response(scope, receive, sending)

        try:
            _check_form(scope, headers)
            self._check_source(headers, None if is_friend else origin)
            if scope["method"] == "OPTIONS" and is_friend:
                asked = headers.get("access-control-request-headers", "")  # clients send headers of their own
                allowed = {**PREFLIGHT, "access-control-allow-headers": asked}
                await Response(None, 204, allowed)(scope, receive, sending)
                return
            scope[CLIENT] = self._client(scope["path"], headers)
            scope["app"] = self  # then the router raises for an unknown path
            await self._inner(scope, receive, sending)
        except ApiError as refusal:
            await refuse(refusal)
        except HTTPException as error:
            await refuse(self._no_route(scope, error))
        except Exception as error:
            LOG.error("%s %s failed: %s", scope["method"], scope["path"][:200], type(error).__name__)
            LOG.debug("traceback", exc_info=error)
            if status != 0:
                raise
            await refuse(ApiError(500, "the server failed; see its log", code="failed"))
        finally:
            fields = {
                "method": scope["method"], "path": scope["path"][:200], "status": status,
                "ms": round(1000 * (perf_counter() - began), 1),
            }  # fmt: skip
            LOG.log(logging.INFO if status >= 400 else logging.DEBUG, "request", extra={"fields": fields})

    def _no_route(self, scope: Scope, error: HTTPException) -> ApiError:
        path, message = scope["path"][:200], str(error.detail)
        if error.status_code == 404:
            message = f"no {path} here; there are {', '.join(self._paths)}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{path} does not take {scope['method']}; use {allowed}"
        return ApiError(error.status_code, message, headers=error.headers)

    def _client(self, path: str, headers: Headers) -> str | None:
        """The digest of the caller's key; None on a server without keys."""
        if self._keys.is_open:
            return None
        named = headers.get("x-api-key")  # as Anthropic's clients send it
        given = headers.get("authorization") or (named and f"Bearer {named}")
        client = self._keys.find(given)
        if client is None and path not in OPEN_PATHS:
            raise ApiError(
                401,
                f"{'wrong API key' if given else 'an API key is needed'}:"
                " send Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return client

    def _check_source(self, headers: Headers, origin: str | None) -> None:
        """Protect against foreign pages: DNS rebinding by Host, cross-origin requests by Origin."""
        host = headers.get("host", "").lower().strip()
        if self._hosts is not None and host and re.sub(r":\d*$", "", host) not in self._hosts:
            raise ApiError(
                403,
                f"requests for host {host[:100]!r} are refused; use the address that the server listens on",
                code="wrong_host",
            )
        if origin is None:
            return
        with suppress(ValueError):  # not an address
            if urlsplit(origin).netloc.lower() == host:
                return
        raise ApiError(
            403,
            f"pages of {origin[:100]!r} may not call this server; allow them with --cors-origin",
            code="wrong_origin",
        )


def _check_form(scope: Scope, headers: Headers) -> None:
    """Refuse requests that the HTTP parser accepts."""
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    if size + sum(len(name) + len(value) + 4 for name, value in headers.raw) > HEADER_BYTES:
        raise ApiError(431, f"the headers are larger than {HEADER_BYTES} bytes", headers=CLOSE)
    if scope.get("http_version") not in ("1.0", "1.1", "2", "3"):
        raise ApiError(400, "this HTTP version is not supported; use HTTP/1.1", headers=CLOSE)
    if "content-length" in headers and "transfer-encoding" in headers:
        # Request smuggling: a proxy may use one of them and this server the other.
        raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other", headers=CLOSE)
