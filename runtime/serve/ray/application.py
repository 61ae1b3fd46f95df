"""The Ray Serve application: a deployment of replicas for each bundle, and a front."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import (
    NodeDiedError,
    OwnerDiedError,
    RayActorError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from ..door import Door
from ..logs import listen
from ..options import MOST_CONNECTIONS
from ..refusals import Refused, busy
from .call import Call, Lost, Part, Whole
from .fleet import Fleet, Share, read_fleet
from .front import Front, new_front
from .front_metrics import OF_PROCESS
from .replica import Replica, with_keys
from .router import PrefixRouter

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


FRONT = "mars-front"
LAST_WRITES = 10.0  # seconds after the drain, until a replica is killed
CONSTRUCTIONS = 3  # attempts of a replica to open its bundle
HEALTH_PERIOD, HEALTH_TIMEOUT = 5.0, 30.0
ENVIRONMENT = {"MARS_REPLICAS": "replicas", "MARS_THREADS": "threads", "MARS_MAX_ROWS": "max_rows"}


def build(args: Mapping[str, Any]) -> Application:
    """The application of the `args` in a configuration file (docs/scale.md). Raises SessionError."""
    return application(read_fleet(args))


def application(fleet: Fleet) -> Application:
    replicas = [_replicas(share, fleet) for share in fleet.shares]
    front = serve.deployment(
        serve.ingress(_builder(fleet))(Holder),
        name=FRONT,
        num_replicas=fleet.fronts,
        ray_actor_options={"num_cpus": fleet.front_cpus},
        max_ongoing_requests=MOST_CONNECTIONS,
        graceful_shutdown_timeout_s=fleet.options.drain + LAST_WRITES,
        max_surge_percent=100,
    )
    return front.bind(*replicas)


class Holder:
    """The front's deployment, bound to those of the replicas so that they are deployed too."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = replicas


def deployment_of(name: str) -> str:
    """The name of a bundle's deployment."""
    return f"mars-model-{name}"


def _replicas(share: Share, fleet: Fleet) -> Application:
    resources = {"num_cpus": share.threads, "num_gpus": share.gpus}
    grows = share.most > share.least
    autoscaling = AutoscalingConfig(
        min_replicas=share.least,
        max_replicas=share.most,
        target_ongoing_requests=max(1.0, 0.75 * fleet.options.limits.max_rows),
    )
    router = RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={"model": share.name, "bound": fleet.bound},
    )
    deployment = serve.deployment(
        Replica,
        name=deployment_of(share.name),
        num_replicas="auto" if grows else share.least,
        autoscaling_config=autoscaling if grows else None,
        ray_actor_options=resources,
        max_ongoing_requests=fleet.ongoing,
        max_queued_requests=fleet.options.limits.max_waiting,
        graceful_shutdown_timeout_s=fleet.options.drain + LAST_WRITES,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        max_constructor_retry_count=CONSTRUCTIONS,
        request_router_config=router,
    )
    return deployment.bind(share, fleet)


def _builder(fleet: Fleet) -> Callable[[], Any]:
    """A function that makes the front in its process."""

    def front() -> Any:
        return _new_front(fleet)  # this function is pickled, globals by name only

    return front


def _new_front(fleet: Fleet) -> Door[Front]:
    listen(fleet.log_level, fleet.log_format)
    app_name = serve.get_replica_context().app_name
    pools = {
        share.name: HandlePool(share.name, serve.get_deployment_handle(deployment_of(share.name), app_name))
        for share in fleet.shares
    }
    return new_front(pools, with_keys(fleet, is_front=True), OF_PROCESS)


def _from_environment() -> Mapping[str, Any]:
    """MARS_BUNDLES: paths with the separator of PATH; MARS_REPLICAS, MARS_THREADS, MARS_MAX_ROWS."""
    paths = [Path(path) for path in os.environ.get("MARS_BUNDLES", "").split(os.pathsep) if path]
    arguments: dict[str, Any] = {"bundles": {path.name.removesuffix(".bundle"): str(path) for path in paths}}
    for name, argument in ENVIRONMENT.items():
        if value := os.environ.get(name):
            arguments[argument] = int(value) if value.isdigit() else value
    return arguments


def __getattr__(name: str) -> Any:
    if name == "app":
        return build(_from_environment())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
