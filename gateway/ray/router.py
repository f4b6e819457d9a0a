"""Serve's request router for the engine deployment: prefix affinity, queue length, KV memory.

The decision is :class:`gateway.backends.workers.choice.Choice`, the same as for remote workers; this is its
shell inside Serve. It runs in each ingress replica, on Serve's own loop there. Serve sends the class itself
to other processes, with this module's globals: they stay few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gateway.backends.workers.choice import Choice, WorkerView
from gateway.ray.wire import Route, decode_route

GENERATE = "generate"


class PrefixRouter(RequestRouter):
    """Ranks the replicas for a call; Serve takes the first rank that has room.

    Serve keeps the lengths of the queues: each replica tells its own when it takes or refuses a call, and
    calls from here are counted at once. What a replica's KV memory is used to comes with its routing stats.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with ``request_router_kwargs``, which are :class:`Choice`'s."""
        self._choice = Choice((), **kwargs)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The deployment's replicas are these now."""
        self._choice.resize([replica.replica_id.unique_id for replica in replicas])
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best replica, then all the others, then those that failed the request or are not ready."""
        if pending_request is None:
            return [candidate_replicas]
        # Serve's own pause between two rounds in which no replica had room.
        pending_request.routing_context.should_backoff = True
        route = _route_of(pending_request)
        good = [one for one in candidate_replicas if self._serves(one, route)]
        rest = [one for one in candidate_replicas if one not in good]
        name = self._choice.choose(route.wish, [self._view(one) for one in good])
        best = [one for one in good if one.replica_id.unique_id == name]
        return [best, [one for one in good if one not in best], rest]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken the call: its cache will hold the prompt."""
        if pending_request.metadata.call_method == GENERATE and replica_id in self.curr_replicas:
            self._choice.sent(replica_id.unique_id, _route_of(pending_request).wish)

    def _serves(self, replica: RunningReplica, route: Route) -> bool:
        told = replica.routing_stats
        return bool(told.get("ready", True)) and replica.replica_id.unique_id not in route.avoid

    def _view(self, replica: RunningReplica) -> WorkerView:
        told = replica.routing_stats
        length = self.replica_queue_len_cache.get(replica.replica_id)
        requests = float(told.get("requests", 0.0)) if length is None else float(length)
        return WorkerView(replica.replica_id.unique_id, requests, float(told.get("kv_usage", 0.0)))


def _route_of(pending_request: PendingRequest) -> Route:
    args: Sequence[Any] = pending_request.args
    if pending_request.metadata.call_method != GENERATE or not args:
        return Route()
    return decode_route(args[0])
