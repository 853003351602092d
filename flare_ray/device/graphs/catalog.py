"""Which programs an engine prepares, and the scratch bytes they share (contract: G1, G2, M6).

Pure functions of host-known numbers, so that `plan` shows exactly what `prepare` builds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flare_ray.contracts.record import RECORD_FIELDS
from flare_ray.contracts.shapes import (
    PROMPT_KINDS,
    GraphKind,
    GraphShape,
    decode_shapes,
    masked_shapes,
    packed_shapes,
    prefill_shapes,
    resume_shapes,
    scored_shape,
    speculative_shapes,
)
from flare_ray.device.sampling.masks import mask_words
from flare_ray.device.sampling.scores import SCORE_WORDS
from flare_ray.device.speculation.inputs import ChunkField, LaneField
from flare_ray.device.speculation.record import NUM_FRAMES
from flare_ray.errors import ContractViolation

BUILT_KINDS = (
    GraphKind.PREFILL,
    GraphKind.SCORED_PREFILL,
    GraphKind.RESUME,
    GraphKind.DECODE,
    GraphKind.SPECULATIVE,
)
"""Kinds this release prepares; the other members of `GraphKind` are refused by name."""


@dataclass(frozen=True, slots=True)
class CatalogOptions:
    """What decides the catalog.

    Attributes:
        concurrency: largest number of lanes.
        prefill_tokens: rows of a prefill program.
        ordinary / speculative: families to prepare (contract: R6).
        widths: verification widths, increasing, containing one.
        token_capacity: largest B * W of a wide round.
        resume: prepare programs that go on from a snapshot.
        block: wide rounds draft the maximum whatever they verify.
        masked: prepare a masked entry beside every round (contract: G2).
        packed: rows a lane of the packed rounds to prepare besides (contract: G3); never masked.
    """

    concurrency: int
    prefill_tokens: int
    ordinary: bool
    speculative: bool
    widths: tuple[int, ...]
    token_capacity: int
    resume: bool = False
    block: bool = False
    masked: bool = False
    packed: tuple[int, ...] = ()


def catalog_shapes(options: CatalogOptions) -> tuple[GraphShape, ...]:
    """Every shape to prepare: rounds of each family, then prefills of each family."""
    shapes: list[GraphShape] = []
    if options.speculative:
        shapes += speculative_shapes(
            options.concurrency, options.widths, options.token_capacity, block=options.block
        )
    if options.ordinary:
        shapes += decode_shapes(options.concurrency)
    if options.masked:
        shapes += masked_shapes(shapes)
    if options.speculative and options.packed:
        shapes += packed_shapes(
            options.concurrency, options.widths[-1], options.token_capacity, options.packed
        )
    families = [True] * options.speculative + [False] * options.ordinary
    for speculation in families:
        shapes += prefill_shapes(
            options.concurrency, options.prefill_tokens, speculation=speculation
        )
        shapes.append(scored_shape(options.prefill_tokens, speculation=speculation))
        if options.resume:
            shapes += resume_shapes(options.concurrency, speculation=speculation)
    return tuple(shapes)


def shape_problem(shape: GraphShape) -> str:
    """Why a shape cannot be prepared by this release, "" if it can."""
    if shape.kind not in BUILT_KINDS:
        return f"kind {shape.kind} is not built"
    packed, batch = shape.packed_capacity, shape.batch_capacity
    if packed and not batch < packed < batch * shape.verify_width:
        return f"packed capacity {packed} of {batch} lanes of width {shape.verify_width}"
    if packed and not shape.draft_tokens:
        return f"packed capacity {packed} without drafts"
    if shape.kind in PROMPT_KINDS:
        return "" if shape.token_capacity >= 1 else "a prefill of no tokens"
    if shape.verify_width > shape.draft_tokens + 1:
        return f"width {shape.verify_width} with {shape.draft_tokens} drafts: nothing to verify"
    if shape.draft_tokens and not shape.speculation:
        return f"{shape.draft_tokens} drafts in the ordinary family"
    return ""


def refuse_unbuilt(shapes: Iterable[GraphShape]) -> None:
    """Refuse a catalog that no backend can build.

    Raises:
        ContractViolation: it holds shapes that this release does not prepare.
    """
    problems = [f"{shape}: {text}" for shape in shapes if (text := shape_problem(shape))]
    if problems:
        raise ContractViolation("the catalog holds shapes not built: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class ScratchSizes:
    """Elements of each arena: what one program leaves there is dead when the next one starts.
    Outputs (record, scores, prompt_scores) lie in each completion frame besides.

    Attributes:
        lanes: int64 lane inputs and prompt chunks.
        masks: int32 mask words.
        q: float32 proposal probabilities.
        record: int64 record fields.
        positions: int64 constants 0, 1, 2, ...
        scores: int32 words of log-probabilities.
        prompt_scores: likewise of a scored prefill's rows.
    """

    lanes: int
    masks: int
    q: int
    record: int
    positions: int
    scores: int
    prompt_scores: int

    @property
    def num_bytes(self) -> int:
        """Exact bytes, frames included."""
        sent = 8 * self.record + 4 * (self.scores + self.prompt_scores)
        kept = 8 * (self.lanes + self.positions) + 4 * (self.masks + self.q)
        return kept + sent * (1 + NUM_FRAMES)


def scratch_sizes(shapes: Iterable[GraphShape], vocab_size: int) -> ScratchSizes:
    """Smallest arenas that hold every shape."""
    lanes = masks = q = record = positions = scores = prompt_scores = 0
    words = mask_words(vocab_size)
    for shape in shapes:
        batch = shape.batch_capacity
        prefill = shape.kind in PROMPT_KINDS
        rows = 1 if prefill else shape.verify_width
        lanes = max(lanes, math.prod(lane_input_shape(shape)))
        masks = max(masks, batch * rows * words)
        q = max(q, batch * shape.draft_tokens * vocab_size)
        record = max(record, batch * RECORD_FIELDS)
        positions = max(positions, shape.token_capacity if prefill else shape.verify_width)
        scores = max(scores, batch * rows * SCORE_WORDS)
        if shape.kind is GraphKind.SCORED_PREFILL:
            prompt_scores = max(prompt_scores, batch * shape.token_capacity * SCORE_WORDS)
    return ScratchSizes(lanes, masks, q, record, positions, scores, prompt_scores)


def lane_input_shape(shape: GraphShape) -> tuple[int, int]:
    """[B, fields] of a shape's int64 inputs."""
    if shape.kind in PROMPT_KINDS:
        return shape.batch_capacity, ChunkField.TOKENS + shape.token_capacity
    return shape.batch_capacity, LaneField.COPIES + shape.draft_tokens
