"""Host-known choices of captured programs: what is fixed at capture, and which plans it serves
(contract: G1, G4).

The eager backend decides per plan how many pages are in view and which optional steps its lanes
need. A captured program decides once. Every choice has a neutral form that changes no result, so a
program captured with more than a plan needs serves it too:

    pages in view    always all columns of the table; operators follow lengths on the device
    rows             always all; rows beyond a chunk are not valid
    first token      always sampled; whether a chunk is the last one is read on the device
    filters          top_k 0, top_p 1, min_p 0, factor 1 and addend 0 leave a lane's row as it is
    copies, masks    -1 and MASKED 0 mean none
    drafts           always proposed; copies take their places
    publication      lanes that cross no boundary copy into the null slot's row

Neutral is not free: position-keyed noise, 1,024 rules, twenty log-probabilities a row and the copy
of a lane's state cost more than a narrow round. So the rounds that carry ordinary traffic are
captured twice, and a plan gets the first program that covers what it needs:

    plain    temperature, top-k up to PLAIN_TOP_K, top-p, min-p; nothing is published
    full     everything the engine accepts

A variant is a second recording of the same catalog entry: the catalog, its ids and the policy's
choices know nothing of it. Masked entries and prompts exist as `full` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.plan import MAX_BAD_WORDS, MAX_LOGIT_RULES, MAX_TOP_LOGPROBS
from flare_ray.contracts.shapes import PROMPT_KINDS, GraphShape
from flare_ray.device.speculation.inputs import FilterBounds, HostFacts

PLAIN_TOP_K = 64
"""Largest top_k of the plain variant: the recipes' defaults lie below, and a partial sort of 64 is
cheaper than one of the vocabulary."""

VariantName = Literal["plain", "full"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One recording of a catalog entry and the facts that hold in it."""

    name: VariantName
    facts: HostFacts


def variant_names(shape: GraphShape) -> tuple[VariantName, ...]:
    """Recordings of a shape, cheapest first."""
    if shape.kind in PROMPT_KINDS or shape.masked:
        return ("full",)
    return ("plain", "full")


def count_graphs(shapes: Iterable[GraphShape]) -> int:
    """Graphs that are recorded for a catalog: a barrier divides a program in two."""
    return sum(len(variant_names(shape)) * (1 + shape.has_barrier) for shape in shapes)


def variants(shape: GraphShape, manifest: PreparedManifest, columns: int) -> tuple[Variant, ...]:
    """The recordings of a shape with their facts, cheapest first.

    Args:
        columns: page-table entries of a slot.
    """
    make = {"plain": _plain_facts, "full": _full_facts}
    return tuple(
        Variant(name, make[name](shape, manifest, columns)) for name in variant_names(shape)
    )


def covers(fixed: HostFacts, needed: HostFacts) -> bool:
    """Whether a program captured with `fixed` facts computes what a plan with `needed` ones asks
    for."""
    implied = (
        (needed.masked, fixed.masked),
        (needed.copies, fixed.copies),
        (needed.drafts, fixed.drafts),
        (needed.sampled, fixed.sampled),
        (needed.publishes, fixed.publishes),
    )
    return (
        needed.context_pages <= fixed.context_pages
        and needed.rows <= fixed.rows
        and all(there or not asked for asked, there in implied)
        and _filters_cover(fixed.filters, needed.filters)
    )


def _filters_cover(fixed: FilterBounds, needed: FilterBounds) -> bool:
    bounds = (
        (needed.max_top_k, fixed.max_top_k),
        (needed.max_rules, fixed.max_rules),
        (needed.max_bad_words, fixed.max_bad_words),
        (needed.max_top_logprobs, fixed.max_top_logprobs),
        (needed.max_prompt_logprobs, fixed.max_prompt_logprobs),
        (needed.any_top_p, fixed.any_top_p),
        (needed.any_min_p, fixed.any_min_p),
        (needed.any_penalty, fixed.any_penalty),
        (needed.any_coupled, fixed.any_coupled),
    )
    # These two leave work out for all lanes, so they may hold only where they hold for the plan.
    shortcuts = (
        (fixed.every_lane_greedy, needed.every_lane_greedy),
        (fixed.every_lane_coupled, needed.every_lane_coupled),
    )
    same_scores = (
        needed.max_top_logprobs < 0 or needed.processed_logprobs == fixed.processed_logprobs
    )
    return (
        all(int(asked) <= int(there) for asked, there in bounds)
        and all(holds or not taken for taken, holds in shortcuts)
        and same_scores
    )


def _plain_facts(shape: GraphShape, manifest: PreparedManifest, columns: int) -> HostFacts:
    return HostFacts(
        context_pages=columns,
        rows=_rows(shape),
        masked=False,
        copies=False,
        sampled=True,
        filters=FilterBounds(
            max_top_k=min(PLAIN_TOP_K, manifest.vocab_size), any_top_p=True, any_min_p=True
        ),
        publishes=False,
    )


def _full_facts(shape: GraphShape, manifest: PreparedManifest, columns: int) -> HostFacts:
    return HostFacts(
        context_pages=columns,
        rows=_rows(shape),
        masked=shape.masked or shape.kind in PROMPT_KINDS,
        copies=shape.draft_tokens > 0,
        sampled=True,
        filters=FilterBounds(
            max_top_k=manifest.vocab_size,
            any_top_p=True,
            any_min_p=True,
            any_penalty=True,
            max_rules=MAX_LOGIT_RULES,
            max_bad_words=MAX_BAD_WORDS,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            any_coupled=True,
            max_prompt_logprobs=MAX_TOP_LOGPROBS,
            processed_logprobs=manifest.processed_logprobs,
        ),
        publishes=True,
    )


def _rows(shape: GraphShape) -> int:
    return shape.token_capacity if shape.kind in PROMPT_KINDS else shape.verify_width
