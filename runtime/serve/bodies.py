"""The JSON body of a request, read within limits of size, time and depth. Knows no field."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from .refusals import CLOSE, Refused

MOST_DEPTH = 80  # lists and objects in one another: a schema may have 64, inside of a request
LONG = 64 * 1024  # bytes that are parsed beside the event loop
PATIENCE = 4  # bodies of `most` bytes that are read to their end before they are refused


async def read_json(request: Request, most: int, seconds: float) -> dict[str, Any]:
    """The object that the body is. Raises Refused for every other body."""
    data = await read_body(request, most, seconds)
    return await asyncio.to_thread(parse, data) if len(data) > LONG else parse(data)


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """At most `most` bytes that come within `seconds`."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(415, "compressed bodies are not taken; send plain JSON", headers=CLOSE)
    try:
        said = int(request.headers.get("content-length") or 0)
    except ValueError:
        said = 0  # the HTTP parser has refused it
    try:
        async with asyncio.timeout(seconds):
            return await _whole(request, most, said)
    except TimeoutError:
        raise Refused(
            408, f"the body did not come within {seconds:g} s; send it faster", headers=CLOSE
        ) from None


async def _whole(request: Request, most: int, said: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    too_large = Refused(413, f"the body is larger than {most} bytes; send less", headers=CLOSE)
    if said > PATIENCE * most:
        raise too_large
    try:
        # What is too large is read all the same, for a while: a client that still sends reads no answer.
        async for piece in request.stream():
            size += len(piece)
            if size <= most:
                pieces.append(piece)
            elif size > PATIENCE * most:
                break
    except ClientDisconnect:
        raise Refused(499, "the client went away") from None
    if size > most:
        raise too_large
    return b"".join(pieces)


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` spells."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_number)
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
