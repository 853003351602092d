"""`flare-ray serve` and `debug-serve`: options merged into a deployment file, then run.

Ray reads its settings from the environment when it is first imported; they are therefore set here,
between reading the file and checking it, which imports Ray for its schema.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import typer

from flare_ray.actors.openmp import wait_passively
from flare_ray.cli.config_check import IMPORT_PATH, check_document, read_document
from flare_ray.cli.options import EngineOptions, engine_config, merge
from flare_ray.cli.source import deployment_of, engine_of
from flare_ray.config import DeploymentConfig
from flare_ray.config.deployment import is_inline_template
from flare_ray.errors import ConfigError

POLL_S = 0.25
RAY_ENVIRONMENT = {
    # Ray 2.60 guards a new local cluster by a token anyway, and warns; said outright, it does not.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # An engine that stopped answering is killed, not drained: its ranks cannot finish anything.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
THROUGHPUT_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",
    # Engines already drain; a fixed wait of 30 s on top of it would only delay every stop.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}


class Server(Protocol):
    """What runs a deployment file; `frontend.app.LocalServe`."""

    def start(self) -> None:
        """Submit the applications; raises FlareError for what cannot run."""

    def poll(self) -> bool:
        """Whether all run; raises FlareError once one failed to deploy."""

    def stop(self) -> None:
        """Drain and stop."""

    def abandon(self) -> None:
        """Stop at once."""


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in ("127.0.0.1", "localhost", "::1")


class HttpOptions(NamedTuple):
    """Options that are not an engine's; None = not given."""

    keys_file: Path | None = None
    served_model_name: str | None = None
    chat_template: str | None = None

    def write_into(self, arguments: dict[str, Any]) -> None:
        """Replace settings of a deployment."""
        ingress: dict[str, Any] = {}
        if self.keys_file is not None:
            ingress["keys_file"] = str(self.keys_file.resolve())
        if self.chat_template is not None:
            inline = is_inline_template(self.chat_template)
            path = self.chat_template if inline else str(Path(self.chat_template).resolve())
            ingress["chat_template"] = path
        if ingress:
            arguments["ingress"] = {**(arguments.get("ingress") or {}), **ingress}
        if self.served_model_name is not None:
            arguments["model_name"] = self.served_model_name


def serve_file(path: Path, options: EngineOptions, http: HttpOptions) -> int:
    """Serve a deployment file on Ray until SIGINT or SIGTERM.

    Returns:
        0 after a stop that was asked for.
    Raises:
        ConfigError, CapacityError: the file, an option, or the machine must change; whatever had
            been started is stopped.
    """
    document = read_document(path)
    for line in apply_options(document, options, name=str(path)):
        typer.echo(f"option replaces {line}")
    for arguments in _our_arguments(document):
        http.write_into(arguments)
    set_environment(document)
    checked = check_document(document, name=str(path))
    from flare_ray.frontend.app import LocalServe

    server = LocalServe(checked.document, checked.configs.values())
    run_until_signal(server, address=address_of(document))
    return 0


def apply_options(document: dict[str, Any], options: EngineOptions, *, name: str) -> list[str]:
    """Write the options into the engine section of a document; one line per changed value.

    Args:
        document: mutated.
        name: what to call it in messages.
    Raises:
        ConfigError: an option is wrong, or the document has not exactly one of our applications.
    """
    sections = _our_arguments(document)
    engines = [args["engine"] for args in sections if isinstance(args.get("engine"), dict)]
    if not options.overrides({}):
        return []
    if len(engines) != 1:
        raise ConfigError(
            f"{name} has {len(engines)} engine sections, and options apply to one: change the file"
        )
    overrides = options.overrides(engines[0])
    engine_config(engines[0], overrides)  # its messages name the options
    sections[0]["engine"], lines = merge(engines[0], overrides)
    return lines


def _our_arguments(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`args` of this project's applications, as they stand in the document."""
    return [
        application["args"]
        for application in document.get("applications") or []
        if isinstance(application, dict)
        and application.get("import_path") == IMPORT_PATH
        and isinstance(application.get("args"), dict)
    ]


def set_environment(document: Mapping[str, Any]) -> None:
    """Ray's settings, unless the user has set them.

    HAProxy carries many more streams than the Python proxy but opens its replicas' ports on every
    interface; a file that listens on loopback only does not ask for that.
    """
    wanted = dict(RAY_ENVIRONMENT)
    if not address_of(document).is_local:
        wanted |= THROUGHPUT_ENVIRONMENT
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def address_of(document: Mapping[str, Any]) -> Address:
    """Host and port a file listens on, with Serve's defaults."""
    http = document.get("http_options") or {}
    return Address(str(http.get("host", "0.0.0.0")), int(http.get("port", 8000)))


def run_until_signal(server: Server, *, address: Address) -> None:
    """Start, wait for SIGINT or SIGTERM, stop. A signal while starting stops what there is; one
    while stopping stops at once.

    Raises:
        FlareError: the start failed; everything is stopped.
    """
    signals = StopSignals()
    signals.install()
    try:
        server.start()
        signals.install()  # Ray has put its own handlers in place
        signals.waiting = True
        while not signals.requested.is_set() and not server.poll():
            signals.requested.wait(POLL_S)
        if not signals.requested.is_set():
            typer.echo(f"ready: http://{address[0]}:{address[1]}/v1 (Ctrl-C stops)")
        signals.requested.wait()
    except KeyboardInterrupt:
        typer.echo("interrupted while starting")
    finally:
        signals.waiting = False
        signals.install()
        try:
            server.stop()
        except KeyboardInterrupt:
            server.abandon()
        signals.restore()


class StopSignals:
    """SIGINT and SIGTERM as an event while `waiting`, as KeyboardInterrupt at other times.

    Installed outright, since a shell's background job inherits SIGINT ignored.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.waiting = False
        self._before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}

    def install(self) -> None:
        """Take both signals; main thread only."""
        for number in self._before:
            signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.waiting:
            raise KeyboardInterrupt
        self.waiting = False
        self.requested.set()


def debug_serve(
    source: Path, options: EngineOptions, http: HttpOptions, *, address: Address
) -> int:
    """Serve in this process, without Ray: ranks and controller are threads (contract: G8).

    Args:
        source: a deployment file, or a checkpoint folder.
    Raises:
        FlareError: what keeps the engine from starting.
    """
    import uvicorn

    wait_passively()
    from flare_ray.actors.inprocess import start_inprocess
    from flare_ray.frontend.api import build_api
    from flare_ray.frontend.inprocess import InProcessClient
    from flare_ray.frontend.settings import load_settings
    from flare_ray.metrics.export import render

    config, lines = debug_config(source, options)
    for line in lines:
        typer.echo(f"option replaces {line}")
    arguments = config.model_dump(exclude_unset=True)
    http.write_into(arguments)
    config = DeploymentConfig.model_validate(arguments)
    settings = load_settings(config)
    core = start_inprocess(
        config.engine, health_timeout_s=config.engine_deployment.health_timeout_s
    )

    def metrics() -> str:
        text = render([core.snapshot()], model_name=config.model_name, compat=config.compat_metrics)
        return text.decode()

    client = InProcessClient(
        core,
        max_prompt_tokens=config.engine.admission.max_prompt_tokens,
        render_metrics=metrics,
    )
    # uvicorn raises the signal that stopped it once more: it must not end the process before its
    # shared memory is given back.
    signals = StopSignals()
    signals.install()
    try:
        uvicorn.run(
            build_api(client, settings),
            host=address.host,
            port=address.port,
            access_log=False,
            timeout_graceful_shutdown=int(config.engine_deployment.graceful_shutdown_s),
        )
    finally:
        core.shutdown(0.0)
        settings.pool.close()
        signals.restore()
    return 0


def debug_config(source: Path, options: EngineOptions) -> tuple[DeploymentConfig, list[str]]:
    """The deployment that `debug-serve` runs, and one line per value that options changed.

    Raises:
        ConfigError: as `source.deployment_of`.
    """
    if source.is_dir():
        engine, lines = engine_of(source, options)
        return DeploymentConfig(model_name=source.resolve().name, engine=engine), lines
    return deployment_of(source, options)
