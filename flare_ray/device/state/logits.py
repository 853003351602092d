"""What penalties, logit rules and banned words know of each slot (contract: K3).

Counts follow committed tokens only: prompt tokens as chunks consume them, generated ones when a
round commits them. A rejected draft is never written here. Slots whose request uses none of this
keep stale rows, which nothing reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flare_ray.contracts.plan import MAX_BAD_WORD_TOKENS, SlotInit
from flare_ray.device.sampling.penalties import IN_PROMPT
from flare_ray.device.state.layout import NO_TOKEN, Rule


@dataclass(slots=True)
class LogitState:
    """Static tensors of S slots and the null slot, row S, which stays without effect.

    Attributes:
        counts: [S + 1, V] int32: generated occurrences, plus IN_PROMPT.
        rules: [S + 1, R, 2] int64, fields of `Rule`; unused ones apply before position 0.
        addends: [S + 1, R] float32.
        bad_words: [S + 1, M, L] int64, each sequence at the end of its row after NO_TOKEN; an
            unused row is all NO_TOKEN.
        recent: [S + 1, L - 1] int64, the last consumed tokens that were generated, NO_TOKEN before
            the first.
        generated_from: [S + 1] int64, position from which chunk tokens count as generated.
    """

    counts: Tensor
    rules: Tensor
    addends: Tensor
    bad_words: Tensor
    recent: Tensor
    generated_from: Tensor

    def __post_init__(self) -> None:
        self.bad_words.fill_(NO_TOKEN)
        self.recent.fill_(NO_TOKEN)

    def init_slot(self, init: SlotInit) -> None:
        """Take over a request's rules, counts at nothing."""
        slot = init.slot
        self.generated_from[slot] = init.generated_from
        output = torch.from_numpy(np.frombuffer(init.output, "<i4").astype(np.int64))
        if init.penalised:
            self.counts[slot].zero_()
            if init.seen:
                seen = np.frombuffer(init.seen, np.uint8)
                bits = np.unpackbits(seen, count=self.counts.shape[1], bitorder="little")
                self.counts[slot] = torch.from_numpy(bits.astype(np.int32) * IN_PROMPT)
            if init.output:
                size = self.counts.shape[1]
                counted = torch.bincount(output, minlength=size).to(torch.int32)
                self.counts[slot] += counted.to(self.counts.device)
        if init.rules:
            rows = torch.zeros(self.rules.shape[1:], dtype=torch.int64)
            used = len(init.rules)
            rows[:used, Rule.TOKEN] = torch.tensor([rule.token for rule in init.rules])
            rows[:used, Rule.BEFORE] = torch.tensor([rule.before for rule in init.rules])
            self.rules[slot] = rows
            self.addends[slot, :used] = torch.tensor([rule.addend for rule in init.rules])
        else:
            self.rules[slot, :, Rule.BEFORE].zero_()
        if init.bad_words:
            pad = [NO_TOKEN] * MAX_BAD_WORD_TOKENS
            words = [[*pad[len(word) :], *word] for word in init.bad_words]
            self.bad_words[slot].fill_(NO_TOKEN)
            self.bad_words[slot, : len(words)] = torch.tensor(words)
            self.recent[slot].fill_(NO_TOKEN)
            last = output[-self.recent.shape[1] :]
            if init.output:
                self.recent[slot, -len(last) :] = last
        else:
            self.bad_words[slot, :, -1].fill_(NO_TOKEN)

    def count_prompt(self, slots: Tensor, tokens: Tensor, valid: Tensor) -> None:
        """Mark tokens [B, T] of a chunk as seen in the prompt; `valid` [B, T] bool."""
        flat = self.counts.view(-1)
        null = self.counts.shape[0] - 1
        rows = torch.where(valid, slots.unsqueeze(1), null)
        place = (rows * self.counts.shape[1] + torch.where(valid, tokens, 0)).flatten()
        # Equal places get equal values, so the order of writes does not matter.
        flat.scatter_(0, place, flat[place] | valid.flatten().to(torch.int32) * IN_PROMPT)

    def count_generated(self, slots: Tensor, tokens: Tensor, counted: Tensor) -> None:
        """Count those of tokens [B, W] for which `counted` [B, W] bool holds."""
        # The other ones are undefined and add nothing, wherever they point.
        safe = torch.where(counted, tokens, 0)
        place = (slots.unsqueeze(1) * self.counts.shape[1] + safe).flatten()
        self.counts.view(-1).scatter_add_(0, place, counted.flatten().to(torch.int32))

    def remember(self, slots: Tensor, consumed: Tensor, emitted: Tensor) -> None:
        """Move the window of recent tokens past the first `emitted` [B] of `consumed` [B, W]."""
        joined = torch.cat((self.recent.index_select(0, slots), consumed), dim=1)
        size = self.recent.shape[1]
        places = emitted.unsqueeze(1) + torch.arange(size, device=consumed.device)
        self.recent.index_copy_(0, slots, joined.gather(1, places))
