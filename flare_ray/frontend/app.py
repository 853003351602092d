"""The Serve application: what `import_path: flare_ray.frontend.app:build` binds (contract: A2), and
how a deployment file is run, for the command line.

No postponed annotations here: Serve validates `args:` only against a class.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from pydantic import BaseModel
from ray import serve
from ray.serve._private import api as serve_api
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, SERVE_NAMESPACE
from ray.serve.config import gRPCOptions
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from flare_ray.actors.engine import Engine, engine_options
from flare_ray.actors.placement import preflight
from flare_ray.config import DeploymentConfig
from flare_ray.errors import FlareError
from flare_ray.frontend.ingress import Ingress, ingress_options

logger = logging.getLogger("ray.serve.flare")

IMPORT_PATH = "flare_ray.frontend.app:build"
POLL_S = 0.25


def build(args: DeploymentConfig) -> serve.Application:
    """The application: autoscaled HTTP replicas over engine replicas.

    Serve calls this on the cluster; what it raises becomes the application's DEPLOY_FAILED message.

    Raises:
        CapacityError: no node has the CPUs or GPUs of an engine.
        ConfigError: the checkpoint is not there.
    """
    preflight(args)
    if not RAY_SERVE_ENABLE_HA_PROXY:
        logger.info(
            "this server runs behind Ray's Python proxy; RAY_SERVE_ENABLE_HA_PROXY=1 and "
            "RAY_SERVE_THROUGHPUT_OPTIMIZED=1, set before Ray starts, carry more streams"
        )
    engine = serve.deployment(**engine_options(args))(Engine).bind(args)
    return serve.deployment(**ingress_options(args))(Ingress).bind(args, engine)


def deploy_schema() -> type[BaseModel]:
    """The model of a deployment file, for `cli.config_check` (which may not import Ray)."""
    return ServeDeploySchema


class LocalServe:
    """A deployment file on the cluster of this machine, or on the one RAY_ADDRESS names.

    Args:
        document: a checked deployment file.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schema = ServeDeploySchema.model_validate(document)
        self._names = [app.name for app in self._schema.applications]

    def start(self) -> None:
        """Connect to Ray (starting it where there is none), check, and submit the applications.

        Raises:
            CapacityError, ConfigError: an application could only wait for what is not there.
        """
        if not ray.is_initialized():
            ray.init(namespace=SERVE_NAMESPACE, include_dashboard=False, log_to_driver=True)
        for app in self._schema.applications:
            if app.import_path == IMPORT_PATH:
                preflight(DeploymentConfig.model_validate(app.args))
        client = serve_api.serve_start(
            http_options=self._schema.http_options.model_dump(),
            proxy_location=self._schema.proxy_location,
            grpc_options=gRPCOptions(**self._schema.grpc_options.model_dump()),
            controller_options=self._schema.controller_options,
            global_logging_config=self._schema.logging_config,
        )
        client.deploy_apps(self._schema)

    def poll(self) -> bool:
        """Whether every application runs.

        Raises:
            FlareError: one failed to deploy; the message is its own.
        """
        applications = serve.status().applications
        states = [applications[name] for name in self._names if name in applications]
        for name in self._names:
            state = applications.get(name)
            if state is not None and state.status == ApplicationStatus.DEPLOY_FAILED:
                raise FlareError(f"application {name} failed to deploy: {state.message}")
        return len(states) == len(self._names) and all(
            state.status == ApplicationStatus.RUNNING for state in states
        )

    def stop(self) -> None:
        """Drain and stop the applications, then leave the cluster (and end it if it is ours)."""
        started_s = time.monotonic()
        serve.shutdown()
        ray.shutdown()
        logger.info("stopped after %.1f s", time.monotonic() - started_s)
