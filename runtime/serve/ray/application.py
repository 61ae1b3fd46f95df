"""The Ray Serve application: every replica is a complete server, and keeps its conversations."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import ASGIApp

from ...errors import SessionError
from ..api_error import ApiError
from ..keys import read_keys
from ..models import read_bundles
from ..options import MAX_CONNECTIONS
from ..routes import app
from ..server import start_log
from .fleet import Fleet, read_fleet, read_replicas
from .shared_routes import SharedRoutes, steered


class ConversationRouter(RequestRouter):  # type: ignore[misc]
    """The header x-session-id names a conversation: its replica has its beginning in the prefix cache."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ranks = [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            if name := pending_request.metadata.session_id:

                def weight(replica: RunningReplica) -> bytes:
                    return blake2b(f"{name} {replica.replica_id.unique_id}".encode()).digest()

                ranks.insert(0, [max(candidate_replicas, key=weight, default=None)])
        return ranks


LOG = logging.getLogger("mars_export.serve")
PATIENCE = 5.0  # seconds for the answers of all replicas
LAST_WRITES = 10.0  # seconds after the drain, until a replica is killed
CONSTRUCTIONS = 3  # attempts of a replica to open its bundles
HEALTH_PERIOD, HEALTH_TIMEOUT = 5.0, 30.0


@serve.ingress()
class Replica:
    """Opens the bundles and warms up. Ray routes to it when the constructor has returned."""

    def __init__(self, fleet: Fleet) -> None:
        start_log(fleet.log_level, fleet.log_format)
        options = fleet.options
        if fleet.key_file is not None:
            options = replace(options, keys=read_keys(Path(fleet.key_file)))
        bundles = read_bundles(fleet.bundles, threads=fleet.threads, **fleet.session)
        self._app = app(bundles, options, partial(SharedRoutes, broadcast=broadcast))
        self._service = self._app.service
        self._service.models.warm()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def metrics(self) -> list[Any]:
        return self._service.metrics.families(serve.get_replica_context().replica_id.unique_id)

    async def steer(self, name: str, client: str | None, body: Any) -> tuple[int, dict[str, Any]]:
        return steered(self._service, name, client, body)

    async def check_health(self) -> None:
        """Run a step, unless one is running. Raises SessionError."""
        for model in self._service.models.opened.values():
            await asyncio.to_thread(model.check)
        if not self._service.models.is_ready:
            raise SessionError("a step hangs, or the batcher has ended")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.models.close(0)


async def broadcast(method: str, *arguments: Any) -> list[Any]:
    """The results of a method of all replicas that run. Raises ApiError."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    try:
        results = await handle.broadcast(method, *arguments).results_async(
            timeout_s=PATIENCE, return_exceptions=True
        )
    except Exception as error:
        LOG.warning("not all replicas answered: %s", type(error).__name__)
        results = []
    if answers := [result for result in results if not isinstance(result, BaseException)]:
        return answers
    raise ApiError(503, "not all replicas answer; try again", code="closing", headers={"retry-after": "5"})


def build(args: Mapping[str, Any]) -> Application:
    """The application of the `args` in a configuration file (docs/scale.md). Raises SessionError."""
    return application(read_fleet(args))


def application(fleet: Fleet) -> Application:
    smallest, largest = read_replicas(fleet.replicas)
    autoscaling = AutoscalingConfig(
        min_replicas=smallest,
        max_replicas=largest,
        target_ongoing_requests=max(1.0, 0.75 * fleet.options.limits.max_rows),
    )
    deployment = serve.deployment(
        Replica,
        name="mars",
        num_replicas="auto" if largest > smallest else smallest,
        autoscaling_config=autoscaling if largest > smallest else None,
        ray_actor_options={"num_cpus": fleet.threads, "num_gpus": fleet.gpus},
        max_ongoing_requests=MAX_CONNECTIONS,  # the replica refuses what its own queue has no place for
        graceful_shutdown_timeout_s=fleet.options.drain_timeout + LAST_WRITES,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        max_constructor_retry_count=CONSTRUCTIONS,
        request_router_config=RequestRouterConfig(request_router_class=ConversationRouter),
    )
    return deployment.bind(fleet)
