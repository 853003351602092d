"""The memory that all programs of a rank share (contract: G4)."""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.record import RECORD_FIELDS
from flare_ray.contracts.shapes import GraphKind, GraphShape
from flare_ray.device.graphs.catalog import scratch_sizes
from flare_ray.device.sampling.masks import mask_words
from flare_ray.device.sampling.scores import SCORE_WORDS
from flare_ray.device.speculation.inputs import StaticBuffer


class Arena:
    """Scratch of one rank, shared by all programs: they run one after another, and nothing left
    here is read by the next."""

    def __init__(self, manifest: PreparedManifest) -> None:
        self.sizes = scratch_sizes(manifest.shapes, manifest.vocab_size)
        self.vocab_size = manifest.vocab_size
        device = manifest.device
        self.lanes = StaticBuffer.allocate(self.sizes.lanes, torch.int64, device)
        self.masks = StaticBuffer.allocate(self.sizes.masks, torch.int32, device)
        self.q = torch.zeros(self.sizes.q, dtype=torch.float32, device=device)
        self.record = torch.zeros(self.sizes.record, dtype=torch.int64, device=device)
        self.positions = torch.arange(self.sizes.positions, device=device)
        self.scores = torch.zeros(self.sizes.scores, dtype=torch.int32, device=device)
        self.prompt_scores = torch.zeros(self.sizes.prompt_scores, dtype=torch.int32, device=device)

    def record_rows(self, batch: int) -> Tensor:
        """[batch, RECORD_FIELDS] int64."""
        return self.record[: batch * RECORD_FIELDS].view(batch, RECORD_FIELDS)

    def score_rows(self, shape: GraphShape, rows: int) -> Tensor:
        """[B, rows, SCORE_WORDS] int32."""
        size = (shape.batch_capacity, rows, SCORE_WORDS)
        return self.scores[: size[0] * size[1] * size[2]].view(size)

    def prompt_score_rows(self, shape: GraphShape) -> Tensor:
        """[B, T, SCORE_WORDS] int32 of a scored prefill, [B, 0, SCORE_WORDS] of other programs."""
        scored = shape.kind is GraphKind.SCORED_PREFILL
        size = (shape.batch_capacity, shape.token_capacity * scored, SCORE_WORDS)
        return self.prompt_scores[: size[0] * size[1] * size[2]].view(size)

    def q_rows(self, shape: GraphShape) -> Tensor:
        """[B, D, V] float32."""
        size = (shape.batch_capacity, shape.draft_tokens, self.vocab_size)
        return self.q[: size[0] * size[1] * size[2]].view(size)

    def mask_rows(self, shape: GraphShape, rows: int) -> StaticBuffer:
        """[B, rows, words] int32."""
        return self.masks.view((shape.batch_capacity, rows, mask_words(self.vocab_size)))

    def poison(self) -> None:
        """Fill everything a program must not read before writing it; for tests (contract: G4)."""
        with torch.inference_mode():
            self.q.fill_(float("nan"))
            self.record.fill_(-(2**40))
            self.masks.tensor.fill_(0x5A5A5A5A)
            self.lanes.tensor.fill_(2**40)
            self.scores.fill_(0x5A5A5A5A)
            self.prompt_scores.fill_(0x5A5A5A5A)
