"""Shapes, types and bytes of all persistent state, computed before anything is allocated
(contract: M6).

`allocations` is the single list that `plan` sums and `StateStore` allocates, so both cannot differ.

Request state of one slot, int64 fields in the order of `Core`:

    identity     UID EPOCH
    mutable      PHASE PENDING CONSUMED GENERATED BUDGET COLUMN DRAFT_POSITION   written by programs
    parameters   TOP_K KEYS[4] EOS[16]                                           written by SlotInit

One gather reads a lane's whole row and one scatter writes its mutable part back. Row S is the null
slot: phase EMPTY, all zero, page-table entries 0; padded, stale and finished lanes are redirected
to it and leave it as it was.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flare_ray.contracts.plan import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_EOS_IDS,
    MAX_LOGIT_RULES,
)
from flare_ray.contracts.shapes import MAX_WIDTH, PAGE_TOKENS
from flare_ray.recipes.declaration import StateGroup, StateSpec
from flare_ray.rng import RngDomain

NUM_DOMAINS = len(RngDomain)


class Core(enum.IntEnum):
    """First column of each int64 field of a slot."""

    UID = 0
    EPOCH = 1
    PHASE = 2
    PENDING = 3
    CONSUMED = 4
    GENERATED = 5
    BUDGET = 6
    COLUMN = 7
    DRAFT_POSITION = 8
    TOP_K = 9
    KEYS = 10
    EOS = KEYS + NUM_DOMAINS


CORE_FIELDS = Core.EOS + MAX_EOS_IDS
MUTABLE = slice(Core.PHASE, Core.DRAFT_POSITION + 1)
KEYS = slice(Core.KEYS, Core.KEYS + NUM_DOMAINS)
EOS = slice(Core.EOS, CORE_FIELDS)
NO_TOKEN = -1
"""Fills unused EOS places: equal to no token id."""


class Sampling(enum.IntEnum):
    """Column of each float32 field of a slot."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5
    COUPLED = 6


class Rule(enum.IntEnum):
    """Column of each int64 field of a logit rule."""

    TOKEN = 0
    BEFORE = 1


class Published(enum.IntEnum):
    """Column of each int64 field that identifies a publication row."""

    EPOCH = 0
    CONSUMED = 1


class Phase(enum.IntEnum):
    """What a slot may do next. Rounds run READY slots, prefills run FILLING ones."""

    EMPTY = 0
    FILLING = 1
    """Handed to a request whose prompt is not consumed yet."""
    READY = 2
    """A pending token exists and budget is left."""
    ENDED = 3
    """EOS, budget or non-finite logits: no program changes the slot until its next SlotInit."""


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class StateLimits:
    """Sizes every allocation follows from.

    Attributes:
        slots: S, concurrent requests; the null slot is index S.
        num_pages: pages in the pool, the null page 0 included.
        context_tokens: longest prompt plus output.
        dtype: "float32" | "bfloat16", the activation type.
        device: "cpu" | "cuda".
        vocab_size: tokens counted per slot for penalties.
        speculation: drafter groups and the feedback tail exist (contract: R6).
        publication: publication rows exist (contract: M4).
        snapshot_rows: prefix snapshots; any makes publication rows exist too.
    """

    slots: int
    num_pages: int
    context_tokens: int
    dtype: str
    device: str
    vocab_size: int
    speculation: bool
    publication: bool = False
    snapshot_rows: int = 0

    @property
    def publishes(self) -> bool:
        """Whether programs keep what a snapshot needs."""
        return self.publication or self.snapshot_rows > 0

    @property
    def table_columns(self) -> int:
        """Page-table entries of a slot: the context and the furthest rejected or drafted row."""
        return pages_for(self.context_tokens + MAX_WIDTH)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One tensor of persistent state.

    owner: "page" = the page pool, "group" = per-slot recipe state, "request" = request state,
    "publication" = publication rows, "snapshot" = prefix snapshots. `name` is unique within its
    owner.
    """

    owner: Literal["page", "group", "request", "publication", "snapshot"]
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Exact size of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // PAGE_TOKENS)


def active_groups(spec: StateSpec, limits: StateLimits) -> tuple[StateGroup, ...]:
    """Groups this engine allocates: the drafter's only where drafting is prepared."""
    return tuple(g for g in spec.groups if limits.speculation or g.family == "target")


def allocations(spec: StateSpec, limits: StateLimits) -> tuple[Allocation, ...]:
    """Every persistent tensor of one rank, weights apart."""
    rows = limits.slots + 1
    groups = active_groups(spec, limits)
    result = [_group_allocation(group, limits) for group in groups]
    result += [
        Allocation("request", "core", (rows, CORE_FIELDS), "int64"),
        Allocation("request", "sampling", (rows, len(Sampling)), "float32"),
        Allocation("request", "page_table", (rows, limits.table_columns), "int64"),
        Allocation("request", "token_counts", (rows, limits.vocab_size), "int32"),
        Allocation("request", "rules", (rows, MAX_LOGIT_RULES, len(Rule)), "int64"),
        Allocation("request", "rule_addends", (rows, MAX_LOGIT_RULES), "float32"),
        Allocation("request", "bad_words", (rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), "int64"),
        Allocation("request", "recent", (rows, MAX_BAD_WORD_TOKENS - 1), "int64"),
        Allocation("request", "generated_from", (rows,), "int64"),
    ]
    if limits.speculation:
        result.append(Allocation("request", "tail", (rows, spec.tail_width), limits.dtype))
    if limits.publishes:
        vector = (rows, spec.sampling_width)
        result.append(Allocation("request", "sampling_vector", vector, limits.dtype))
        result += _kept("publication", rows, spec, limits)
        result.append(Allocation("publication", "published", (rows, len(Published)), "int64"))
    if limits.snapshot_rows:
        result += _kept("snapshot", limits.snapshot_rows, spec, limits)
    return tuple(result)


def state_bytes(spec: StateSpec, limits: StateLimits) -> tuple[int, int]:
    """Exact (page pool bytes, all other state bytes) of one rank."""
    plan = allocations(spec, limits)
    pages = sum(a.num_bytes for a in plan if a.owner == "page")
    return pages, sum(a.num_bytes for a in plan) - pages


def snapshot_row_bytes(spec: StateSpec, limits: StateLimits) -> int:
    """Exact bytes of one prefix snapshot on one rank, its pages apart."""
    return sum(a.num_bytes for a in _kept("snapshot", 1, spec, limits))


def _dtype(group: StateGroup, limits: StateLimits) -> str:
    return limits.dtype if group.dtype == "activation" else group.dtype


def _group_allocation(group: StateGroup, limits: StateLimits) -> Allocation:
    rows = limits.slots + 1
    lead = {
        "page": (limits.num_pages,),
        "column": (rows, MAX_WIDTH),
        "window": (rows, group.keep + MAX_WIDTH),
        "ring": (rows, group.entries),
        "row": (rows,),
        "replayed": (rows,),
        "record": (rows, MAX_WIDTH),
    }[group.kind]
    owner: Literal["page", "group"] = "page" if group.kind == "page" else "group"
    return Allocation(owner, group.name, (*lead, *group.shape), _dtype(group, limits))


def published_shape(group: StateGroup) -> tuple[int, ...]:
    """Shape of one slot's publication row of a group that lives per slot."""
    lead = {"window": (group.keep,), "ring": (group.entries,)}.get(group.kind, ())
    return (*lead, *group.shape)


def lasting_groups(groups: tuple[StateGroup, ...]) -> tuple[StateGroup, ...]:
    """Groups whose live state a snapshot copies: neither pages, which are shared, nor the records
    of a round, which are replayed into what is copied."""
    return tuple(group for group in groups if group.kind not in ("page", "record"))


def _kept(
    owner: Literal["publication", "snapshot"], rows: int, spec: StateSpec, limits: StateLimits
) -> Iterator[Allocation]:
    """`rows` copies of everything a slot holds beside its pages."""
    for group in lasting_groups(active_groups(spec, limits)):
        shape = (rows, *published_shape(group))
        yield Allocation(owner, group.name, shape, _dtype(group, limits))
    yield Allocation(owner, "tail", (rows, spec.tail_width), limits.dtype)
    yield Allocation(owner, "sampling_vector", (rows, spec.sampling_width), limits.dtype)
