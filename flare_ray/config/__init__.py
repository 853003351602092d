"""User intent, and nothing else: frozen pydantic models that refuse unknown keys.

What preparation finds out goes into `contracts.manifest.PreparedManifest`, never back into these.
"""

from flare_ray.config.deployment import (
    DeploymentConfig,
    EngineAutoscaling,
    EngineDeployment,
    IngressDeployment,
    RoutingConfig,
)
from flare_ray.config.engine import (
    AdmissionConfig,
    EngineConfig,
    GrammarConfig,
    PrefixCacheConfig,
    SamplingConfig,
    SpeculationConfig,
)

__all__ = [
    "AdmissionConfig",
    "DeploymentConfig",
    "EngineAutoscaling",
    "EngineConfig",
    "EngineDeployment",
    "GrammarConfig",
    "IngressDeployment",
    "PrefixCacheConfig",
    "RoutingConfig",
    "SamplingConfig",
    "SpeculationConfig",
]
