"""Request state of every slot as static device tensors (contract: T1, T6).

Programs read pending tokens and consumed positions from here, so a second round can be queued
before the first has answered. The host writes a slot only through `init_slot` and `grant`, between
programs of the ordered stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flare_ray.contracts.plan import MAX_EOS_IDS, PageGrant, SlotInit
from flare_ray.device.state.layout import (
    CORE_FIELDS,
    EOS,
    KEYS,
    MUTABLE,
    NO_TOKEN,
    Core,
    Phase,
    Sampling,
)
from flare_ray.device.state.logits import LogitState
from flare_ray.rng import RngDomain, as_int64, stream_key


@dataclass(slots=True)
class RequestState:
    """Static tensors of S slots and the null slot, row S.

    Attributes:
        core: [S + 1, CORE_FIELDS] int64, fields of `Core`.
        sampling: [S + 1, 7] float32, fields of `Sampling`.
        page_table: [S + 1, columns] int64, 0 = the null page.
        tail: [S + 1, H] h[N-1], the feedback row that the next drafting round starts from; None
            where no drafter state is kept.
        sampling_vector: [S + 1, Hs] head's input of the last consumed token; None where nothing is
            published.
        logits: what penalties and logit rules read.
    """

    core: Tensor
    sampling: Tensor
    page_table: Tensor
    tail: Tensor | None
    logits: LogitState
    sampling_vector: Tensor | None = None

    def __post_init__(self) -> None:
        # a padded lane's filters must be harmless: temperature 1, everything off
        self.sampling[:, Sampling.TEMPERATURE] = 1.0
        self.sampling[:, Sampling.TOP_P] = 1.0
        self.sampling[:, Sampling.REPETITION] = 1.0

    @property
    def null_slot(self) -> int:
        """Index of the slot that lanes without a transition are redirected to."""
        return int(self.core.shape[0]) - 1

    def init_slot(self, init: SlotInit) -> None:
        """Hand a slot to a request: phase FILLING, nothing consumed, no pages."""
        row = [0] * CORE_FIELDS
        row[Core.UID] = init.uid
        row[Core.EPOCH] = init.epoch
        row[Core.PHASE] = Phase.FILLING
        row[Core.BUDGET] = init.budget
        row[Core.TOP_K] = init.top_k
        row[KEYS] = [as_int64(stream_key(init.seed, domain)) for domain in RngDomain]
        row[EOS] = [*init.eos_ids, *[NO_TOKEN] * (MAX_EOS_IDS - len(init.eos_ids))]
        self.core[init.slot] = torch.tensor(row, dtype=torch.int64)
        self.sampling[init.slot] = torch.tensor(
            [
                init.temperature,
                init.top_p,
                init.min_p,
                init.repetition,
                init.presence,
                init.frequency,
                init.coupled,
            ]
        )
        self.logits.init_slot(init)
        self.page_table[init.slot].zero_()
        if self.tail is not None:
            self.tail[init.slot].zero_()

    def grant(self, grant: PageGrant) -> None:
        """Write page ids into a slot's table."""
        end = grant.first_index + len(grant.page_ids)
        ids = torch.tensor(grant.page_ids, dtype=torch.int64)
        self.page_table[grant.slot, grant.first_index : end] = ids

    def mutable(self) -> Tensor:
        """View [S + 1, 7] of the fields that programs write."""
        return self.core[:, MUTABLE]
