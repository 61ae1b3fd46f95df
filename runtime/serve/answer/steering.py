"""Changing tau of running streams, by their ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...decode.config import GenerationConfig
from ...errors import MarsError
from ..ask.fields import Field, flag, read_fields, setting
from ..refusals import Refused
from .protocols.reply import Reply

FIELDS = {"tau": Field(setting), "exact": Field(flag)}


class Streams:
    """The running streams of one server. For its event loop only."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Reply, int | None]] = {}

    def add(self, reply: Reply, client: int | None) -> None:
        self._running[reply.id] = reply, client

    def drop(self, reply: Reply) -> None:
        self._running.pop(reply.id, None)

    def steer(self, name: str, client: int | None, body: Mapping[str, Any]) -> dict[str, Any]:
        """Set tau or exact mode from the next step on, and return the settings. Clients steer their own
        streams only.
        """
        reply, owner = self._running.get(name, (None, None))
        if reply is None or owner != client:
            raise Refused(404, f"no stream {name[:80]!r} is running", param="id", code="stream_not_found")
        values, _ = read_fields(body, FIELDS)
        tau, exact = values.get("tau"), values.get("exact")
        if (tau is None) == (exact is None) or exact is False:
            raise Refused(400, 'send either {"tau": NUMBER} or {"exact": true}', param="tau")
        session = reply.admitted.model.session
        try:
            session.check(GenerationConfig(tau=tau) if exact is None else GenerationConfig(exact=True))
            for request in reply.admitted.requests:
                if tau is not None:
                    request.tau = tau
                else:
                    request.exact = True
        except MarsError as error:
            raise Refused.of(error, "tau" if exact is None else "exact") from None
        return {"id": name, "mars": reply.settings()}
