"""The HTTP deployment: routes over the engines of the same application (contract: A1, A3)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from flare_ray.config import DeploymentConfig
from flare_ray.frontend.api import build_api
from flare_ray.frontend.router import ServeClient
from flare_ray.frontend.settings import load_settings

logger = logging.getLogger("ray.serve.flare")

INGRESS_DEPLOYMENT = "Ingress"
QUEUE_RETRY_S = 2


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
        self._settings = await asyncio.to_thread(load_settings, config)
        application = serve.get_replica_context().app_name
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
