"""Serve's request router for the engine deployment: prefix affinity, queue length, KV memory.

The decision is :class:`ops.ray.fleet.ReplicaFleet`, which is that for remote workers; this is its shell
inside Serve.
It runs in each ingress replica, on Serve's own loop there. Serve sends the class itself to other
processes, with this module's globals: they stay few.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gateway.backends.workers.worker_choice import WorkerChoice, WorkerView
from ops.ray.fleet import ReplicaFleet
from ops.ray.wire import RouterHint, decode_route

GENERATE = "generate"


class PrefixRouter(RequestRouter):
    """Ranks the replicas for a call; Serve takes the first rank that has room.

    Serve keeps the lengths of the queues: each replica tells its own when it takes or refuses a call, and
    calls from here are counted at once. What a replica's KV memory is used to comes with its routing stats.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with ``request_router_kwargs``, which are :class:`WorkerChoice`'s."""
        self._by_name: dict[str, RunningReplica] = {}
        self._fleet = ReplicaFleet(
            WorkerChoice((), **kwargs), view=self._view, clock=time.monotonic, random=random.Random()
        )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The deployment's replicas are these now."""
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._fleet.resize(list(self._by_name))
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best replica, then others; all others once Serve found no room with those it was given.

        Those that failed the request or are not ready come last.
        """
        if pending_request is None:
            return [candidate_replicas]
        # Whoever is asked again for a call gave ranks without room. Serve pauses between two further rounds.
        context = pending_request.routing_context
        again, context.should_backoff = context.should_backoff, True
        route = _route_of(pending_request)
        placed = self._fleet.place(route.wish, route.avoid, whole=again)
        best = [] if placed.best is None else [self._by_name[placed.best]]
        ranks = [best, [self._by_name[name] for name in placed.others]]
        if placed.whole:
            good = {placed.best, *placed.others}
            ranks.append([one for one in candidate_replicas if one.replica_id.unique_id not in good])
        return ranks

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken the call: its cache will hold the prompt."""
        if pending_request.metadata.call_method == GENERATE and replica_id in self.curr_replicas:
            self._fleet.sent(replica_id.unique_id, _route_of(pending_request).wish)

    def _view(self, name: str) -> WorkerView | None:
        replica = self._by_name.get(name)
        # Serve takes a replica that has died from its own table before it tells of the new ones.
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
    return decode_route(args[0])
