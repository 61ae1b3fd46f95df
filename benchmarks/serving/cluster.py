"""A Ray cluster of two nodes on this machine: a head without CPUs and a worker, and optionally a Redis that
keeps the head's state.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from serving.server import family

GCS = b"gcs_server"
START = 120.0  # seconds for a node
# A node is the process whose children all its processes become, as a container's first process has them.
NODE = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
code = subprocess.call(sys.argv[1:])
print("started" if code == 0 else f"ended with code {code}", flush=True)
while code == 0:
    try:
        os.wait()
    except ChildProcessError:
        break
sys.exit(code)
"""
# What `serve deploy` does; that one needs Ray's dashboard.
DEPLOY = """
import json, sys
import ray
from ray import serve
from mars_export.runtime.serve.ray.application import build
ray.init(address="auto")
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])}, proxy_location="EveryNode")
serve.run(build(json.loads(sys.argv[2])), name="mars", route_prefix="/")
"""
DEPLOYED = 300.0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:  # ended meanwhile
        return b""


def end(pid: int) -> None:
    """At once, with all its descendants."""
    for each in [*family(pid)][::-1]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Gcs:
    """How the head's controller of the cluster was started."""

    words: list[bytes]
    environment: dict[bytes, bytes]


class Cluster:
    """`with Cluster(python, has_redis=True) as cluster`; `python` has the extra ray, and the nodes may use
    `num_cpus` in all. `environment` is for whoever calls it: with the cluster's token and address.

    `port` is that of the worker's proxy, which outlives the head; the head's is `head_port`.
    """

    def __init__(self, python: str, num_cpus: int, *, has_redis: bool) -> None:
        self._python, self._num_cpus, self._has_redis = python, num_cpus, has_redis
        self._gcs_port, self._redis_port, self.port, self.head_port, self._client_port = free_ports(5)
        self.address = f"127.0.0.1:{self._gcs_port}"
        self._password = secrets.token_hex(16)
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": self.address,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.port),
            "RAY_worker_niceness": "0",  # Ray's own 15 would starve replicas on a busy machine
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # on a busy machine a proxy takes longer than 5
        }
        self._redis_address = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{self._redis_port}"} if has_redis else {}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="mars-ray-"))  # short: sockets lie in it
        try:
            if self._has_redis:
                self._start_redis()
            self.start_head()
            self.start_worker()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    # --- nodes ---

    def start_head(self) -> None:
        """Anew, where one was killed: at the same address, with the state that Redis has."""
        # Of the head before: where other nodes run beside it, Ray would take it for one that runs.
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)
        words = ["--head", "--port", str(self._gcs_port), "--num-cpus", "0"]
        words += ["--include-dashboard", "false", "--ray-client-server-port", str(self._client_port)]
        words += ["--redis-password", self._password] if self._has_redis else []
        self._start("head", words, self._redis_address)

    def start_worker(self) -> None:
        """It waits as long for a head as KubeRay has its workers wait; by itself it would for a minute."""
        words = ["--address", self.address, "--num-cpus", str(self._num_cpus)]
        self._start("worker", words, {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"})

    def kill(self, node: str) -> None:
        """Every process of it, as of a machine that is gone."""
        process = self._nodes.pop(node)
        end(process.pid)
        process.wait()

    def kill_gcs(self) -> Gcs:
        """The head's controller of the cluster, and nothing else."""
        [pid] = self.processes("head", GCS)
        folder = Path(f"/proc/{pid}")
        words = folder.joinpath("cmdline").read_bytes().split(b"\0")[:-1]
        pairs = folder.joinpath("environ").read_bytes().split(b"\0")[:-1]
        os.kill(pid, signal.SIGKILL)
        return Gcs(words, dict(pair.split(b"=", 1) for pair in pairs))  # type: ignore[arg-type]

    def start_gcs(self, gone: Gcs) -> None:
        """As it was started before; what `ray start` does not do, a supervisor does."""
        self._popen("gcs", gone.words, gone.environment)

    def deploy(self, arguments: Mapping[str, Any]) -> None:
        """A fleet from the arguments of its configuration; back when all replicas are there."""
        words = [self._python, "-c", DEPLOY, str(self.head_port), json.dumps(arguments)]
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=DEPLOYED, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"error: the fleet was not deployed:\n{done.stderr[-2000:]}")

    def processes(self, node: str, name: bytes) -> list[int]:
        """Of a node, whose command has that name in it."""
        return sorted(pid for pid in family(self._nodes[node].pid) if name in _command(pid))

    def log(self, node: str) -> str:
        return (self.folder / f"{node}.log").read_text(encoding="utf-8", errors="replace")

    # --- processes ---

    def _start(self, node: str, words: Sequence[str], more: Mapping[str, str]) -> None:
        ray = [self._python, "-m", "ray.scripts.scripts", "start", *words]
        ray += ["--node-ip-address", "127.0.0.1", "--min-worker-port", "0", "--max-worker-port", "0"]
        ray += ["--temp-dir", str(self.folder), "--disable-usage-stats"]
        ray += ["--object-store-memory", str(100 << 20)]
        self._popen(node, [sys.executable, "-c", NODE, *ray], {**self.environment, **more})
        self._wait(node, "started")

    def _start_redis(self) -> None:
        words = ["redis-server", "--bind", "127.0.0.1", "--port", str(self._redis_port), "--save", ""]
        words += ["--dir", str(self.folder), "--requirepass", self._password]
        self._popen("redis", words, os.environ)
        self._wait("redis", "Ready to accept connections")

    def _popen(self, name: str, words: Sequence[str | bytes], environment: Mapping[Any, Any]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._nodes[name] = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, name: str, word: str) -> None:
        until = monotonic() + START
        while not any(line.endswith(word) for line in self.log(name).splitlines()):
            if self._nodes[name].poll() is not None or monotonic() > until:
                raise SystemExit(f"error: {name} did not start:\n{self.log(name)[-2000:]}")
            sleep(0.1)

    def _end(self) -> None:
        for name in [*self._nodes]:
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)
