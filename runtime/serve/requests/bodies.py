"""Reading JSON bodies within limits of size, time and depth."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from ..refusals import CLOSE, Refused, busy

MAX_DEPTH = 80  # nesting: a schema may have 64 levels, inside of a request
LONG = 64 * 1024  # bytes; longer bodies are parsed in a thread
MAX_AT_ONCE = 64 << 20
PATIENCE = 4  # a client that still sends does not read the response: up to this multiple, it is read first


class Bodies:
    """Reads bodies of at most `most` bytes each, within `seconds`, and about MAX_AT_ONCE bytes at a time."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._reading, self._room = 0, max(MAX_AT_ONCE, 4 * most)

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body. Raises Refused for any other body."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refused(415, "compressed bodies are not supported; send plain JSON", headers=CLOSE)
        body = bytearray()
        try:
            await asyncio.wait_for(self._receive(request, body), self._seconds)
            return await asyncio.to_thread(parse, body) if len(body) > LONG else parse(body)
        except asyncio.TimeoutError:
            raise Refused(
                408, f"the body did not arrive within {self._seconds:g} s; send it faster", headers=CLOSE
            ) from None
        except ClientDisconnect:
            raise Refused(499, "the client disconnected") from None
        finally:
            self._reading -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        too_large = Refused(413, f"the body is larger than {self._most} bytes; send less", headers=CLOSE)
        size = 0
        if int(request.headers.get("content-length", "0")) > PATIENCE * self._most:
            raise too_large
        async for piece in request.stream():
            size += len(piece)
            if size <= self._most:
                body += piece
                self._reading += len(piece)
            if self._reading > self._room:
                raise busy("too many request bodies at once; try again in 1 s", 1.0, 503)
            if size > PATIENCE * self._most:
                break
        if size > self._most:
            raise too_large


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `body`."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not UTF-8 text ({error.reason} at {error.start})") from None
    except RecursionError:
        raise Refused(400, f"the body is nested more than {MAX_DEPTH} deep; make it flatter") from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object")
    if depth(value) > MAX_DEPTH:
        raise Refused(400, f"the body is nested more than {MAX_DEPTH} deep; make it flatter")
    return value


def depth(value: Any) -> int:
    """The nesting of lists and objects, counted up to MAX_DEPTH + 1."""
    levels, values = 0, [value]
    while values := [v for v in values if isinstance(v, dict | list)]:
        levels += 1
        if levels > MAX_DEPTH:
            break
        values = [inner for v in values for inner in (v.values() if isinstance(v, dict) else v)]
    return levels


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
