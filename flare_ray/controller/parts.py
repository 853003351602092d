"""Parts of a controller, made from what was prepared and what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import MAX_EOS_IDS
from flare_ray.controller.admission import AdmissionLimits
from flare_ray.controller.cohort import PlanRules
from flare_ray.controller.drain import DrainRate
from flare_ray.controller.history.copies import Copying, CopyRules
from flare_ray.controller.pacing import PrefillGate
from flare_ray.controller.verification import (
    LoggedPolicy,
    Opened,
    VerificationPolicy,
    policy_of,
)
from flare_ray.errors import ConfigError


def check_settings(
    manifest: PreparedManifest, config: EngineConfig, token_bytes: Sequence[bytes]
) -> None:
    """Refuse what no controller can serve.

    Raises:
        ConfigError: names the setting.
    """
    if len(manifest.eos_ids) > MAX_EOS_IDS:
        raise ConfigError(
            f"the checkpoint has {len(manifest.eos_ids)} terminal tokens, a slot holds at most "
            f"{MAX_EOS_IDS}"
        )
    if len(token_bytes) < manifest.vocab_size:
        raise ConfigError(
            f"token_bytes covers {len(token_bytes)} of {manifest.vocab_size} token ids; build "
            "it with the model's vocabulary size"
        )


def admission_limits(
    manifest: PreparedManifest, config: EngineConfig, max_width: int
) -> AdmissionLimits:
    """What requests are held against."""
    context_tokens = min(manifest.context_tokens, config.context_tokens)
    max_prompt_tokens = config.admission.max_prompt_tokens
    if max_prompt_tokens is None or max_prompt_tokens >= context_tokens:
        max_prompt_tokens = context_tokens - 1
    return AdmissionLimits(
        context_tokens=context_tokens,
        max_prompt_tokens=max_prompt_tokens,
        vocab_size=manifest.vocab_size,
        max_waiting=config.admission.max_waiting,
        max_waiting_tokens=config.admission.max_waiting_tokens,
        preempts=config.admission.preemption,
        slack_tokens=(config.queue_depth - 1) * (max_width - 1),
        copies=manifest.copy_inputs and max_width > 1,
    )


def drain_rate(config: EngineConfig, clock: Callable[[], int]) -> DrainRate:
    """What refused clients are told; `clock` in nanoseconds."""
    bounds = config.admission
    return DrainRate(clock, least_s=bounds.retry_after_s, most_s=bounds.max_retry_after_s)


def verification_policy(
    manifest: PreparedManifest, config: EngineConfig, max_width: int
) -> VerificationPolicy:
    """How widths are chosen, and where decisions are logged."""
    settings = config.speculation
    width = (settings.fixed_width or max_width) if settings.policy == "fixed" else 0
    measured = () if width else manifest.prices
    opened = Opened(
        fixed_width=width,
        objective=settings.objective,
        inter_token_ns=1e6 * (settings.inter_token_slo_ms or 0.0),
        measured=measured,
    )
    policy = policy_of(opened)
    if settings.decision_log is None:
        return policy
    return LoggedPolicy(policy, Path(settings.decision_log), opened)


def copying_of(
    manifest: PreparedManifest, config: EngineConfig, policy: VerificationPolicy, max_width: int
) -> Copying:
    """Where copied drafts come from (contract: H2, H3).

    Raises:
        ConfigError: copies are asked for and no program takes any.
    """
    settings = config.speculation
    if settings.copies and not (manifest.copy_inputs and max_width > 1):
        raise ConfigError(
            f"speculation.{settings.copies[0]}: this engine serves no rounds that take copied "
            "drafts; leave it out, or prepare drafts (families, draft_tokens)"
        )
    rules = CopyRules(
        most=max_width - 1, alone=not settings.learned_drafts, queued=config.queue_depth > 1
    )
    return Copying(policy, rules, history=settings.history_drafts, own_text=settings.request_drafts)


def plan_rules(manifest: PreparedManifest, config: EngineConfig) -> PlanRules:
    """What plans hold to."""
    target_ms = config.speculation.inter_token_slo_ms
    return PlanRules(
        eos_ids=manifest.eos_ids,
        eager=config.eager or manifest.device == "cpu",
        own_rounds=config.grammar.own_rounds or not config.grammar.full_width,
        gate=None if target_ms is None else PrefillGate(1e6 * target_ms),
        copies_alone=not config.speculation.learned_drafts,
    )
