"""How many drafts to verify: the policy's interface and two policies (contract: C2, C3, G5)."""

from flare_ray.controller.verification.adaptive import AdaptivePolicy
from flare_ray.controller.verification.fixed import FixedPolicy
from flare_ray.controller.verification.policy import (
    Cohort,
    CohortLane,
    CompletedRound,
    Decision,
    VerificationPolicy,
)

__all__ = [
    "AdaptivePolicy",
    "Cohort",
    "CohortLane",
    "CompletedRound",
    "Decision",
    "FixedPolicy",
    "VerificationPolicy",
]
