"""Serve's request router for engines; the choice itself is `controller.fleet.affinity`.

It runs in every HTTP replica, beside the handle of the engines. Serve takes dead and draining
replicas out of its list; whether one is ready comes from the engine's `record_routing_stats`.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from flare_ray.config import RoutingConfig
from flare_ray.contracts.routing import Choice, Route
from flare_ray.controller.fleet.affinity import (
    EngineLoad,
    KnownPrefixes,
    LoadGuard,
    choose,
)

STATS_PERIOD_S = 1.0
"""Seconds between two looks of Serve's controller at an engine's `routing_stats`."""
PATIENCE = 4
"""Times that a request's own engine is proposed while it does not say how loaded it is; Serve waits
0.1, 0.2, 0.4 and 0.8 s for that."""
READY = "ready"
OPEN = "open"


class PrefixRouter(RequestRouter):
    """Keeps a conversation, and prompts that begin alike, on one engine.

    Serve matches a chosen replica with the request it was chosen for, since this class leaves
    out `FIFOMixin`.
    """

    def initialize_state(  # type: ignore[override]  # Serve's own takes any keyword
        self, *, load_factor: float, spare_requests: int, known_prefixes: int
    ) -> None:
        """Called by Serve with what `router_options` says."""
        self._guard = LoadGuard(load_factor, spare_requests)
        self._known = KnownPrefixes(known_prefixes)
        self._dice = random.Random()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one or two replicas that may take a request; asked again until one says that it has
        room, which on a busy host takes longer than Serve waits at first (0.1 s)."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not replicas or pending_request is None:
            return [candidate_replicas]
        loads = [self._load(name, replica) for name, replica in replicas.items()]
        pending_request.routing_context.should_backoff = True  # Serve pauses before it asks again
        route = _route_of(pending_request)
        route.asked += 1
        silent = route.asked > PATIENCE
        asked = Route() if silent else route
        names, choice = choose(asked, loads, self._known, self._guard, self._dice)
        route.choice = Choice.GUARD if silent and route.keys else choice
        return [[replicas[name] for name in names]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Called by Serve once a replica has accepted a request."""
        self._known.note(_route_of(pending_request).keys, replica_id.unique_id)

    def _load(self, name: str, replica: RunningReplica) -> EngineLoad:
        stats = replica.routing_stats
        # Serve's own count is exact while this replica sends requests, and gone when it does not.
        counted = self.replica_queue_len_cache.get(replica.replica_id)
        count = int(stats.get(OPEN, 0) if counted is None else counted)
        has_room = count < replica.max_ongoing_requests
        return EngineLoad(name, count, has_room and bool(stats.get(READY, True)))


def routing_stats(*, ready: bool, open_requests: int) -> dict[str, Any]:
    """What an engine reports to the routers."""
    return {READY: ready, OPEN: open_requests}


def router_options(config: RoutingConfig) -> dict[str, Any] | None:
    """Serve's `request_router_config` of the engines, None for Serve's own router."""
    if config.by == "load":
        return None
    return {
        "request_router_class": f"{__name__}.{PrefixRouter.__name__}",
        "request_router_kwargs": {
            "load_factor": config.load_factor,
            "spare_requests": config.spare_requests,
            "known_prefixes": config.known_prefixes,
        },
        "request_routing_stats_period_s": STATS_PERIOD_S,
    }


def _route_of(pending_request: PendingRequest) -> Route:
    """The route among a call's arguments; calls that generate nothing have none."""
    found = [given for given in pending_request.args if isinstance(given, Route)]
    return found[0] if found else Route()
