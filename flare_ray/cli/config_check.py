"""The strict check of a deployment file.

Ray Serve's own schema drops unknown keys at most levels without a word; here every key at every
level must be a field of the model that stands there. Problems are collected and told together,
each with its path.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import yaml
from pydantic import BaseModel, ValidationError

from flare_ray.actors.preflight import engine_bundles, total_of
from flare_ray.cli.knobs import setting_known_as
from flare_ray.cli.options import SETTINGS
from flare_ray.config import DeploymentConfig, EngineConfig, EngineDeployment
from flare_ray.config.live import LiveSettings
from flare_ray.errors import ConfigError
from flare_ray.recipes import registry

IMPORT_PATH = "flare_ray.frontend.app:build"
"""What an application of this project names; others in a file are checked by Serve's rules only."""
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ENGINE_STRATEGY = "STRICT_PACK"
MAX_LISTED_KEYS = 12

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checked:
    """A file that passed.

    Attributes:
        configs: arguments of this project's applications, by application name.
    """

    document: Document
    configs: Mapping[str, DeploymentConfig]


def check_file(path: Path) -> str:
    """What a deployment file deploys, in a few lines.

    Raises:
        ConfigError: everything that is wrong with it, one line each.
    """
    checked = check_document(read_document(path), name=str(path))
    lines = [f"{path}: correct"]
    for name, config in checked.configs.items():
        engine, bundles = config.engine, engine_bundles(config)
        needs = ", ".join(f"{amount:g} {what}" for what, amount in total_of(bundles).items())
        lines.append(
            f"application {name}: model {config.model_name}, checkpoint {engine.checkpoint}, "
            f"{engine_count(config.engine_deployment)} engine(s) of {engine.tensor_parallel_size} "
            f"rank(s) on {engine.device} ({needs} on one node each), "
            f"{config.ingress.min_replicas} to {config.ingress.max_replicas} HTTP replica(s)"
        )
    lines += open_access(checked)
    others = [
        application.get("name", "default")
        for application in checked.document["applications"]
        if application.get("import_path") != IMPORT_PATH
    ]
    lines += [f"application {name}: not this project's, its args are unchecked" for name in others]
    return "\n".join(lines)


def engine_count(deployment: EngineDeployment) -> str:
    """How many engines there may be, in words."""
    fewest, most = deployment.replicas, deployment.most_replicas
    return str(fewest) if fewest == most else f"{fewest} to {most}"


def open_access(checked: Checked) -> list[str]:
    """One line for each application that asks for no API keys."""
    host = checked.document["http_options"]["host"]
    return [
        f"application {name}: no API keys (ingress.keys_file): whoever reaches {host} may use it"
        for name, config in checked.configs.items()
        if config.ingress.keys_file is None
    ]


def read_document(path: Path) -> Document:
    """The YAML of a file, in which no key may stand twice.

    Raises:
        ConfigError: it cannot be read, is no YAML, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        document = yaml.load(text, Loader=UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping with `applications:`")
    return document


def check_document(document: Document, *, name: str) -> Checked:
    """Check a document: keys, then the arguments of our applications, then Serve's own rules.

    Args:
        name: what to call the document in messages.
    Raises:
        ConfigError: everything that is wrong, one line each.
    """
    # Imports Ray, which reads its environment then; `serve` sets that up between reading a document
    # and checking it.
    from flare_ray.frontend.app import DEPLOYMENTS, deploy_schema

    schema = deploy_schema()
    problems = list(unknown_keys(document, schema, path=""))
    configs, more = _arguments(document)
    problems += more
    http = document.get("http_options") or {}
    if configs and isinstance(http, Mapping) and "host" not in http:
        problems.append(
            "http_options.host: is required: name the address to listen on (127.0.0.1 for this "
            "machine alone); left out, Serve would take every interface"
        )
    for i, application in enumerate(_applications(document)):
        config = configs.get(application.get("name", "default"))
        if config is not None and application.get("import_path") == IMPORT_PATH:
            path = f"applications[{i}]"
            problems += _override_problems(application, config, DEPLOYMENTS, path=path)
    if not problems:
        try:
            schema.model_validate(document)
        except ValidationError as error:
            problems += _violations(error, "")
    _refuse(problems, name)
    return Checked(document, configs)


def check_arguments(document: Document, *, name: str) -> dict[str, DeploymentConfig]:
    """Check what a document says to this project alone, without Ray: arguments by application.

    Raises:
        ConfigError: everything that is wrong with them, one line each.
    """
    configs, problems = _arguments(document)
    _refuse(problems, name)
    return configs


def _arguments(document: Document) -> tuple[dict[str, DeploymentConfig], list[str]]:
    """Valid arguments of our applications, and what is wrong with the others."""
    configs: dict[str, DeploymentConfig] = {}
    problems: list[str] = []
    for i, application in enumerate(_applications(document)):
        path = f"applications[{i}].args"
        if application.get("import_path") != IMPORT_PATH:
            continue
        args = application.get("args") or {}
        problems += unknown_keys(args, DeploymentConfig, path)
        try:
            config = DeploymentConfig.model_validate(args)
        except ValidationError as error:
            problems += _violations(error, path)
            continue
        configs[application.get("name", "default")] = config
        problems += _engine_problems(config, f"{path}.engine")
    return configs, problems


def _refuse(problems: list[str], name: str) -> None:
    if problems:
        # The walk and the models may both complain about one unknown key.
        raise ConfigError("\n".join([f"{name}:", *dict.fromkeys(problems)]))


def unknown_keys(value: Any, model: type[BaseModel], path: str) -> Iterator[str]:
    """One line for each key below `value` that `model` has no field for."""
    if not isinstance(value, Mapping):
        return
    known = dict(model.model_fields)
    known |= {field.alias: field for field in model.model_fields.values() if field.alias}
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        field = known.get(key)
        if field is None:
            yield f"{where}: unknown key{suggestion(str(key), list(known))}"
            continue
        inner, is_list = _inner_model(field.annotation)
        if inner is None:
            continue
        if is_list and isinstance(item, list):
            for i, entry in enumerate(item):
                yield from unknown_keys(entry, inner, f"{where}[{i}]")
        else:
            yield from unknown_keys(item, inner, where)


def _inner_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds, and whether it holds a list of them. A field that takes a
    plain mapping or a model is read as the model: that is what Serve makes of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin = typing.get_origin(annotation)
    if origin is list:
        inner, _ = _inner_model(typing.get_args(annotation)[0])
        return inner, inner is not None
    if origin in (Union, types.UnionType, typing.Annotated):
        for option in typing.get_args(annotation):
            found = _inner_model(option)
            if found[0] is not None:
                return found
    return None, False


def _engine_problems(config: DeploymentConfig, path: str) -> Iterator[str]:
    """What the recipe, if the file names one, does not offer."""
    engine = config.engine
    if engine.recipe is None:
        return
    try:
        recipe = registry.get(engine.recipe)
    except ConfigError as error:
        yield f"{path}.recipe: {error}"
        return
    if engine.tensor_parallel_size not in recipe.tensor_parallel:
        yield (
            f"{path}.tensor_parallel_size: recipe {recipe.name} splits into "
            f"{', '.join(map(str, recipe.tensor_parallel))} ranks, got "
            f"{engine.tensor_parallel_size}"
        )
    drafts = engine.speculation.draft_tokens
    if drafts is not None and drafts > recipe.speculation.max_draft_tokens:
        yield (
            f"{path}.speculation.draft_tokens: recipe {recipe.name} drafts at most "
            f"{recipe.speculation.max_draft_tokens} tokens, got {drafts}"
        )


def _override_problems(
    application: Mapping[str, Any],
    config: DeploymentConfig,
    names: tuple[str, str],
    *,
    path: str,
) -> Iterator[str]:
    """What an entry of `deployments:` may not change.

    Args:
        names: deployments of engines and of HTTP replicas.
    """
    overrides = application.get("deployments") or []
    for i, override in enumerate(overrides if isinstance(overrides, list) else []):
        if not isinstance(override, Mapping):
            continue
        where = f"{path}.deployments[{i}]"
        name = override.get("name")
        if name not in names:
            yield f"{where}.name: this application has {' and '.join(names)}, got {name!r}"
        strategy = override.get("placement_group_strategy")
        if strategy is not None and strategy not in STRATEGIES:
            yield f"{where}.placement_group_strategy: must be one of {', '.join(STRATEGIES)}"
        engine = config.engine if name == names[0] else None
        yield from _live_problems(override.get("user_config"), engine, f"{where}.user_config")
        if name != names[0]:
            continue
        if strategy in STRATEGIES and strategy != ENGINE_STRATEGY:
            yield (
                f"{where}.placement_group_strategy: ranks share a node: {ENGINE_STRATEGY}, got "
                f"{strategy}"
            )
        if "num_replicas" in override and config.engine_deployment.autoscaling is not None:
            yield (
                f"{where}.num_replicas: engine_deployment.autoscaling sets their number; leave one "
                "of the two out"
            )
        bundles, needed = override.get("placement_group_bundles"), engine_bundles(config)
        if bundles is not None and bundles != needed:
            yield (
                f"{where}.placement_group_bundles: {config.engine.tensor_parallel_size} rank(s) "
                f"need {needed}, got {bundles}; leave it out and set engine_deployment instead"
            )


def _live_problems(settings: Any, engine: EngineConfig | None, path: str) -> Iterator[str]:
    """What is wrong with live settings.

    Args:
        engine: whose they are; None = of a deployment that has none.
    """
    if settings is None:
        return
    if engine is None:
        yield f"{path}: this deployment has no live settings; leave it out"
        return
    yield from unknown_keys(settings, LiveSettings, path)
    try:
        live = LiveSettings.model_validate(settings)
    except ValidationError as error:
        yield from _violations(error, path)
        return
    for key, asked, most in (
        ("max_draft_tokens", live.max_draft_tokens, engine.speculation.draft_tokens),
        ("max_waiting", live.max_waiting, engine.admission.max_waiting),
    ):
        if asked is not None and most is not None and asked > most:
            yield f"{path}.{key}: the engine is started for at most {most}, got {asked}"


def _applications(document: Document) -> list[Mapping[str, Any]]:
    applications = document.get("applications")
    if not isinstance(applications, list):
        return []
    return [application for application in applications if isinstance(application, Mapping)]


def _violations(error: ValidationError, prefix: str) -> Iterator[str]:
    for item in error.errors(include_url=False):
        path = prefix
        for part in item["loc"]:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
        path = path.lstrip(".")
        if item["type"] == "extra_forbidden":
            continue  # told by `unknown_keys`, with a suggestion
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            yield f"{path}: is required"
        elif item["type"] == "value_error":
            yield f"{path}: {message}" if path else message
        else:
            yield f"{path}: {message}, got {item['input']!r}"


def suggestion(key: str, known: list[str]) -> str:
    """What an unknown key may have meant: "; did you mean ...", or the keys that are known."""
    foreign = setting_known_as(key)
    if foreign is not None:
        return f"; here it is engine.{SETTINGS[foreign]}"
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    listed = sorted(known)
    more = ", ..." if len(listed) > MAX_LISTED_KEYS else ""
    return f"; known here: {', '.join(listed[:MAX_LISTED_KEYS])}{more}"


class UniqueKeyLoader(yaml.SafeLoader):
    """Plain YAML keeps the last of two equal keys and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys all differ."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise yaml.constructor.ConstructorError(
                None, None, f"repeated key(s): {', '.join(repeated)}", node.start_mark
            )
        return super().construct_mapping(node, deep=deep)
