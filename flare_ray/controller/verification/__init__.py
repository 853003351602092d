"""How many drafts to verify: the policy's interface and two policies (contract: C2, C3, G5)."""

from flare_ray.controller.verification.adaptive import AdaptivePolicy
from flare_ray.controller.verification.fixed import FixedPolicy
from flare_ray.controller.verification.log import LoggedPolicy, Opened, policy_of
from flare_ray.controller.verification.policy import (
    Cohort,
    CohortLane,
    CompletedRound,
    Decision,
    ProposalSource,
    VerificationPolicy,
)

__all__ = [
    "AdaptivePolicy",
    "Cohort",
    "CohortLane",
    "CompletedRound",
    "Decision",
    "FixedPolicy",
    "LoggedPolicy",
    "Opened",
    "ProposalSource",
    "VerificationPolicy",
    "policy_of",
]
