"""Calls from a front to the replicas of one bundle, over Ray."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from ray.exceptions import (
    NodeDiedError,
    OwnerDiedError,
    RayActorError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from ..refusals import Refused, busy
from .call import Call, Lost, Part, Whole

LOG = logging.getLogger("mars_export.serve")
LOST = (
    *(RayActorError, WorkerCrashedError, NodeDiedError, OwnerDiedError, TaskCancelledError),
    ReplicaUnavailableError,
)
RETRY = 5.0  # seconds until a client should try again
PATIENCE = 3.0  # seconds for the answers of all replicas


class HandlePool:
    """A ReplicaPool over a Ray handle."""

    def __init__(self, name: str, handle: DeploymentHandle[Any]) -> None:
        self.name, self._handle = name, handle
        self._answers = handle.options(method_name="answer", stream=True)

    async def send(self, call: Call) -> AsyncGenerator[Part, None]:
        """The parts of one replica's answer. Raises Lost, and Refused if all replicas are full."""
        response = self._answers.remote(call)
        try:
            async for part in response:
                yield part
        except LOST as error:
            LOG.warning("%s: a replica was lost: %s", self.name, type(error).__name__)
            raise Lost from error
        except BackPressureError:
            raise busy(f"too many requests wait already; try again in {RETRY:g} s", RETRY) from None
        except DeploymentUnavailableError:
            raise Refused(
                503, f"{self.name} cannot be served; see the cluster's log", code="failed"
            ) from None
        except RayTaskError as error:
            LOG.error("%s: an answer failed: %s", self.name, type(error.cause).__name__)
            raise Refused(500, "the answer failed inside the server; see its log", code="failed") from None
        finally:
            with suppress(Exception):  # the call may have ended before it was sent
                response.cancel()

    async def ask(self, call: Call) -> list[Whole]:
        """The answers of all replicas that answer."""
        try:
            answers = await self._handle.broadcast("whole", call).results_async(
                timeout_s=PATIENCE, return_exceptions=True
            )
        except Exception as error:  # no replica is running, or not all answered
            LOG.warning("%s: no answer of all replicas: %s", self.name, type(error).__name__)
            return []
        return [answer for answer in answers if isinstance(answer, Whole)]
