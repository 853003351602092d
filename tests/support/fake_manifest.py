"""A manifest of small numbers for the fake ranks, and an output that keeps what it is sent."""

from __future__ import annotations

from flare_ray.contracts.manifest import ByteBudget, PreparedManifest, SamplingDefaults
from flare_ray.contracts.messages import StreamItem
from flare_ray.contracts.shapes import (
    PAGE_TOKENS,
    decode_shapes,
    prefill_shapes,
    resume_shapes,
    speculative_shapes,
)


class CollectingOutput:
    """An `OutputPort` that keeps what it is sent."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, tuple[StreamItem, ...]]] = []

    def send(self, reply_to: str, items: tuple[StreamItem, ...]) -> None:
        self.batches.append((reply_to, items))

    def items(self, request_id: str) -> list[StreamItem]:
        """Items of one request, in order."""
        return [
            item
            for _, items in self.batches
            for item in items
            if getattr(item, "request_id", None) == request_id
        ]


def make_manifest(
    *,
    slots: int = 4,
    draft_tokens: int = 5,
    context_tokens: int = 1024,
    num_pages: int = 0,
    prefill_tokens: int = 64,
    eos_ids: tuple[int, ...] = (),
) -> PreparedManifest:
    """A prepared engine of both families with small numbers; num_pages 0 = room for every slot."""
    widths = range(1, draft_tokens + 2)
    prefill = prefill_shapes(slots, prefill_tokens, speculation=True)
    prefill += prefill_shapes(slots, prefill_tokens, speculation=False)
    prefill += resume_shapes(slots, speculation=True) + resume_shapes(slots, speculation=False)
    rounds = speculative_shapes(slots, widths, 128) + decode_shapes(slots)
    return PreparedManifest(
        recipe="scripted",
        checkpoint_name="scripted",
        world_size=1,
        device="cpu",
        dtype="float32",
        vocab_size=256,
        context_tokens=context_tokens,
        page_tokens=PAGE_TOKENS,
        num_pages=num_pages or slots * -(-context_tokens // PAGE_TOKENS) + 1,
        slots=slots,
        prefill_tokens=prefill_tokens,
        draft_tokens=draft_tokens,
        speculation=True,
        copy_inputs=True,
        eos_ids=eos_ids,
        sampling_defaults=SamplingDefaults(),
        shapes=prefill + rounds,
        snapshot_rows=32,
        budget=ByteBudget(
            weights_bytes=0, page_bytes=0, state_bytes=0, graph_pool_bytes=0, scratch_bytes=0
        ),
    )
