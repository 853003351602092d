"""What preparation found out and built; readable JSON whose digest every rank must agree on
(contract: G2, G7, M6)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from flare_ray.contracts.shapes import GraphShape

MANIFEST_VERSION = 1


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint's generation defaults (contract: S3), and the deployment's.

    Attributes:
        reproducible: which requests draw by position if they do not say (contract: S4).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    reproducible: Literal["on_request", "seeded", "always"] = "on_request"


class ByteBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank, by lifetime (contract: M6).

    Attributes:
        weights_bytes: where programs run.
        table_bytes: of tables that lie elsewhere (contract: M8).
    """

    weights_bytes: int
    page_bytes: int
    state_bytes: int
    graph_pool_bytes: int
    scratch_bytes: int
    table_bytes: int = 0


class PreparedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One prepared engine. Equal on all ranks but for `prices`.

    Attributes:
        num_pages: pages in the pool, the null page 0 included.
        slots: concurrent requests; the null slot is index `slots`.
        context_tokens: longest prompt plus output.
        prefill_tokens: rows per prefill chunk.
        draft_tokens: largest D prepared (0 = none).
        shapes: every prepared round, decode and prefill shape.
        snapshot_rows: prefix snapshots a rank can hold beside the slots; 0 = no prefix cache.
        snapshot_row_bytes: bytes of one of them on one rank, its pages apart.
        host_cache_bytes: host memory of one rank for copies of snapshots; 0 = no host tier.
        state_layout: digest of what a snapshot consists of: names, shapes and types.
        snapshots_inside_rounds: a snapshot may lie at any accepted row of a round, not only at its
            last one.
        processed_logprobs: reported log-probabilities are those of the distribution drawn from.
        expert_weights / tables: how routed experts are held, and where tables lie, as configured;
            tables are "device" for a model without any.
        threads: CPU threads per rank, fixed at preparation; 0 on CUDA.
        captured: programs are CUDA graphs; False = their functions are called (contract: G6).
        graphs: graphs that are captured for `shapes`: variants and parts counted apart.
        prices: nanoseconds of rounds by shape, measured at preparation; empty where it was not, and
            no part of the digest.
    """

    version: int = MANIFEST_VERSION
    recipe: str
    checkpoint_name: str
    world_size: int
    device: str
    dtype: str
    vocab_size: int
    context_tokens: int
    page_tokens: int
    num_pages: int
    slots: int
    prefill_tokens: int
    draft_tokens: int
    speculation: bool
    copy_inputs: bool
    eos_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    shapes: tuple[GraphShape, ...]
    budget: ByteBudget
    expert_weights: str = "auto"
    tables: str = "device"
    threads: int = 0
    snapshot_rows: int = 0
    snapshot_row_bytes: int = 0
    snapshots_inside_rounds: bool = True
    host_cache_bytes: int = 0
    state_layout: str = ""
    processed_logprobs: bool = False
    captured: bool = False
    graphs: int = 0
    prices: tuple[tuple[GraphShape, int], ...] = ()


def manifest_json(manifest: PreparedManifest) -> bytes:
    """Canonical JSON, one field order, for files and digests."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1)


def manifest_digest(manifest: PreparedManifest) -> str:
    """SHA-256 of the canonical JSON without prices; ranks compare it before they serve."""
    unpriced = msgspec.structs.replace(manifest, prices=())
    return hashlib.sha256(manifest_json(unpriced)).hexdigest()


def agreed_manifest(manifests: Sequence[PreparedManifest]) -> PreparedManifest:
    """The manifest of ranks whose digests are equal: a round costs what its slowest rank takes."""
    slowest: dict[GraphShape, int] = {}
    for manifest in manifests:
        for shape, cost in manifest.prices:
            slowest[shape] = max(cost, slowest.get(shape, 0))
    return msgspec.structs.replace(manifests[0], prices=tuple(slowest.items()))


class PreparedCore(msgspec.Struct, frozen=True, kw_only=True):
    """What `flare-ray prepare` keeps of a preparation, beside the kernels it compiled (contract:
    G7).

    Attributes:
        manifest: what was prepared, with the prices of its rounds and the bytes that its graphs
            really took.
        device_name: the chip, or the processor's architecture on CPU.
        torch: release that it ran on.
    """

    version: int = MANIFEST_VERSION
    manifest: PreparedManifest
    device_name: str
    torch: str
