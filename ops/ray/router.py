"""Serve's request router for the engine deployment: prefix affinity, queue length, KV memory.

:class:`ops.ray.fleet.ReplicaFleet` decides; this class runs it on Serve's event loop in each ingress replica.
Serve pickles the class together with the module's globals, so there are few of them.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gateway.backends.workers.worker_choice import WorkerChoice, WorkerView
from ops.ray.fleet import ReplicaFleet
from ops.ray.wire import RouterHint, decode_hint

GENERATE = "generate"


class PrefixRouter(RequestRouter):
    """Ranks the replicas for a call; Serve takes the first rank that has room.

    Serve knows the queue lengths: a replica reports its own when it accepts or refuses a call, and calls from
    here are counted immediately. The KV memory in use is in a replica's routing stats.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with ``request_router_kwargs``, which are arguments of :class:`WorkerChoice`."""
        self._by_name: dict[str, RunningReplica] = {}
        self._fleet = ReplicaFleet(
            WorkerChoice((), **kwargs), view=self._view, clock=time.monotonic, random=random.Random()
        )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._fleet.resize(list(self._by_name))
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best replica, then others, then those that failed the request or are not ready."""
        if pending_request is None:
            return [candidate_replicas]
        # In a second call for the same request, the first ranks had no room. Serve pauses before more rounds.
        context = pending_request.routing_context
        again, context.should_backoff = context.should_backoff, True
        route = _route_of(pending_request)
        placed = self._fleet.place(route.preference, route.avoid, whole=again)
        best = [] if placed.best is None else [self._by_name[placed.best]]
        ranks = [best, [self._by_name[name] for name in placed.others]]
        if placed.whole:
            good = {placed.best, *placed.others}
            ranks.append([one for one in candidate_replicas if one.replica_id.unique_id not in good])
        return ranks

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record that a replica accepted the call, so that its cache will have the prompt."""
        if pending_request.metadata.call_method == GENERATE and replica_id in self.curr_replicas:
            self._fleet.sent(replica_id.unique_id, _route_of(pending_request).preference)

    def _view(self, name: str) -> WorkerView | None:
        replica = self._by_name.get(name)
        # Serve removes a dead replica from its own table before it reports the new ones.
        if replica is None or replica.replica_id not in self.curr_replicas:
            return None
        reported = replica.routing_stats
        if not reported.get("ready", True):
            return None
        length = self.replica_queue_len_cache.get(replica.replica_id)
        requests = float(reported.get("requests", 0.0)) if length is None else float(length)
        return WorkerView(name, requests, float(reported.get("kv_usage", 0.0)))


def _route_of(pending_request: PendingRequest) -> RouterHint:
    args: Sequence[Any] = pending_request.args
    if pending_request.metadata.call_method != GENERATE or not args:
        return RouterHint()
    return decode_hint(args[0])
