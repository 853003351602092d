"""A checkpoint against its recipe, from headers alone, before anything is placed (contract: R5).

Ranks check the same before they load. By then Serve has reserved an engine's places and started its
processes, and does so again for each attempt to construct it: a damaged download would be refused
after most of a minute.
"""

from __future__ import annotations

from flare_ray.config import EngineConfig


def check_checkpoint(config: EngineConfig) -> None:
    """`flare_ray.device.prepare.check_checkpoint` on this host.

    Loads torch, which the processes that place engines and serve HTTP otherwise do without.

    Raises:
        CheckpointError, ConfigError: as there.
    """
    from flare_ray.device import prepare

    prepare.check_checkpoint(config)
