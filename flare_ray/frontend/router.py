"""`RemoteClient` over a Ray Serve handle, the replica's ZeroMQ socket and the engine directory.

Serve routes a call to an engine (`actors.prefix_router`), holds it while there is none, and cancels
it with its caller. The directory in the cluster's key-value store says which engines are ready and
holds their stream secrets and metrics (contract: A5).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import cast

import msgspec
import ray
from ray.exceptions import RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from flare_ray.actors.cache_notice import CacheNotice
from flare_ray.actors.directory import EngineDirectory, EngineRecord
from flare_ray.actors.draining import POLL_S, Drain, OpenRequests, Stage
from flare_ray.actors.stream_receiver import StreamReceiver
from flare_ray.config import DeploymentConfig
from flare_ray.contracts.cache import CacheReset, CacheStats
from flare_ray.contracts.messages import Failed, Finished
from flare_ray.contracts.request import GenerationRequest
from flare_ray.contracts.routing import Route
from flare_ray.contracts.tiers import Tier
from flare_ray.controller.fleet.affinity import route_of
from flare_ray.errors import Overloaded
from flare_ray.frontend.client import EngineInfo
from flare_ray.frontend.inprocess import engine_info
from flare_ray.frontend.remote import RemoteClient
from flare_ray.frontend.stream import StreamTable
from flare_ray.metrics.export import render

logger = logging.getLogger("ray.serve.flare")

SILENT_S = 4.0
"""Seconds without a new report after which an engine counts as gone; it reports each second."""

RESET_LIMIT_S = 10.0
"""Seconds in which every engine must have confirmed a reset; each looks for one every second."""
RESET_POLL_S = 0.2

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Finished | Failed).decode


class HandleCall:
    """`SubmitCall` over the response of a Serve handle."""

    def __init__(
        self, handle: DeploymentHandle, request: GenerationRequest, route: Route | None = None
    ) -> None:
        self._request_id = request.request_id
        # The method is unary, so the response is no generator.
        self._response = cast(DeploymentResponse, handle.submit.remote(_encode(request), route))

    async def result(self) -> Finished | Failed:
        """See `SubmitCall.result`."""
        try:
            return _decode(await self._response)
        except BackPressureError as error:
            wait_s = error.retry_after_s or 1.0
            return Failed(
                self._request_id, "overloaded", str(error), status=503, retry_after_s=wait_s
            )
        except TaskCancelledError as error:
            return self._lost(f"its call was cancelled ({error})")
        except ray.exceptions.RayTaskError as error:
            # The engine answers with values; an exception in its method is a fault of our own.
            logger.exception("request %s: the engine's call failed", self._request_id)
            message = f"the engine failed: {type(error.cause).__name__}"
            return Failed(self._request_id, "internal_error", message)
        except (RayError, RayServeException) as error:
            return self._lost(str(error).partition("\n")[0])

    def cancel(self) -> None:
        """See `SubmitCall.cancel`."""
        self._response.cancel()

    def _lost(self, why: str) -> Failed:
        message = f"the engine that ran request {self._request_id} is gone: {why}"
        return Failed(self._request_id, "rank_failure", message, status=503)


class EngineFinder:
    """What HTTP replicas ask the directory; each question is a blocking call on a thread.

    An engine that was killed leaves a last report that says "ready": the cluster is asked whether
    its process has ended. One that hangs is told by its reports alone. They are compared with what
    this replica saw before, on its own clock: one that has stopped changing is no engine.
    """

    def __init__(self, application: str, config: DeploymentConfig) -> None:
        self._directory = EngineDirectory(application)
        self._notice = CacheNotice(application)
        self._config = config
        self._seen: dict[str, tuple[float, float]] = {}

    async def ready(self) -> EngineInfo | None:
        """Facts about the ready engine that reported last, None if none is."""
        return await asyncio.to_thread(self._ready)

    def _ready(self) -> EngineInfo | None:
        now_s = time.monotonic()
        reports = self._directory.reports()
        before, self._seen = self._seen, {}
        for report in reports:
            told_s, since_s = before.get(report.engine_id, (0.0, 0.0))
            since_s = now_s if told_s != report.time_s else since_s
            self._seen[report.engine_id] = (report.time_s, since_s)
        for report in sorted(reports, key=lambda report: report.time_s, reverse=True):
            if not report.ready or now_s - self._seen[report.engine_id][1] > SILENT_S:
                continue
            record = self._directory.engine(report.engine_id)
            if record is not None and self._directory.alive(record):
                return _info(record)
        return None

    async def secret(self, engine_id: str) -> bytes | None:
        """The stream secret of an engine, None if it is not listed."""
        record = await asyncio.to_thread(self._directory.engine, engine_id)
        return None if record is None else record.secret

    async def cache(self) -> list[CacheStats]:
        """See `EngineClient.cache`; as of each engine's last report."""
        reports = await asyncio.to_thread(self._directory.reports)
        return [report.cache for report in reports if report.cache is not None]

    async def reset_cache(self, tiers: frozenset[Tier]) -> list[CacheReset]:
        """See `EngineClient.reset_cache`."""
        notice_id = await asyncio.to_thread(self._notice.ask, tiers)
        deadline_s = time.monotonic() + RESET_LIMIT_S
        while True:
            await asyncio.sleep(RESET_POLL_S)
            reports = await asyncio.to_thread(self._directory.reports)
            engines = [report.engine_id for report in reports if report.ready]
            done = await asyncio.to_thread(
                lambda names: [self._notice.done(name, notice_id) for name in names], engines
            )
            if engines and all(done):
                return [reset for reset in done if reset is not None]
            if time.monotonic() > deadline_s:
                silent = [name for name, reset in zip(engines, done, strict=True) if not reset]
                raise Overloaded(
                    f"engines {', '.join(silent) or '(none is ready)'} did not confirm the reset; "
                    "send it again",
                    retry_after_s=RESET_LIMIT_S,
                    status=503,
                )

    async def metrics(self) -> str:
        """Prometheus text of all engines that report."""
        reports = await asyncio.to_thread(self._directory.reports)
        text = render(
            [report.metrics for report in reports],
            model_name=self._config.model_name,
            compat=self._config.compat_metrics,
        )
        return text.decode()


class ServeClient:
    """A `RemoteClient` and the socket it listens on; made on the replica's event loop."""

    def __init__(
        self, handle: DeploymentHandle, application: str, config: DeploymentConfig
    ) -> None:
        finder = EngineFinder(application, config)
        table = StreamTable()
        self._handle = handle
        self._receiver = StreamReceiver(
            finder.secret,
            table.deliver,
            host=ray.util.get_node_ip_address(),
            heartbeat_timeout_s=config.ingress.heartbeat_timeout_s,
        )
        self.client = RemoteClient(
            submit=lambda request: HandleCall(handle, request, self._route(request)),
            outputs=self._receiver,
            table=table,
            find=finder.ready,
            metrics=finder.metrics,
            caches=finder,
        )
        self._routing = config.ingress.routing
        self._drain = Drain(application)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to receive, and make the handle find its replicas before the first request does
        (about half a second, measured)."""
        self._receiver.start()
        self._tasks = [asyncio.create_task(work) for work in (self._warm(), self._heed_drain())]

    async def close(self) -> None:
        """End every open request with an error and close the socket."""
        for task in self._tasks:
            task.cancel()
        await self._receiver.close()

    def _route(self, request: GenerationRequest) -> Route | None:
        if self._routing.by == "load":
            return None
        return route_of(request, home_pages=self._routing.home_pages)

    async def _warm(self) -> None:
        try:
            await self._handle.engine_info.remote()
        except (RayError, RayServeException) as error:
            logger.info("no engine was ready when this HTTP replica started: %s", error)

    async def _heed_drain(self) -> None:
        """Close admission when the service is told to drain, report what is still open, and end it
        when its time is up."""
        replica_id, looks = uuid.uuid4().hex, 0
        while True:
            await asyncio.sleep(POLL_S)
            try:
                stage = await asyncio.to_thread(self._drain.stage)
                draining = stage != Stage.OPEN
                if draining != self.client.draining:
                    logger.info("new requests are %s", "refused" if draining else "taken again")
                self.client.draining = draining
                if stage == Stage.END_ALL:
                    self.client.end_all()
                looks = looks + 1 if draining else 0
                if draining:
                    report = OpenRequests(len(self.client.streams), looks)
                    await asyncio.to_thread(self._drain.report, replica_id, report)
            except Exception:
                # The control service may be away for a moment; requests go on without it.
                logger.exception("this HTTP replica could not look whether to drain")


def _info(record: EngineRecord) -> EngineInfo:
    return engine_info(record.engine_id, record.manifest, record.max_prompt_tokens)
