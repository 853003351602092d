"""Settings that change between two rounds, without a restart (contract: C1, G5).

Whoever asks is answered at once, from any thread (`check`); the loop applies what was asked before
it plans the next round (`apply`). Rounds in flight end as they were planned.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from flare_ray.config import EngineConfig
from flare_ray.config.live import LiveSettings
from flare_ray.controller.admission import Admission
from flare_ray.controller.catalog import ServedCatalog, narrowed
from flare_ray.controller.cohort import Planner
from flare_ray.errors import ConfigError

logger = logging.getLogger(__name__)


class Tuning:
    """What may be changed, and what it was at the start.

    Args:
        catalog: every program that the engine serves with.
    """

    def __init__(
        self, config: EngineConfig, catalog: ServedCatalog, admission: Admission, planner: Planner
    ) -> None:
        self._bounds = config.admission
        self._catalog = catalog
        self._admission = admission
        self._planner = planner

    def check(self, settings: LiveSettings) -> None:
        """Refuse what this engine cannot take; any thread.

        Raises:
            ConfigError: names the setting, and the most that it can be.
        """
        for name, asked, most in (
            ("max_draft_tokens", settings.max_draft_tokens, self._catalog.max_width - 1),
            ("max_waiting", settings.max_waiting, self._bounds.max_waiting),
        ):
            if asked is not None and asked > most:
                raise ConfigError(
                    f"user_config.{name}: this engine was started for at most {most}, got {asked}; "
                    "ask for less, or change the engine's settings, which restarts it"
                )

    def apply(self, settings: LiveSettings) -> None:
        """Put settings into force; the controller's thread, between two rounds."""
        catalog, bounds = self._catalog, self._bounds
        if settings.max_draft_tokens is not None:
            catalog = narrowed(catalog, settings.max_draft_tokens + 1)
        self._planner.catalog = catalog
        waiting, tokens = settings.max_waiting, settings.max_waiting_tokens
        self._admission.limits = replace(
            self._admission.limits,
            max_waiting=bounds.max_waiting if waiting is None else waiting,
            max_waiting_tokens=bounds.max_waiting_tokens if tokens is None else tokens,
        )
        logger.info("live settings in force: %s", settings.model_dump(exclude_none=True) or "none")
