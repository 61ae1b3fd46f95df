"""The JSON body of a request, read within limits of size, time and depth. Knows no field."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from ..refusals import CLOSE, Refused, busy

MOST_DEPTH = 80  # lists and objects in one another: a schema may have 64, inside of a request
LONG = 64 * 1024  # bytes that are parsed beside the event loop
MOST_AT_ONCE = 64 << 20
PATIENCE = 4  # bodies of `most` bytes that are read to their end before they are refused


class Bodies:
    """Reads the bodies of one server: each of at most `most` bytes, within `seconds`, all that are being read
    at a time of at most `MOST_AT_ONCE` bytes.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._held, self._room = 0, max(MOST_AT_ONCE, 4 * most)

    async def read(self, request: Request) -> dict[str, Any]:
        """The object that the body is. Raises Refused for every other body."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refused(415, "compressed bodies are not taken; send plain JSON", headers=CLOSE)
        pieces: list[bytes] = []
        try:
            await asyncio.wait_for(self._whole(request, pieces), self._seconds)
            size = sum(map(len, pieces))
            return await asyncio.to_thread(parse, pieces) if size > LONG else parse(pieces)
        except asyncio.TimeoutError:
            raise Refused(
                408, f"the body did not come within {self._seconds:g} s; send it faster", headers=CLOSE
            ) from None
        finally:
            self._held -= sum(map(len, pieces))

    async def _whole(self, request: Request, pieces: list[bytes]) -> None:
        said = request.headers.get("content-length", "0")  # digits: the HTTP parser has seen to it
        too_large = Refused(413, f"the body is larger than {self._most} bytes; send less", headers=CLOSE)
        if len(said) > 18 or int(said) > PATIENCE * self._most:
            raise too_large
        size = 0
        try:
            # What is too large is read all the same, for a while: a client that still sends reads no answer.
            async for piece in request.stream():
                size += len(piece)
                if size <= self._most:
                    pieces.append(piece)
                    self._held += len(piece)
                if self._held > self._room:
                    raise busy("too many bodies come at once; try again in 1 s", 1.0, 503)
                if size > PATIENCE * self._most:
                    break
        except ClientDisconnect:
            raise Refused(499, "the client went away") from None
        if size > self._most:
            raise too_large


def parse(pieces: list[bytes]) -> dict[str, Any]:
    """The JSON object that `pieces` spell."""
    try:
        value = json.loads(b"".join(pieces).decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not UTF-8 text ({error.reason} at {error.start})") from None
    except RecursionError:
        raise Refused(400, f"the body is nested more than {MOST_DEPTH} deep; make it flatter") from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object")
    if depth(value) > MOST_DEPTH:
        raise Refused(400, f"the body is nested more than {MOST_DEPTH} deep; make it flatter")
    return value


def depth(value: Any) -> int:
    """How deep lists and objects lie in one another."""
    found, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        found += 1
        if found > MOST_DEPTH:
            break
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
