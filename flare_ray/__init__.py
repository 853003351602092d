"""Distributed speculative serving in Python on Ray.

The package root owns the version and the names for offline use: ``LLM``, ``SamplingParams`` and
``GrammarSpec``. They are imported on first use: ``import flare_ray`` loads neither torch nor ray,
so that the command line and host tests start fast.
"""

from typing import TYPE_CHECKING, Any

from flare_ray._version import __version__

if TYPE_CHECKING:
    from flare_ray.cli.llm import LLM
    from flare_ray.contracts.grammar import GrammarSpec
    from flare_ray.contracts.request import SamplingParams

__all__ = ["LLM", "GrammarSpec", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a name for offline use on first access (PEP 562)."""
    if name == "LLM":
        from flare_ray.cli.llm import LLM

        return LLM
    if name == "SamplingParams":
        from flare_ray.contracts.request import SamplingParams

        return SamplingParams
    if name == "GrammarSpec":
        from flare_ray.contracts.grammar import GrammarSpec

        return GrammarSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
