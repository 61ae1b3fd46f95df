"""Changing tau of running streams, by their ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...decode.config import GenerationConfig
from ...errors import MarsError
from ..refusals import Refused
from ..requests.fields import Field, flag, read_fields, setting
from .protocols.serializer import Serializer

FIELDS = {"tau": Field(setting), "exact": Field(flag)}
Streams = dict[str, tuple[Serializer, str | None]]
"""The running streams of a server by their ids, each with its client's digest (`Keys.find`)."""


def steer(streams: Streams, name: str, client: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
    """Set tau or exact mode from the next step on, and return the settings. Clients steer their own streams
    only.
    """
    serializer, owner = streams.get(name, (None, None))
    if serializer is None or owner != client:
        raise Refused(404, f"no stream {name[:80]!r} is running", param="id", code="stream_not_found")
    values, _ = read_fields(body, FIELDS)
    if len(values) != 1 or values.get("exact") is False:
        raise Refused(400, 'send either {"tau": NUMBER} or {"exact": true}', param="tau")
    [(field, value)] = values.items()
    try:
        serializer.admitted.model.session.check(GenerationConfig(**values))
        for request in serializer.admitted.requests:
            setattr(request, field, value)
    except MarsError as error:
        raise Refused.of(error, field) from None
    return {"id": name, "mars": serializer.settings()}
