"""The Serve application: what `import_path: flare_ray.frontend.app:build` binds (contract: A2), and
how a deployment file is run, for the command line.

No postponed annotations here: Serve validates `args:` only against a class.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from pydantic import BaseModel
from ray import serve
from ray.serve._private import api as serve_api
from ray.serve._private.common import DeploymentStatus, ReplicaState
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, SERVE_NAMESPACE
from ray.serve.config import gRPCOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeDeploySchema

from flare_ray.actors.draining import Drain
from flare_ray.actors.engine import Engine, engine_options
from flare_ray.actors.placement import ENGINE_DEPLOYMENT, preflight
from flare_ray.config import DeploymentConfig
from flare_ray.errors import FlareError
from flare_ray.frontend.ingress import INGRESS_DEPLOYMENT, Ingress, ingress_options

logger = logging.getLogger("ray.serve.flare")

DEPLOYMENTS = (ENGINE_DEPLOYMENT, INGRESS_DEPLOYMENT)
"""Names that entries of `deployments:` may have."""
FAILED_DEPLOYMENT = (DeploymentStatus.DEPLOY_FAILED, DeploymentStatus.UNHEALTHY)
IMPORT_PATH = f"{__name__}:build"
DRAIN_GRACE_S = 15.0
"""Seconds beyond `graceful_shutdown_s` for which new requests stay refused: Serve ends within."""
END_LIMIT_S = 3.0
"""Seconds for HTTP replicas to hear that open requests end, and for the errors to reach clients."""
DRAIN_POLL_S = 0.25


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


def failure_reason(state: ApplicationStatusOverview) -> str:
    """Why an application could not be deployed: our own error if there is one, without the
    tracebacks that Serve wraps it in; otherwise all that Serve says of it and its deployments."""
    failed = [d for d in state.deployments.values() if d.status in FAILED_DEPLOYMENT]
    messages = [deployment.message for deployment in failed] + [state.message]
    for message in messages:
        _, found, own = message.rpartition(f"{FlareError.__module__}.")
        if found:
            return own.strip()
    return "\n".join(messages)


class LocalServe:
    """A deployment file on the cluster of this machine, or on the one RAY_ADDRESS names.

    Args:
        document: a checked deployment file.
        configs: arguments of this project's applications in it.
    """

    def __init__(self, document: Mapping[str, Any], configs: Iterable[DeploymentConfig]) -> None:
        self._schema = ServeDeploySchema.model_validate(document)
        self._configs = tuple(configs)
        applications = self._schema.applications
        own = [app.name for app in applications if app.import_path == IMPORT_PATH]
        self._drains = {name: Drain(name) for name in own}
        self._others = [app.name for app in applications if app.name not in own]

    def start(self) -> None:
        """Connect to Ray (starting it where there is none), check, and submit the applications.

        Raises:
            CapacityError, ConfigError: an application could only wait for what is not there.
        """
        if not ray.is_initialized():
            ray.init(namespace=SERVE_NAMESPACE, include_dashboard=False)
        for config in self._configs:
            preflight(config)
        for drain in self._drains.values():
            drain.clear()  # what a stop that was itself killed may have left
        schema = self._schema
        client = serve_api.serve_start(
            http_options=schema.http_options.model_dump(),
            proxy_location=schema.proxy_location,
            grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
            controller_options=schema.controller_options,
            global_logging_config=schema.logging_config,
        )
        client.deploy_apps(schema)

    def poll(self) -> bool:
        """Whether every application runs.

        Raises:
            FlareError: one failed to deploy; the message is its own.
        """
        applications = serve.status().applications
        names = [application.name for application in self._schema.applications]
        states = [applications[name] for name in names if name in applications]
        for name, state in applications.items():
            if name in names and state.status == ApplicationStatus.DEPLOY_FAILED:
                raise FlareError(f"application {name} failed to deploy: {failure_reason(state)}")
        running = [state for state in states if state.status == ApplicationStatus.RUNNING]
        return len(running) == len(names)

    def stop(self) -> None:
        """Refuse new requests, let open ones end, stop the applications, then leave the cluster,
        and end it if it is ours."""
        if ray.is_initialized():
            self._drain()
            serve.shutdown()
            for drain in self._drains.values():
                drain.clear()
        self.abandon()

    def _drain(self) -> None:
        """Wait until no request of our applications is open. Serve's own shutdown would answer new
        requests with a 404, end the HTTP proxy at once, and give open responses 30 s."""
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            return
        given_s = [config.engine_deployment.graceful_shutdown_s for config in self._configs]
        limit_s = max(given_s, default=0.0)
        deadline_s = time.monotonic() + limit_s
        for drain in self._drains.values():
            drain.ask(limit_s, DRAIN_GRACE_S)
        if self._others:
            client.delete_apps(self._others, blocking=False)
        if self._drained_before(deadline_s):
            return
        logger.warning("requests are open after %g s (graceful_shutdown_s); they end now", limit_s)
        if not self._drained_before(time.monotonic() + END_LIMIT_S):
            logger.warning("an HTTP replica did not end its requests in %g s", END_LIMIT_S)

    def _drained_before(self, deadline_s: float) -> bool:
        while time.monotonic() < deadline_s:
            time.sleep(DRAIN_POLL_S)
            if self._drained():
                return True
        return False

    def _drained(self) -> bool:
        applications = serve.status().applications
        for name, drain in self._drains.items():
            if name in applications:
                ingress = applications[name].deployments.get(INGRESS_DEPLOYMENT)
                states = {} if ingress is None else ingress.replica_states
                if not drain.drained(states.get(ReplicaState.RUNNING, 0)):
                    return False
        return not applications.keys() & set(self._others)

    def abandon(self) -> None:
        """Leave the cluster without draining."""
        ray.shutdown()
