"""The HTTP deployment: routes over the engines of the same application (contract: A1, A3)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from flare_ray.config import DeploymentConfig
from flare_ray.frontend.access.ledger import Limits, LocalLedger
from flare_ray.frontend.api import build_api
from flare_ray.frontend.router import ServeClient
from flare_ray.frontend.settings import load_settings

logger = logging.getLogger("ray.serve.flare")

INGRESS_DEPLOYMENT = "Ingress"
QUEUE_RETRY_S = 2
LEDGER_NAMESPACE = "flare"
LEDGER_ATTEMPTS = 2


class SharedLedger:
    """The rate limits' books, kept once for all HTTP replicas, in an actor.

    The first replica starts it and it dies with that one; the others then start another, whose
    buckets are full. Nobody waits for books that cannot be had: the request is let through.

    Args:
        application: name of the Serve application.
    """

    def __init__(self, application: str) -> None:
        self._name = f"flare-ledger:{application}"
        self._actor: Any = None

    async def take(self, name: str, limits: Limits, *, requests: int, tokens: int) -> float:
        """See `Ledger.take`."""
        for _ in range(LEDGER_ATTEMPTS):
            try:
                return float(
                    await self._books().take.remote(name, limits, requests=requests, tokens=tokens)
                )
            except RayError as error:
                self._lost(error)
        return 0.0

    async def spend(self, name: str, limits: Limits, *, tokens: int) -> None:
        """See `Ledger.spend`."""
        try:
            await self._books().spend.remote(name, limits, tokens=tokens)
        except RayError as error:
            self._lost(error)

    def _books(self) -> Any:
        if self._actor is None:
            self._actor = (
                ray.remote(LocalLedger)
                .options(
                    name=self._name, namespace=LEDGER_NAMESPACE, get_if_exists=True, num_cpus=0
                )
                .remote()
            )
        return self._actor

    def _lost(self, error: Exception) -> None:
        self._actor = None
        logger.warning("the books of the rate limits are gone and start anew: %s", error)


@serve.ingress()
class Ingress:
    """One HTTP replica. Needs no engine to start: until one is ready, /health answers 503.

    Args:
        config: the whole deployment.
        engine: handle of the engines.
    """

    # Serve awaits constructors.
    async def __init__(  # type: ignore[misc]
        self, config: DeploymentConfig, engine: DeploymentHandle
    ) -> None:
        application = serve.get_replica_context().app_name
        ledger = SharedLedger(application)
        self._settings = await asyncio.to_thread(load_settings, config, ledger=ledger)
        self._serve_client = ServeClient(engine, application, config)
        self._serve_client.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return build_api(self._serve_client.client, self._settings)

    async def __del__(self) -> None:
        """Called by Serve once the replica has drained, or when its start failed."""
        if hasattr(self, "_serve_client"):
            await self._serve_client.close()
        if hasattr(self, "_settings"):
            self._settings.pool.close()


def ingress_options(config: DeploymentConfig) -> dict[str, Any]:
    """Options of `serve.deployment` for `Ingress`."""
    ingress = config.ingress
    return {
        "name": INGRESS_DEPLOYMENT,
        "autoscaling_config": {
            "min_replicas": ingress.min_replicas,
            "max_replicas": ingress.max_replicas,
            "target_ongoing_requests": ingress.target_ongoing_requests,
            "upscale_delay_s": ingress.upscale_delay_s,
            "downscale_delay_s": ingress.downscale_delay_s,
        },
        "max_ongoing_requests": ingress.max_ongoing_requests,
        # Beyond that Serve answers by itself instead of holding requests without a bound.
        "max_queued_requests": ingress.max_ongoing_requests,
        "backpressure_config": {"status_code": 503, "retry_after_s": QUEUE_RETRY_S},
        "ray_actor_options": {"num_cpus": ingress.cpus},
        # An open response needs both replicas, so both get the same time to end it.
        "graceful_shutdown_timeout_s": config.engine_deployment.graceful_shutdown_s,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
