"""Engine options of the command line: one field each, mapped onto `EngineConfig` by one table.

`plan`, `serve` and `debug-serve` inherit these fields, so they take the same options with the same
words (contract: G5, G8, H2, R6). An option left out changes nothing; what an option changes is
returned as text, so that a command can print it.

Annotations are evaluated here, not postponed: the command-line library reads them from subclasses
that live in other modules.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError

from flare_ray.cli.knobs import ALIASES
from flare_ray.config import EngineConfig
from flare_ray.errors import ConfigError
from flare_ray.recipes import registry

SETTINGS: dict[str, str] = {
    "recipe": "recipe",
    "tensor_parallel_size": "tensor_parallel_size",
    "device": "device",
    "dtype": "dtype",
    "threads": "threads_per_rank",
    "kv_dtype": "kv_dtype",
    "quantised_activations": "quantised_activations",
    "expert_weights": "expert_weights",
    "tables": "tables",
    "eager": "eager",
    "core": "core",
    "debug_checks": "debug_checks",
    "queue_depth": "queue_depth",
    "rank_timeout": "rank_timeout_s",
    "concurrency": "concurrency",
    "context_tokens": "context_tokens",
    "page_pool_tokens": "page_pool_tokens",
    "prefill_tokens": "prefill_tokens",
    "prefix_cache": "prefix_cache.enabled",
    "prefix_cache_bytes": "prefix_cache.device_bytes",
    "prefix_cache_host_bytes": "prefix_cache.host_bytes",
    "prefix_cache_disk_path": "prefix_cache.disk_path",
    "prefix_cache_disk_bytes": "prefix_cache.disk_bytes",
    "reproducible": "sampling.reproducible",
    "logprobs": "sampling.logprobs",
    "grammar": "grammar.enabled",
    "grammar_preload": "grammar.preload",
    "grammar_full_width": "grammar.full_width",
    "grammar_own_rounds": "grammar.own_rounds",
    "grammar_compile_timeout": "grammar.compile_timeout_s",
    "grammar_compile_memory": "grammar.compile_memory_bytes",
    "grammar_max_source": "grammar.max_source_bytes",
    "grammar_cache_bytes": "grammar.cache_bytes",
    "mtp_draft_tokens": "speculation.draft_tokens",
    "widths": "speculation.widths",
    "packed_rows": "speculation.packed_rows",
    "token_capacity": "speculation.token_capacity",
    "fixed_width": "speculation.fixed_width",
    "objective": "speculation.objective",
    "inter_token_slo": "speculation.inter_token_slo_ms",
    "decision_log": "speculation.decision_log",
    "history_drafts": "speculation.history_drafts",
    "request_drafts": "speculation.request_drafts",
    "learned_drafts": "speculation.learned_drafts",
    "max_waiting": "admission.max_waiting",
    "max_waiting_tokens": "admission.max_waiting_tokens",
    "retry_after": "admission.retry_after_s",
    "max_retry_after": "admission.max_retry_after_s",
    "max_prompt_tokens": "admission.max_prompt_tokens",
    "preemption": "admission.preemption",
}
"""Option -> setting it replaces. `--no-mtp`, `--mtp-only` and `--[no-]mtp-adaptive-verification`
choose among values of a setting and are mapped by `EngineOptions.overrides`."""

_CITATION = re.compile(r" ?\(contract: [^)]*\)")


def _field(path: str) -> tuple[str, Any]:
    """Description and default of a setting."""
    model: type[BaseModel] = EngineConfig
    *parents, name = path.split(".")
    for parent in parents:
        model = model.model_fields[parent].annotation  # type: ignore[assignment]
    field = model.model_fields[name]
    return field.description or "", field.default


def _flags(name: str) -> str:
    return "--" + name.replace("_", "-")


def _setting(
    name: str, *, note: str = "", text: str = "", flags: str = "", parser: Any = None
) -> Any:
    """The option that replaces one setting; its help is the setting's own description, or `text`,
    and `note`."""
    path = SETTINGS[name]
    description, default = _field(path)
    # A command line has no None, and its reader no use for the number of a requirement.
    description = text or _CITATION.sub("", description).replace("None =", "without it:")
    return typer.Option(
        flags or _flags(name),
        *ALIASES.get(name, ()),
        help=f"{description} {note}".strip(),
        show_default=False if default is None else str(default),
        parser=parser,
        metavar="W,W,..." if parser is not None else None,
    )


def _switch(flags: str, text: str) -> Any:
    return typer.Option(flags, help=text, show_default=False)


def parse_widths(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """`1,2,4` as a tuple.

    Raises:
        typer.BadParameter: something between the commas is no integer.
    """
    if isinstance(text, tuple):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"expected integers such as 1,2,4, got {text!r}") from error


def draft_counts() -> str:
    """Default and largest draft count of every recipe, one sentence each (contract: R1)."""
    return " ".join(
        f"{recipe.name}: {recipe.speculation.default_draft_tokens} by default, at most "
        f"{recipe.speculation.max_draft_tokens}."
        for recipe in registry.recipes()
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the user typed; None and False mean "not given"."""

    recipe: Annotated[str | None, _setting("recipe")] = None
    tensor_parallel_size: Annotated[int | None, _setting("tensor_parallel_size")] = None
    device: Annotated[str | None, _setting("device")] = None
    dtype: Annotated[
        str | None,
        _setting("dtype", note="With --device cpu and no dtype named anywhere: float32."),
    ] = None
    threads: Annotated[int | None, _setting("threads")] = None
    kv_dtype: Annotated[str | None, _setting("kv_dtype")] = None
    quantised_activations: Annotated[str | None, _setting("quantised_activations")] = None
    expert_weights: Annotated[str | None, _setting("expert_weights")] = None
    tables: Annotated[str | None, _setting("tables")] = None
    eager: Annotated[bool | None, _setting("eager", flags="--eager/--no-eager")] = None
    core: Annotated[str | None, _setting("core")] = None
    debug_checks: Annotated[
        bool | None, _setting("debug_checks", flags="--debug-checks/--no-debug-checks")
    ] = None
    queue_depth: Annotated[int | None, _setting("queue_depth")] = None
    rank_timeout: Annotated[float | None, _setting("rank_timeout")] = None
    concurrency: Annotated[int | None, _setting("concurrency")] = None
    context_tokens: Annotated[int | None, _setting("context_tokens")] = None
    page_pool_tokens: Annotated[int | None, _setting("page_pool_tokens")] = None
    prefill_tokens: Annotated[int | None, _setting("prefill_tokens")] = None
    prefix_cache: Annotated[
        bool | None, _setting("prefix_cache", flags="--prefix-cache/--no-prefix-cache")
    ] = None
    prefix_cache_bytes: Annotated[int | None, _setting("prefix_cache_bytes")] = None
    prefix_cache_host_bytes: Annotated[int | None, _setting("prefix_cache_host_bytes")] = None
    prefix_cache_disk_path: Annotated[str | None, _setting("prefix_cache_disk_path")] = None
    prefix_cache_disk_bytes: Annotated[int | None, _setting("prefix_cache_disk_bytes")] = None
    reproducible: Annotated[str | None, _setting("reproducible")] = None
    logprobs: Annotated[str | None, _setting("logprobs")] = None
    grammar: Annotated[bool | None, _setting("grammar", flags="--grammar/--no-grammar")] = None
    grammar_preload: Annotated[
        bool | None, _setting("grammar_preload", flags="--grammar-preload/--no-grammar-preload")
    ] = None
    grammar_full_width: Annotated[
        bool | None,
        _setting("grammar_full_width", flags="--grammar-full-width/--no-grammar-full-width"),
    ] = None
    grammar_own_rounds: Annotated[
        bool | None,
        _setting("grammar_own_rounds", flags="--grammar-own-rounds/--no-grammar-own-rounds"),
    ] = None
    grammar_compile_timeout: Annotated[float | None, _setting("grammar_compile_timeout")] = None
    grammar_compile_memory: Annotated[int | None, _setting("grammar_compile_memory")] = None
    grammar_max_source: Annotated[int | None, _setting("grammar_max_source")] = None
    grammar_cache_bytes: Annotated[int | None, _setting("grammar_cache_bytes")] = None
    mtp_draft_tokens: Annotated[
        int | None,
        _setting(
            "mtp_draft_tokens",
            text="Most drafts a round offers; without it: the recipe's default. 0 serves without "
            "speculation (with --mtp-only: rounds of width one).",
            note=draft_counts(),
        ),
    ] = None
    mtp_adaptive_verification: Annotated[
        bool | None,
        _switch(
            "--mtp-adaptive-verification/--no-mtp-adaptive-verification",
            "Choose each round's width by survival and cost, or keep it fixed.",
        ),
    ] = None
    fixed_width: Annotated[
        int | None, _setting("fixed_width", note="Implies --no-mtp-adaptive-verification.")
    ] = None
    widths: Annotated[Any, _setting("widths", parser=parse_widths)] = None
    packed_rows: Annotated[Any, _setting("packed_rows", parser=parse_widths)] = None
    token_capacity: Annotated[int | None, _setting("token_capacity")] = None
    no_mtp: Annotated[bool, _switch("--no-mtp", "Prepare no drafter: ordinary programs only.")] = (
        False
    )
    mtp_only: Annotated[bool, _switch("--mtp-only", "Prepare the speculative programs only.")] = (
        False
    )
    objective: Annotated[str | None, _setting("objective")] = None
    inter_token_slo: Annotated[
        float | None, _setting("inter_token_slo", flags="--inter-token-slo-ms")
    ] = None
    decision_log: Annotated[str | None, _setting("decision_log")] = None
    history_drafts: Annotated[
        bool | None,
        _setting("history_drafts", flags="--history-drafts/--no-history-drafts"),
    ] = None
    request_drafts: Annotated[
        bool | None,
        _setting("request_drafts", flags="--request-drafts/--no-request-drafts"),
    ] = None
    learned_drafts: Annotated[
        bool | None,
        _setting("learned_drafts", flags="--learned-drafts/--no-learned-drafts"),
    ] = None
    max_waiting: Annotated[int | None, _setting("max_waiting")] = None
    max_waiting_tokens: Annotated[int | None, _setting("max_waiting_tokens")] = None
    retry_after: Annotated[float | None, _setting("retry_after")] = None
    max_retry_after: Annotated[float | None, _setting("max_retry_after")] = None
    max_prompt_tokens: Annotated[int | None, _setting("max_prompt_tokens")] = None
    preemption: Annotated[
        bool | None, _setting("preemption", flags="--preemption/--no-preemption")
    ] = None

    def overrides(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Dotted setting -> new value, for everything the options change in `section`.

        Args:
            section: settings of an engine as its file spells them; empty for a bare checkpoint.
        Raises:
            ConfigError: options exclude each other, or a setting of the file would contradict one.
        """
        changed = {
            path: value
            for name, path in SETTINGS.items()
            if (value := getattr(self, name)) is not None
        }
        if self.device == "cpu" and self.dtype is None and "dtype" not in section:
            changed["dtype"] = "float32"
        speculation = section.get("speculation") or {}
        changed |= self._families(speculation)
        changed |= self._policy(speculation)
        # An option's own fixed width stands; one of the file may just have been taken back.
        fixed = changed.get("speculation.fixed_width", speculation.get("fixed_width"))
        changed |= self._narrowed(speculation, fixed)
        return changed

    def _families(self, speculation: Mapping[str, Any]) -> dict[str, Any]:
        """Program families (contract: R6): no drafts at serving time select the ordinary one,
        unless only the speculative one is prepared."""
        if self.no_mtp and self.mtp_only:
            raise ConfigError("--no-mtp and --mtp-only exclude each other: drop one")
        if self.mtp_only:
            return {"speculation.families": "speculative"}
        keeps_absorbing = speculation.get("families") == "speculative"
        if not self.no_mtp and (self.mtp_draft_tokens != 0 or keeps_absorbing):
            return {}
        needs_drafts = {
            "--mtp-draft-tokens": bool(self.mtp_draft_tokens),
            "--widths": self.widths not in (None, (1,)),
            "--fixed-width": self.fixed_width not in (None, 1),
            "--mtp-adaptive-verification": bool(self.mtp_adaptive_verification),
            "--history-drafts": bool(self.history_drafts),
            "--request-drafts": bool(self.request_drafts),
            "--no-learned-drafts": self.learned_drafts is False,
        }
        clashing = [flag for flag, needed in needs_drafts.items() if needed]
        if clashing:
            switch = "--no-mtp" if self.no_mtp else "--mtp-draft-tokens 0"
            raise ConfigError(
                f"{switch} serves without drafts, {', '.join(clashing)} needs them: drop either"
            )
        changed: dict[str, Any] = {"speculation.families": "ordinary"}
        # Wishes of the file that only drafts could fulfil.
        if speculation.get("fixed_width") is not None:
            changed["speculation.fixed_width"] = None
        for name in ("history_drafts", "request_drafts"):
            if speculation.get(name):
                changed[f"speculation.{name}"] = False
        if speculation.get("learned_drafts") is False:
            changed["speculation.learned_drafts"] = True
        return changed

    def _policy(self, speculation: Mapping[str, Any]) -> dict[str, Any]:
        if self.mtp_adaptive_verification and self.fixed_width is not None:
            raise ConfigError(
                "--mtp-adaptive-verification and --fixed-width exclude each other: drop one"
            )
        if self.mtp_adaptive_verification:
            changed: dict[str, Any] = {"speculation.policy": "adaptive"}
            if speculation.get("fixed_width") is not None:
                changed["speculation.fixed_width"] = None
            return changed
        if self.mtp_adaptive_verification is False or self.fixed_width is not None:
            return {"speculation.policy": "fixed"}
        return {}

    def _narrowed(self, speculation: Mapping[str, Any], fixed: int | None) -> dict[str, Any]:
        """Keep widths, draft count and fixed width of one mind when an option changes one of them
        (contract: G5: options select a subset)."""
        changed: dict[str, Any] = {}
        drafts = self.mtp_draft_tokens
        if drafts is None and self.widths is not None:
            drafts = changed["speculation.draft_tokens"] = self.widths[-1] - 1
        if drafts is None:
            return changed
        prepared = speculation.get("widths")
        if self.widths is None and prepared is not None:
            kept = tuple(width for width in prepared if width <= drafts + 1)
            if kept[-1:] != (drafts + 1,):
                raise ConfigError(
                    f"--mtp-draft-tokens {drafts} needs width {drafts + 1}, and the file's "
                    f"speculation.widths are {list(prepared)}: give --widths as well"
                )
            changed["speculation.widths"] = kept
        if fixed is not None and fixed > drafts + 1:
            raise ConfigError(
                f"{drafts} drafts reach width {drafts + 1}, below speculation.fixed_width {fixed}: "
                "change --fixed-width or the draft count"
            )
        return changed


def flag_of(path: str) -> str:
    """The option that replaces the setting at `path`, for messages."""
    for name, target in SETTINGS.items():
        if target == path:
            return _flags(name)
    return {"speculation.families": "--no-mtp or --mtp-only"}.get(
        path, "--mtp-adaptive-verification"
    )


def merge(
    section: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """`section` with `overrides` written into it, and one line per value that changed.

    Args:
        section: settings of an engine; not mutated.
        overrides: dotted setting -> value (`EngineOptions.overrides`).
    """
    merged = copy.deepcopy(dict(section))
    lines = []
    for path, value in overrides.items():
        *parents, name = path.split(".")
        target = merged
        for parent in parents:
            target[parent] = dict(target.get(parent) or {})
            target = target[parent]
        before = target.get(name)
        target[name] = value
        if before is None or _plain(before) != _plain(value):
            lines.append(f"engine.{path}: {_shown(path, before)} -> {_plain(value)}")
    return merged, lines


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(path: str, before: Any) -> str:
    if before is not None:
        return str(_plain(before))
    default = _field(path)[1]
    return "not set" if default is None else f"{default} (default)"


def engine_config(
    section: Mapping[str, Any], overrides: Mapping[str, Any], *, prefix: str = "engine."
) -> EngineConfig:
    """The validated settings of an engine.

    Args:
        section: settings as a file, or a caller, spells them.
        overrides: dotted setting -> value of an option (`EngineOptions.overrides`).
        prefix: where the settings stand in the file, for messages.
    Raises:
        ConfigError: one line per wrong value, naming the option or the setting.
    """
    merged, _ = merge(section, overrides)
    try:
        return EngineConfig.model_validate(merged)
    except ValidationError as error:
        problems = [_problem(item, overrides, prefix) for item in error.errors()]
        raise ConfigError("\n".join(problems)) from None


def _problem(item: Any, overrides: Mapping[str, Any], prefix: str) -> str:
    path = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    given = next((key for key in overrides if path == key or path.startswith(key + ".")), None)
    name = f"{prefix}{path}".rstrip(".") if given is None else flag_of(given)
    if item["type"] == "extra_forbidden":
        return f"{name}: no such setting"
    if item["type"] == "missing":
        return f"{name}: is required"
    if item["type"] == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}: {message}, got {item['input']!r}"


def option_names() -> tuple[str, ...]:
    """Names of all engine options, in the order of `--help`."""
    return tuple(field.name for field in fields(EngineOptions))
