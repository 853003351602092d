"""Every metric series, declared once: name, kind, help, labels, buckets, alias (contract: A5).

Nothing else in the package spells a metric's name. Quantities carry their unit; fractions end in
`_ratio`. Stems that the field's load tools read are exported a second time under `alias` when the
deployment asks for it (`compat_metrics`). Counters get their `_total` from the exporter.

Process: "engine" series are written by the controller's thread, "ingress" series by an HTTP
replica's event loop; each process owns one `Recorder`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """How a series behaves and is exported."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Series:
    """One metric.

    Attributes:
        name: exported name, without `_total`.
        labels: label names besides the process's own (`engine` or `replica`).
        buckets: upper bounds of a histogram, increasing, without infinity.
        alias: name under which load tools know it; "" = none.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    alias: str = ""


_LATENCY_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_ROUND_S = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032),
    *(0.048, 0.064, 0.096, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192),
)
_TOKENS = tuple(float(2**n) for n in range(21))
_HOST_S = (
    *(0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0004, 0.0005, 0.00075),
    *(0.001, 0.002, 0.004, 0.008, 0.016, 0.064),
)

# Requests of one engine.
REQUESTS_RUNNING = Series(
    "flare_num_requests_running",
    Kind.GAUGE,
    "Requests that hold a slot.",
    alias="vllm:num_requests_running",
)
REQUESTS_WAITING = Series(
    "flare_num_requests_waiting",
    Kind.GAUGE,
    "Requests that wait for a slot or for pages.",
    alias="vllm:num_requests_waiting",
)
REQUESTS_PREEMPTED = Series(
    "flare_num_requests_preempted",
    Kind.GAUGE,
    "Preempted requests that wait to go on; they count as waiting too.",
)
PREEMPTIONS = Series(
    "flare_preemptions",
    Kind.COUNTER,
    "Requests that gave their pages up to others, by what was left of their state: snapshot or "
    "recompute.",
    labels=("kind",),
    alias="vllm:num_preemptions",
)
RECOMPUTED_TOKENS = Series(
    "flare_preemption_recomputed_tokens",
    Kind.COUNTER,
    "Tokens that preempted requests consumed a second time.",
)
REQUESTS_ADMITTED = Series(
    "flare_requests_admitted", Kind.COUNTER, "Requests that were accepted into the queue."
)
REQUESTS_FINISHED = Series(
    "flare_request_success",
    Kind.COUNTER,
    "Requests that ended well, by finish reason.",
    labels=("finished_reason",),
    alias="vllm:request_success",
)
REQUESTS_FAILED = Series(
    "flare_request_failures",
    Kind.COUNTER,
    "Requests that ended with an error, by code; refused ones included.",
    labels=("code",),
)
ROUTED_REQUESTS = Series(
    "flare_router_requests",
    Kind.COUNTER,
    "Requests routed here, by choice: known (this engine served the session or prefix before), "
    "home (they hash to it), guard (theirs had too many open requests, or was silent), load "
    "(nothing to go by).",
    labels=("choice",),
)
PROMPT_TOKENS = Series(
    "flare_prompt_tokens",
    Kind.COUNTER,
    "Prompt tokens consumed by prefill programs, those of preempted requests once.",
    alias="vllm:prompt_tokens",
)
GENERATION_TOKENS = Series(
    "flare_generation_tokens",
    Kind.COUNTER,
    "Generated tokens that counted towards a request, the ending one included.",
    alias="vllm:generation_tokens",
)

# Latencies as the engine sees them (arrival at the controller to hand-over for delivery).
TIME_TO_FIRST_TOKEN = Series(
    "flare_time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "Arrival to first visible token.",
    buckets=_LATENCY_S,
    alias="vllm:time_to_first_token_seconds",
)
INTER_TOKEN_LATENCY = Series(
    "flare_inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Gap between consecutive deliveries of one request.",
    buckets=_LATENCY_S,
    alias="vllm:inter_token_latency_seconds",
)
TIME_PER_OUTPUT_TOKEN = Series(
    "flare_request_time_per_output_token_seconds",
    Kind.HISTOGRAM,
    "(End to end - time to first token) / (generated tokens - 1) of a finished request.",
    buckets=_LATENCY_S,
    alias="vllm:request_time_per_output_token_seconds",
)
END_TO_END = Series(
    "flare_e2e_request_latency_seconds",
    Kind.HISTOGRAM,
    "Arrival to end of a request that finished well.",
    buckets=_LATENCY_S,
    alias="vllm:e2e_request_latency_seconds",
)
QUEUE_TIME = Series(
    "flare_request_queue_time_seconds",
    Kind.HISTOGRAM,
    "Arrival to slot.",
    buckets=_LATENCY_S,
    alias="vllm:request_queue_time_seconds",
)
REQUEST_PROMPT_TOKENS = Series(
    "flare_request_prompt_tokens",
    Kind.HISTOGRAM,
    "Prompt length of admitted requests.",
    buckets=_TOKENS,
    alias="vllm:request_prompt_tokens",
)
REQUEST_GENERATION_TOKENS = Series(
    "flare_request_generation_tokens",
    Kind.HISTOGRAM,
    "Generated tokens of requests that finished well.",
    buckets=_TOKENS,
    alias="vllm:request_generation_tokens",
)

# Speculation. "Draft" as load tools count it: one lane of one round that offered a draft.
SPEC_DRAFTS = Series(
    "flare_spec_decode_num_drafts",
    Kind.COUNTER,
    "Lanes of rounds that offered at least one draft.",
    alias="vllm:spec_decode_num_drafts",
)
SPEC_DRAFT_TOKENS = Series(
    "flare_spec_decode_num_draft_tokens",
    Kind.COUNTER,
    "Drafts offered to verification.",
    alias="vllm:spec_decode_num_draft_tokens",
)
SPEC_CUT_TOKENS = Series(
    "flare_spec_decode_num_grammar_cut_tokens",
    Kind.COUNTER,
    "Drafts that a grammar forbade before verification; neither offered nor rejected.",
)
SPEC_FORCED_TOKENS = Series(
    "flare_spec_decode_num_grammar_forced_tokens",
    Kind.COUNTER,
    "Drafts that a grammar's forced text put in the places of cut ones.",
)
SPEC_COPIED_TOKENS = Series(
    "flare_spec_decode_num_copied_tokens",
    Kind.COUNTER,
    "Drafts copied from text (shared history, the request's own, its client's prediction) and "
    "offered to verification, by source and draft position.",
    labels=("source", "position"),
)
SPEC_COPIED_ACCEPTED_TOKENS = Series(
    "flare_spec_decode_num_copied_accepted_tokens",
    Kind.COUNTER,
    "Copied drafts accepted by verification, by source and draft position; the other accepted "
    "ones are the drafter's.",
    labels=("source", "position"),
)
SPEC_ACCEPTED_TOKENS = Series(
    "flare_spec_decode_num_accepted_tokens",
    Kind.COUNTER,
    "Drafts accepted by verification.",
    alias="vllm:spec_decode_num_accepted_tokens",
)
SPEC_ACCEPTED_PER_POSITION = Series(
    "flare_spec_decode_num_accepted_tokens_per_pos",
    Kind.COUNTER,
    "Drafts accepted by verification, by depth from 0.",
    labels=("position",),
    alias="vllm:spec_decode_num_accepted_tokens_per_pos",
)
SPEC_EMITTED = Series(
    "flare_spec_decode_emitted_tokens", Kind.COUNTER, "Tokens committed by rounds."
)
SPEC_LANE_ROUNDS = Series(
    "flare_spec_decode_lane_rounds",
    Kind.COUNTER,
    "Lanes of rounds that executed a transition, by verification width of the program.",
    labels=("verify_width",),
)
SPEC_DEAD_LANES = Series(
    "flare_spec_decode_dead_lanes",
    Kind.COUNTER,
    "Lanes of rounds whose request had already ended when the program ran.",
)

# Rounds and the choice of their width.
ROUNDS = Series(
    "flare_rounds",
    Kind.COUNTER,
    "Programs harvested, by kind, batch capacity and verification width.",
    labels=("kind", "batch", "verify_width"),
)
ROUND_SECONDS = Series(
    "flare_round_seconds",
    Kind.HISTOGRAM,
    "Time of a program as the controller priced it, host gap included.",
    labels=("kind",),
    buckets=_ROUND_S,
)
ROUND_DEVICE_SECONDS = Series(
    "flare_round_device_seconds",
    Kind.HISTOGRAM,
    "Program time reported by rank 0.",
    labels=("kind",),
    buckets=_ROUND_S,
)
CONTROLLER_CPU = Series(
    "flare_controller_cpu_seconds",
    Kind.COUNTER,
    "CPU time of the controller's thread.",
)
CONTROLLER_PLAN_SECONDS = Series(
    "flare_controller_plan_seconds",
    Kind.HISTOGRAM,
    "Host time from a harvest to the next submitted plan.",
    buckets=_HOST_S,
)
PREFILL_DEFERRED = Series(
    "flare_prefill_deferred_rounds",
    Kind.COUNTER,
    "Rounds before which a prompt's program was held back for the inter-token target.",
)
POLICY_CHOSEN = Series(
    "flare_policy_chosen_width",
    Kind.COUNTER,
    "Rounds by the width the policy chose and why (best, kept, probe, fixed, only).",
    labels=("verify_width", "reason"),
)
POLICY_PREDICTED_EMITTED = Series(
    "flare_policy_predicted_emitted_tokens",
    Kind.COUNTER,
    "Sum of the tokens the policy expected its rounds to emit.",
)
POLICY_PREDICTED_SECONDS = Series(
    "flare_policy_predicted_seconds",
    Kind.COUNTER,
    "Sum of the time the policy expected its rounds to take.",
)
POLICY_MEASURED_EMITTED = Series(
    "flare_policy_measured_emitted_tokens",
    Kind.COUNTER,
    "Sum of the tokens that rounds with a prediction emitted.",
)
POLICY_MEASURED_SECONDS = Series(
    "flare_policy_measured_seconds",
    Kind.COUNTER,
    "Sum of the time that rounds with a prediction took.",
)
POLICY_PROBE_LOSS = Series(
    "flare_policy_probe_loss_seconds",
    Kind.COUNTER,
    "Sum of the time that probes were predicted to lose.",
)
POLICY_REGRET = Series(
    "flare_policy_regret_seconds",
    Kind.COUNTER,
    "Sum of the expected shortfall of choices against the best candidate by the estimates then.",
)
POLICY_PROBE_ACCOUNT = Series(
    "flare_policy_probe_account_seconds",
    Kind.GAUGE,
    "Time the exploration account could spend now.",
)

# Memory.
PAGES_TOTAL = Series("flare_pages", Kind.GAUGE, "Pages of the pool, the null page excluded.")
PAGES_FREE = Series("flare_pages_free", Kind.GAUGE, "Pages neither granted nor promised.")
PAGES_CACHED = Series(
    "flare_pages_cached", Kind.GAUGE, "Pages that prefix snapshots alone hold; free for requests."
)
PREFIX_QUERIES = Series(
    "flare_prefix_cache_queries",
    Kind.COUNTER,
    "Prompt tokens of requests that got a slot.",
    alias="vllm:prefix_cache_queries",
)
PREFIX_HITS = Series(
    "flare_prefix_cache_hits",
    Kind.COUNTER,
    "Prompt tokens restored from a prefix snapshot instead of computed.",
    alias="vllm:prefix_cache_hits",
)
SNAPSHOTS_HELD = Series(
    "flare_prefix_snapshots", Kind.GAUGE, "Prefix snapshots held, by tier.", labels=("tier",)
)
SNAPSHOT_BYTES = Series(
    "flare_prefix_snapshot_bytes",
    Kind.GAUGE,
    "Bytes per rank of the snapshots held, their pages apart, by tier.",
    labels=("tier",),
)
SNAPSHOT_SAVED = Series(
    "flare_prefix_saved_tokens",
    Kind.COUNTER,
    "Tokens of the prefixes that became a snapshot, by tier.",
    labels=("tier",),
)
SNAPSHOT_RESTORED = Series(
    "flare_prefix_restored_tokens",
    Kind.COUNTER,
    "Tokens of the snapshots that requests started from, by tier.",
    labels=("tier",),
)
SNAPSHOT_EVICTED = Series(
    "flare_prefix_evicted_tokens",
    Kind.COUNTER,
    "Tokens of the snapshots dropped to make room, by tier.",
    labels=("tier",),
)
SNAPSHOT_SAVED_BYTES = Series(
    "flare_prefix_saved_bytes",
    Kind.COUNTER,
    "Bytes per rank of the prefixes that became a snapshot, by tier.",
    labels=("tier",),
)
SNAPSHOT_RESTORED_BYTES = Series(
    "flare_prefix_restored_bytes",
    Kind.COUNTER,
    "Bytes per rank of the snapshots that requests started from, by tier.",
    labels=("tier",),
)
SNAPSHOT_EVICTED_BYTES = Series(
    "flare_prefix_evicted_bytes",
    Kind.COUNTER,
    "Bytes per rank of the snapshots dropped to make room, by tier.",
    labels=("tier",),
)
SNAPSHOT_RESTORE_SECONDS = Series(
    "flare_prefix_restore_seconds",
    Kind.HISTOGRAM,
    "Time in which a snapshot came back to the device, by the tier it came from.",
    labels=("tier",),
    buckets=_LATENCY_S,
)
SNAPSHOT_CORRUPT = Series(
    "flare_prefix_corrupt_files",
    Kind.COUNTER,
    "Snapshots of the disk tier that were missing, damaged or another engine's, and were removed.",
)
DISK_TIER_STOPPED = Series(
    "flare_prefix_disk_stopped",
    Kind.GAUGE,
    "1 while nothing is written to the disk tier since a write failed, else 0.",
)
CACHE_USAGE = Series(
    "flare_page_usage_ratio",
    Kind.GAUGE,
    "Granted or promised pages over all pages, 0 to 1.",
    alias="vllm:kv_cache_usage_perc",
)

# Process.
ENGINE_START = Series(
    "flare_engine_start_time_seconds", Kind.GAUGE, "Unix time at which this engine came up."
)
ENGINE_FATAL = Series(
    "flare_engine_fatal", Kind.GAUGE, "1 once the engine has failed for good, else 0."
)


def declared() -> tuple[Series, ...]:
    """Every series of this module, in order of declaration."""
    return tuple(value for value in globals().values() if isinstance(value, Series))
