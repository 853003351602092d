"""`flare-ray plan`: bytes per rank and programs of an engine, from shapes alone, before anything is
loaded or allocated (contract: M6, R10, G2)."""

from __future__ import annotations

from collections import defaultdict

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.shapes import GraphKind, GraphShape

MIB = 1 << 20
GIB = 1 << 30


def plan_text(manifest: PreparedManifest) -> str:
    """The plan as a person reads it."""
    return "\n\n".join((_engine_text(manifest), _bytes_text(manifest), _programs_text(manifest)))


def rank_bytes(manifest: PreparedManifest) -> int:
    """All bytes of one rank."""
    budget = manifest.budget
    return (
        budget.weights_bytes
        + budget.page_bytes
        + budget.state_bytes
        + budget.graph_pool_bytes
        + budget.scratch_bytes
    )


def available_bytes(manifest: PreparedManifest, given_gib: float | None) -> int:
    """Memory that one rank may use: what the user says, else what this machine has free.

    Returns:
        0 where this machine cannot say: the plan is for CUDA, and there is no CUDA device.
    """
    if given_gib is not None:
        return int(given_gib * GIB)
    import torch

    from flare_ray.device.capacity import free_bytes

    if manifest.device == "cuda" and not torch.cuda.is_available():
        return 0
    return free_bytes(manifest.device, manifest.world_size)


def fit_text(manifest: PreparedManifest, available: int) -> str:
    """One sentence that the plan fits.

    Args:
        available: memory that one rank may use; 0 = unknown.
    Raises:
        CapacityError: it does not fit, as preparation would say.
    """
    if not available:
        return "fit not checked: no CUDA device here; give --memory-gib"
    from flare_ray.device.capacity import check_capacity

    check_capacity(manifest, available)
    return f"fits: {rank_bytes(manifest) / GIB:.3f} of {available / GIB:.3f} GiB per rank"


def _parts(manifest: PreparedManifest) -> tuple[tuple[str, int, str], ...]:
    """Part, bytes, lifetime."""
    budget = manifest.budget
    return (
        ("weights", budget.weights_bytes, "persistent"),
        ("pages", budget.page_bytes, "persistent"),
        ("state", budget.state_bytes, "persistent"),
        ("graph pool", budget.graph_pool_bytes, "while programs exist"),
        ("scratch", budget.scratch_bytes, "during a program"),
    )


def _engine_text(manifest: PreparedManifest) -> str:
    ranks = manifest.world_size
    drafts = f"up to {manifest.draft_tokens} drafts" if manifest.speculation else "no drafter"
    threads = f", {manifest.threads} CPU thread(s) each" if manifest.threads else ""
    return "\n".join(
        (
            f"{manifest.recipe}: {manifest.checkpoint_name}",
            f"{ranks} rank{'s' if ranks > 1 else ''} on {manifest.device}, {manifest.dtype}"
            f"{threads}",
            f"{manifest.slots} requests of {manifest.context_tokens} tokens, "
            f"{manifest.num_pages} pages of {manifest.page_tokens} tokens, {drafts}",
        )
    )


def _bytes_text(manifest: PreparedManifest) -> str:
    budget, parts = manifest.budget, _parts(manifest)
    persistent = sum(count for _, count, lifetime in parts if lifetime == "persistent")
    rows = [*parts[:3], ("persistent", persistent, "sum of the above"), *parts[3:]]
    rows.append(("total", rank_bytes(manifest), "one rank"))
    places = {"host": "host memory", "disk": "files, not held in memory"}
    if budget.table_bytes:
        rows.append(("tables", budget.table_bytes, places[manifest.tables]))
    lines = ["bytes per rank"]
    lines += [
        f"  {name:<11}{count:>18,}  {count / MIB:>11,.1f} MiB  {lifetime}"
        for name, count, lifetime in rows
    ]
    return "\n".join(lines)


def _programs_text(manifest: PreparedManifest) -> str:
    groups: dict[tuple[GraphKind, bool], list[GraphShape]] = defaultdict(list)
    for shape in manifest.shapes:
        groups[shape.kind, shape.speculation].append(shape)
    recorded = f", captured as {manifest.graphs} graphs" if manifest.captured else ""
    lines = [f"programs: {len(manifest.shapes)}{recorded}"]
    for (kind, speculation), shapes in groups.items():
        family = "absorbs drafter history" if speculation else "ordinary"
        lines.append(f"  {kind.value}, {family}: {len(shapes)}")
        # A round's token capacity is its width.
        name = "tokens a lane" if kind is GraphKind.PREFILL else "widths"
        for lanes in sorted({shape.batch_capacity for shape in shapes}):
            sizes = sorted(s.token_capacity for s in shapes if s.batch_capacity == lanes)
            lines.append(f"    lanes {lanes:>3}: {name} {' '.join(map(str, sizes))}")
    return "\n".join(lines)
