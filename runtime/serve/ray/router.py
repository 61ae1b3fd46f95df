"""Ray's choice of a replica: one that has read the prompt's beginning, else the less busy of two."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .affinity import Homes, choose
from .call import Call
from .front_metrics import routed


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """The router of one handle. Each front has its own, which learns from the front's requests only.

    Ray pickles this class by value, so that its helpers must be in other modules, which are pickled by name.
    """

    def initialize_state(self, model: str, bound: int) -> None:
        self._model, self._bound = model, bound
        self._homes, self._draw = Homes(), random.Random()
        self._running: dict[str, str] = {}  # replica of each running request from here

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        call = _call(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._load(replica) for name, replica in replicas.items()}
        keys = () if call is None else call.keys
        avoid = call.avoid if call is not None else frozenset()
        ranks = choose(self._homes, keys, loads, avoid, self._bound, self._draw)
        return [[replicas[name] for name in rank] for rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        replica, call = replica_id.unique_id, _call(pending_request)
        self._running[pending_request.metadata.internal_request_id] = replica
        if call is not None and call.keys:
            route = self._homes.why(call.keys, replica)
            self._homes.put(call.keys, replica)
            routed(self._model, route)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._running.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        lost = replica_id.unique_id
        self._homes.forget(lost)
        self._running = {request: replica for request, replica in self._running.items() if replica != lost}

    def _load(self, replica: RunningReplica) -> int:
        """Its requests: the last number that Ray saw, and at least those from here."""
        name: str = replica.replica_id.unique_id
        own = sum(replica_name == name for replica_name in self._running.values())
        return max(int(self.replica_queue_len_cache.get(replica.replica_id) or 0), own)


def _call(pending: PendingRequest | None) -> Call | None:
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Call) else None
