"""Running a fleet on this machine until a signal, or deploying it to a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from ...bundle.open import open_bundle
from ...errors import MarsError
from ...machine import cores
from ..server import start_log
from .fleet import Fleet, read_replicas

LOG = logging.getLogger("mars_export.serve")
NAME = "mars"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # the default of 15 is for batch work
}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(fleet: Fleet, host: str, port: int, address: str | None, ready: Callable[[], None]) -> None:
    """Start Ray on this machine and serve until a signal. With `address`, deploy to that cluster instead,
    where the fleet replaces an earlier one, and return. `ready` is called when all replicas are ready.

    Raises MarsError if Ray is not installed or a bundle cannot be served.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve
        from ray.exceptions import RayError

        from .application import application
    except ModuleNotFoundError as error:
        raise MarsError(f"{error.name} is not installed: pip install 'mars-export[ray]'") from error
    if address is None:
        num_threads = read_replicas(fleet.replicas)[1] * fleet.threads
        if num_threads > cores():
            raise MarsError(
                f"all replicas need {num_threads} threads, and this machine has {cores()} cores; lower"
                " --replicas or --threads, or set --address to a cluster"
            )
        for path in fleet.bundles.values():
            open_bundle(path)  # report problems here, not in the log of a replica
    start_log(fleet.log_level, fleet.log_format)
    try:
        if address is None:
            ray.init(num_cpus=cores(), include_dashboard=False)
        else:
            ray.init(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise MarsError(f"no Ray at {address or 'this machine'}: {error}") from error
    stop = threading.Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    try:
        serve.start(http_options={"host": host, "port": port}, proxy_location="EveryNode")
        serve.run(application(fleet), name=NAME, route_prefix="/")
        ready()
        if address is None:
            while not stop.wait(1.0):
                pass
            LOG.info("closing: running answers get %g s", fleet.options.drain_timeout)
            _drain(serve, fleet.options.drain_timeout)
    except (RuntimeError, TimeoutError, RayError) as error:
        raise MarsError(f"the replicas could not be started: {error}") from error
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _drain(serve: Any, seconds: float) -> None:
    """End replicas after their answers. Ray's own shutdown ends its proxy, and every connection, first."""
    deadline = monotonic() + seconds
    try:
        serve.delete(NAME, _blocking=False)
        while NAME in serve.status().applications and monotonic() < deadline:
            sleep(0.1)
    except Exception as error:  # the signal reaches Ray's processes too
        LOG.warning("Ray ended before the running answers: %s", type(error).__name__)
