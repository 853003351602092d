"""The Ray shell of one engine: placement, ranks, controller, delivery (contract: A1, A4, A5).

`EngineHost` is what any Ray actor inside a suitable placement group can be; `Engine` is the body of
the Serve deployment, whose options `engine_options` derives from the configuration. A fault is
sticky: the engine answers every open call, kills its ranks, reports itself unhealthy, and Serve
replaces the whole replica.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from typing import Any

import msgspec
import ray
from ray import serve

from flare_ray.actors.cache_notice import CacheNotice
from flare_ray.actors.core import EngineCore, EngineParts, new_engine_id
from flare_ray.actors.directory import BEAT_S, EngineDirectory, EngineRecord, EngineReport
from flare_ray.actors.grammar.service import CompilingService, start_service
from flare_ray.actors.placement import ENGINE_DEPLOYMENT, check_apart, own_placement_group
from flare_ray.actors.prefix_router import router_options, routing_stats
from flare_ray.actors.preflight import CONTROLLER_CPUS, engine_bundles
from flare_ray.actors.rank import PrepareRank, prepare_on_device
from flare_ray.actors.ranks import Ranks, start_ranks
from flare_ray.actors.scaling import autoscaling_options, engine_stats
from flare_ray.actors.stream import StreamSender
from flare_ray.actors.vocabulary import engine_token_bytes
from flare_ray.config import DeploymentConfig
from flare_ray.config.live import LiveSettings
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.messages import Failed, Finished, StreamItem
from flare_ray.contracts.request import GenerationRequest
from flare_ray.contracts.routing import Route
from flare_ray.contracts.tiers import Tier
from flare_ray.errors import FlareError, InvalidRequest, Overloaded, RankFailure
from flare_ray.metrics.export import render

logger = logging.getLogger("ray.serve.flare")

SECRET_BYTES = 32
SPARE_CALLS = 64
"""Open calls beyond slots and queue that Serve still hands over, so that the controller answers an
overload with 429 instead of Serve queueing it out of sight."""
SERVE_PROBE_S = 10.0
"""Seconds in which a health check must return; it waits for no round, so a miss means a process
that gets no CPU at all."""

_decode_request = msgspec.msgpack.Decoder(GenerationRequest).decode
_encode = msgspec.msgpack.Encoder().encode


class EngineHost:
    """One engine inside a Ray actor. `start` blocks; the other methods do not wait for rounds.

    Args:
        config: the whole deployment.
        application: under which the engine is listed in the `EngineDirectory`.
        prepare: how ranks build their executors; other than the default in tests of actors alone.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        application: str,
        *,
        prepare: PrepareRank = prepare_on_device,
    ) -> None:
        self.config = config
        self.engine_id = new_engine_id()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._prepare = prepare
        self._directory = EngineDirectory(application)
        self._notice = CacheNotice(application)
        self._last_reset = ""
        self._group = own_placement_group(config)
        self._ranks: Ranks | None = None
        self._core: EngineCore | None = None
        self._record: EngineRecord | None = None
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._reporter = threading.Thread(
            target=self._report, name="flare-engine-report", daemon=True
        )

    def start(self) -> bytes:
        """Start ranks and controller, generate once, announce the engine; its `engine_info`.

        Raises:
            FlareError: what keeps the engine from starting; nothing of it is left running.
        """
        started_s = time.monotonic()
        check_apart(self.config.engine)  # the files may have changed since the last start
        ranks = start_ranks(self.config, self._group, self._prepare)
        grammars: CompilingService | None = None
        try:
            grammars, no_grammars = start_service(self.config.engine, ranks.manifest)
            parts = EngineParts(
                manifest=ranks.manifest,
                config=self.config.engine,
                channel=ranks.channel,
                token_bytes=engine_token_bytes(self.config.engine, ranks.manifest),
                release_ranks=ranks.kill,
                health_timeout_s=self.config.engine_deployment.health_timeout_s,
                grammars=grammars,
                no_grammars=no_grammars,
                engine_id=self.engine_id,
            )
            core = EngineCore(parts, stream=StreamSender(self.engine_id, self._secret))
            core.start()
        except BaseException:
            ranks.channel.close()
            ranks.kill()
            if grammars is not None:
                grammars.close()
            raise
        self._ranks, self._core = ranks, core
        self._record = self._make_record(core.manifest)
        self._directory.sweep()
        self._directory.publish(self._record)
        self._reporter.start()
        logger.info(
            "engine %s: ready after %.1f s, ranks %s",
            self.engine_id,
            time.monotonic() - started_s,
            [(place.pid, place.gpu_ids) for place in ranks.places],
        )
        return _encode(self._record)

    async def submit(self, request_bytes: bytes, route: Route | None = None) -> bytes:
        """Run one request; open until it has ended, so that Serve's queues, autoscaling, draining
        and cancellation see it (design/ray-serve.md section 2).

        Its output goes to its `reply_to`. Cancelling the call cancels the request.

        Args:
            request_bytes: msgpack `GenerationRequest`.
            route: how this engine was chosen; None = by Serve's own router.

        Returns:
            msgpack `Finished` or `Failed`; refusals are `Failed` too.
        """
        request = _decode_request(request_bytes)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Finished | Failed] = loop.create_future()

        def resolve(item: Finished | Failed) -> None:
            if not ended.done():
                ended.set_result(item)

        def on_item(item: StreamItem) -> None:
            if isinstance(item, Finished | Failed):
                try:
                    loop.call_soon_threadsafe(resolve, item)
                except RuntimeError:
                    logger.warning("request %s ended after its loop", request.request_id)

        core = self._core
        if core is None:
            return _encode(_refusal(request.request_id, _not_ready("it is starting")))
        if route is not None and route.choice is not None:
            core.count_route(route.choice)
        try:
            core.submit(request, on_item)
        except FlareError as error:
            return _encode(_refusal(request.request_id, error))
        try:
            item = await ended
        except asyncio.CancelledError:
            core.cancel(request.request_id)
            logger.info("request %s: its call was cancelled", request.request_id)
            raise
        _log_end(item)
        return _encode(item)

    async def engine_info(self) -> bytes:
        """msgpack `EngineRecord`: identity, stream secret, manifest.

        Raises:
            Overloaded: status 503: the engine is not ready.
        """
        if self._core is None or self._record is None or not self._core.ready:
            raise _not_ready(self._core.fatal if self._core is not None else "it is starting")
        return _encode(self._record)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take live settings (`LiveSettings`); called by Serve with `user_config` once the engine
        has started and at each change, without a restart.

        Raises:
            ValueError, ConfigError: what is wrong with them; those before stay in force.
        """
        settings = LiveSettings.model_validate(user_config)
        if self._core is None:
            raise _not_ready("it is starting")
        self._core.reconfigure(settings)

    def check_health(self) -> None:
        """Raise if the engine has failed or makes no progress; called by Serve, waits for nothing.

        Raises:
            RankFailure: what is wrong.
        """
        if self._core is not None:
            self._core.health()

    def metrics_text(self) -> str:
        """Prometheus text of this engine alone."""
        snapshots = [self._core.snapshot()] if self._core is not None else []
        text = render(
            snapshots, model_name=self.config.model_name, compat=self.config.compat_metrics
        )
        return text.decode()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Load of this engine for the autoscaling policy; called by Serve."""
        return {} if self._core is None else engine_stats(self._core.stats())

    def record_routing_stats(self) -> dict[str, Any]:
        """Readiness and load for the routers; called by Serve."""
        if self._core is None:
            return routing_stats(ready=False, open_requests=0)
        stats = self._core.stats()
        return routing_stats(ready=self._core.ready, open_requests=stats.running + stats.waiting)

    def rank_pids(self) -> list[int]:
        """Process ids of the ranks, by rank; empty before `start`."""
        return [place.pid for place in self._ranks.places] if self._ranks is not None else []

    def close(self, drain_s: float = 0.0) -> None:
        """Stop taking requests, let running ones end for `drain_s`, end ranks; idempotent."""
        with self._close_lock:
            if self._closing.is_set():
                return
            self._closing.set()
        if self._core is not None:
            self._core.shutdown(drain_s)
            self._reporter.join(2 * BEAT_S)
            self._directory.withdraw(self.engine_id)

    def _make_record(self, manifest: PreparedManifest) -> EngineRecord:
        limit = self.config.engine.admission.max_prompt_tokens
        longest = manifest.context_tokens - 1
        return EngineRecord(
            engine_id=self.engine_id,
            secret=self._secret,
            actor_id=ray.get_runtime_context().get_actor_id() or "",
            manifest=manifest,
            max_prompt_tokens=longest if limit is None else min(limit, longest),
            started_s=time.time(),
        )

    def _report(self) -> None:
        """Thread: write load and metrics to the directory each second."""
        core = self._core
        assert core is not None
        while not self._closing.is_set():
            stats = core.stats()
            report = EngineReport(
                engine_id=self.engine_id,
                time_s=time.time(),
                ready=core.ready,
                running=stats.running,
                waiting=stats.waiting,
                free_pages=stats.free_pages,
                total_pages=stats.total_pages,
                metrics=core.snapshot(),
                cache=core.cache_stats(),
            )
            try:
                self._directory.report(report)
                self._heed_reset(core)
            except Exception:
                # The control service may be away for a moment; rounds go on without it.
                logger.exception("engine %s could not report", self.engine_id)
            self._closing.wait(BEAT_S)

    def _heed_reset(self, core: EngineCore) -> None:
        """Do a reset of the prefix cache that every engine is asked for, once."""
        notice = self._notice.asked(self._last_reset)
        if notice is None or core.fatal:
            return
        self._last_reset = notice.notice_id
        reset = core.reset_cache(frozenset(map(Tier, notice.tiers)))
        self._notice.answer(self.engine_id, notice, reset)
        logger.info("engine %s: prefix cache reset, dropped %s", self.engine_id, reset.dropped)


class Engine(EngineHost):
    """Body of the Serve deployment of engines; bound with `engine_options(config)`."""

    async def __init__(self, config: DeploymentConfig) -> None:  # type: ignore[misc]
        # Serve awaits constructors; ranks load on a thread so that probes are answered meanwhile.
        super().__init__(config, serve.get_replica_context().app_name)
        await asyncio.to_thread(self.start)

    def __del__(self) -> None:
        """Called by Serve after it has drained the replica's calls, or when start-up failed."""
        if hasattr(self, "_closing"):
            self.close()


def engine_options(config: DeploymentConfig) -> dict[str, Any]:
    """Options of `serve.deployment` for `Engine`."""
    deployment, engine = config.engine_deployment, config.engine
    options: dict[str, Any] = {"num_replicas": deployment.replicas}
    if (scaling := autoscaling_options(config)) is not None:
        options = {"autoscaling_config": scaling}
    if (router := router_options(config.ingress.routing)) is not None:
        options["request_router_config"] = router
    return {
        "name": ENGINE_DEPLOYMENT,
        **options,
        "max_ongoing_requests": engine.concurrency + engine.admission.max_waiting + SPARE_CALLS,
        "health_check_period_s": deployment.health_period_s,
        "health_check_timeout_s": SERVE_PROBE_S,
        "graceful_shutdown_timeout_s": deployment.graceful_shutdown_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "ray_actor_options": {"num_cpus": CONTROLLER_CPUS},
        "placement_group_bundles": engine_bundles(config),
        "placement_group_strategy": "STRICT_PACK",
    }


def _log_end(item: Finished | Failed) -> None:
    """One line per request; counts only, never text."""
    if isinstance(item, Finished):
        logger.info(
            "request %s finished (%s): %d prompt tokens, %d completion tokens in %d rounds",
            item.request_id,
            item.reason,
            item.prompt_tokens,
            item.completion_tokens,
            item.rounds,
        )
    else:
        logger.warning(
            "request %s failed (%s %d): %s", item.request_id, item.code, item.status, item.message
        )


def _not_ready(why: str) -> Overloaded:
    return Overloaded(f"the engine is not ready: {why}", retry_after_s=2.0, status=503)


def _refusal(request_id: str, error: FlareError) -> Failed:
    """The value that says what `error` says."""
    message = str(error)
    if isinstance(error, InvalidRequest):
        return Failed(request_id, error.code, message, status=error.status, param=error.param)
    if isinstance(error, Overloaded):
        return Failed(
            request_id,
            "overloaded",
            message,
            status=error.status,
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, RankFailure):
        return Failed(request_id, "rank_failure", message, status=503)
    return Failed(request_id, "internal_error", message)
