"""The replicas of one bundle, as a front calls them: over Ray's handle."""

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
RETRY = 5.0  # seconds after which to ask again where all places are taken
PATIENCE = 3.0  # seconds for an answer of all replicas


class HandlePool:
    """Calls to any replica, and to all of them."""

    def __init__(self, name: str, handle: DeploymentHandle[Any]) -> None:
        self.name, self._handle = name, handle
        self._answers = handle.options(method_name="answer", stream=True)

    async def send(self, call: Call) -> AsyncGenerator[Part, None]:
        """The parts of one replica's answer. Raises Lost, and Refused where there is no place."""
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
            raise Refused(
                500, "the answer failed inside the server; its log says more", code="failed"
            ) from None
        finally:
            with suppress(Exception):  # of what ended before it was sent
                response.cancel()

    async def ask(self, call: Call) -> list[Whole]:
        """What all replicas say, of those that do."""
        try:
            said = await self._handle.broadcast("whole", call).results_async(
                timeout_s=PATIENCE, return_exceptions=True
            )
        except Exception as error:  # none is there, or not all answered
            LOG.warning("%s: no answer of all replicas: %s", self.name, type(error).__name__)
            return []
        return [each for each in said if isinstance(each, Whole)]
