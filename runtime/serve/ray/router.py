"""Ray's choice of a replica: requests of a conversation go to one replica, others to the less busy of two."""

from __future__ import annotations

import random
from hashlib import blake2b

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


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
