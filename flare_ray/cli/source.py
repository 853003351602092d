"""What a command is pointed at: a deployment file or a bare checkpoint, with options applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flare_ray.cli.options import EngineOptions, engine_config, merge
from flare_ray.config import DeploymentConfig, EngineConfig
from flare_ray.errors import ConfigError


def engine_of(source: Path, options: EngineOptions) -> tuple[EngineConfig, list[str]]:
    """The engine that `source` and `options` describe, and one line per setting they replaced.

    Raises:
        ConfigError: there is no such file or folder, or a key, value or option is wrong.
    """
    if source.is_dir():
        section: dict[str, Any] = {"checkpoint": str(source)}
        return engine_config(section, options.overrides(section)), []
    deployment, lines = deployment_of(source, options)
    return deployment.engine, lines


def deployment_of(file: Path, options: EngineOptions) -> tuple[DeploymentConfig, list[str]]:
    """The deployment of a file with options applied, and one line per setting they replaced.

    Raises:
        ConfigError: as `engine_of`; or the file deploys no engine, or several.
    """
    if not file.exists():
        raise ConfigError(f"{file} does not exist: give a deployment file or a checkpoint folder")
    # Not the whole strict check: that one asks Ray, which neither plan nor debug-serve needs.
    from flare_ray.cli.config_check import check_arguments, read_document

    configs = check_arguments(read_document(file), name=str(file))
    if len(configs) != 1:
        raise ConfigError(
            f"{file} has {len(configs)} applications of this project ({', '.join(configs)}), and "
            "options apply to one: split the file"
        )
    [deployment] = configs.values()
    # What the file leaves out stays left out, so that defaults are not taken for its wishes.
    section = deployment.engine.model_dump(exclude_unset=True)
    overrides = options.overrides(section)
    _, lines = merge(section, overrides)
    engine = engine_config(section, overrides)
    return deployment.model_copy(update={"engine": engine}), lines
