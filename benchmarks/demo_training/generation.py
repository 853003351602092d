"""Batched generation: text that the trunk writes on its own, and speculative answers with their
acceptance, over :class:`.batched.BatchedSession`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .batched import HEADROOM
from .speculative import Sampling, distribution

PREFILL_ROWS = 8
COMPACT_BELOW = 0.7
"""Finished requests leave the batch once fewer than this part of it is active."""


class Session(Protocol):
    """What generation asks of committed state; see :class:`.batched.BatchedSession`."""

    lengths: Tensor
    draft_lengths: Tensor

    def verify(self, ids: Tensor) -> Tensor: ...

    def commit(self, rows: Tensor, longest: int | None = None) -> None: ...

    def draft(self, ids: Tensor, hidden: Tensor, start: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def draft_logits(self, out: Tensor) -> Tensor: ...

    def select(self, keep: Tensor) -> None: ...


Maker = Callable[[int, int], Session]
"""A session of so many requests and positions."""


@torch.no_grad()
def continued(make: Maker, prompts: Tensor, length: int, sampling: Sampling) -> Tensor:
    """Rows [B, length] that begin with ``prompts`` [B, L] and go on as the trunk does, past stop
    tokens too.
    """
    requests, given = prompts.shape
    session = make(requests, -(-(length + HEADROOM) // 4) * 4)
    rows = torch.full_like(session.lengths, PREFILL_ROWS)
    one = torch.ones_like(rows)
    out = list(prompts.split(1, 1))
    done = 0
    while done < given:
        part = prompts[:, done : done + PREFILL_ROWS]
        done += part.shape[1]
        hidden = session.verify(part)
        session.commit(rows.clamp(max=part.shape[1]), done)
    for _ in range(length - given):
        p = distribution(session.logits(hidden[:, -1:])[:, 0], sampling)
        out.append(torch.multinomial(p, 1))
        if len(out) < length:
            hidden = session.verify(out[-1])
            session.commit(one, len(out))
    return torch.cat(out, 1)


@dataclass(slots=True)
class Answers:
    """Results of a batch, row by row.

    Attributes:
        tokens: ids of every answer, the stop token included.
        rounds: [B].
        emitted: [B] tokens of all rounds.
        reached: [B, depth] rounds in which the draft at this depth could have been accepted.
        accepted: [B, depth] rounds in which it was.
    """

    tokens: list[list[int]]
    rounds: Tensor
    emitted: Tensor
    reached: Tensor
    accepted: Tensor


class Generation:
    """Speculative generation of a batch with true-q rejection sampling, one limit per request.

    Args:
        make: session of so many requests and positions.
        prompts: token ids of every request.
        limits: most output tokens of each.
        sampling: distribution, depth and stop tokens; its own limit is not used.
    """

    def __init__(
        self,
        make: Maker,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampling: Sampling,
    ) -> None:
        self.sampling = sampling
        count, longest = len(prompts), max(map(len, prompts))
        self._width = max(limits) + sampling.depth + 1
        positions = longest + self._width + HEADROOM
        self.session = make(count, -(-positions // 4) * 4)
        self.device = self.session.lengths.device
        # The filler behind short prompts is computed and never committed.
        padded = torch.zeros(count, longest + PREFILL_ROWS, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = torch.tensor(prompt)
        self._prompts = padded.to(self.device)
        self._sizes = torch.tensor([len(p) for p in prompts], device=self.device)
        self._limits = torch.tensor(limits, device=self.device)
        self._stop = torch.tensor(sorted(sampling.stop), device=self.device)
        self._out = self._prompts.new_zeros(count, self._width)
        self._written = torch.zeros_like(self._sizes)
        self._rounds = torch.zeros_like(self._sizes)
        self._reached = self._sizes.new_zeros(count, sampling.depth)
        self._accepted = torch.zeros_like(self._reached)
        self._rows = torch.arange(count, device=self.device)

    @torch.no_grad()
    def run(self) -> Answers:
        """Generate all answers."""
        ids, hidden, counts = self._prefill()
        live = self._live(ids[:, 0])
        while bool(live.any()):
            if live.float().mean() < COMPACT_BELOW:
                keep = live.nonzero().squeeze(1)
                self._rows, live = self._rows[keep], live[keep]
                ids, hidden, counts = ids[keep], hidden[keep], counts[keep]
                self.session.select(keep)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # the smaller batch fits none of the cached blocks
            ids, hidden, counts = self._round(ids, hidden, counts, live)
            last = ids.gather(1, (counts - 1).clamp(min=0)[:, None]).squeeze(1)
            live = live & self._live(last)
        tokens = [
            row[:n] for row, n in zip(self._out.tolist(), self._written.tolist(), strict=True)
        ]
        emitted = self._written - 1
        return Answers(
            tokens, self._rounds.cpu(), emitted.cpu(), self._reached.cpu(), self._accepted.cpu()
        )

    def _live(self, last: Tensor) -> Tensor:
        stopped = torch.isin(last, self._stop)
        return ~stopped & (self._written[self._rows] < self._limits[self._rows])

    def _prefill(self) -> tuple[Tensor, Tensor, Tensor]:
        """Consume the prompts and draw the first token: pending ids [B, 1], hidden states [B, 1, H]
        and counts [B] of the pairs that the MTP layer has not seen.
        """
        session, sizes = self.session, self._sizes
        last: Tensor | None = None
        steps = range(0, int(sizes.max()), PREFILL_ROWS)
        for at in steps:
            hidden = session.verify(self._prompts[:, at : at + PREFILL_ROWS])
            rows = (sizes - at).clamp(0, PREFILL_ROWS)
            session.commit(rows)
            ends = (sizes > at) & (sizes <= at + PREFILL_ROWS)
            final = hidden[torch.arange(len(sizes)), (rows - 1).clamp(min=0)]
            last = final if last is None else torch.where(ends[:, None], final, last)
            following = self._prompts[:, at + 1 : at + 1 + PREFILL_ROWS]
            start = torch.full_like(sizes, at)
            session.draft(following, hidden[:, : following.shape[1]], start)
        assert last is not None  # prompts are not empty
        session.draft_lengths = sizes - 1
        p = distribution(session.logits(last[:, None])[:, 0], self.sampling)
        first = torch.multinomial(p, 1)
        self._write(first, torch.ones_like(sizes))
        return first, last[:, None], torch.ones_like(sizes)

    def _write(self, tokens: Tensor, counts: Tensor) -> None:
        """Append the first ``counts`` of ``tokens`` [B, n] to the answers."""
        at = self._written[self._rows][:, None] + torch.arange(tokens.shape[1], device=self.device)
        valid = torch.arange(tokens.shape[1], device=self.device) < counts[:, None]
        valid &= at < self._width
        rows = self._rows[:, None].expand_as(at)
        self._out[rows[valid], at[valid]] = tokens[valid]
        self._written[self._rows] += counts

    def _round(
        self, ids: Tensor, hidden: Tensor, counts: Tensor, live: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        depth, session = self.sampling.depth, self.session
        pending = ids.gather(1, (counts - 1).clamp(min=0)[:, None])
        drafts, q = self._propose(ids, hidden, counts)
        states = session.verify(torch.cat([pending, drafts], 1))
        p = distribution(session.logits(states), self.sampling)
        emitted, accepted, tried = self._judge(drafts, q, p)
        count = torch.where(live, emitted[1], 0)
        session.commit(count)
        self._write(emitted[0], count)
        at = torch.arange(depth, device=self.device)
        possible = live[:, None] & (at < tried[:, None])
        self._rounds[self._rows] += live
        self._reached[self._rows] += possible & (at <= accepted[:, None])
        self._accepted[self._rows] += possible & (at < accepted[:, None])
        return emitted[0], states, count

    def _propose(self, ids: Tensor, hidden: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts [B, depth] and their distributions [B, depth, V]."""
        session = self.session
        out = session.draft(ids, hidden, session.draft_lengths)
        state = out.gather(1, (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[-1]))
        session.draft_lengths = session.draft_lengths + counts
        drafts, q = [], []
        for step in range(self.sampling.depth):
            q.append(distribution(session.draft_logits(state)[:, 0], self.sampling))
            drafts.append(torch.multinomial(q[-1], 1))
            if step + 1 < self.sampling.depth:
                state = session.draft(drafts[-1], state, session.draft_lengths + step)
        return torch.cat(drafts, 1), torch.stack(q, 1)

    def _judge(
        self, drafts: Tensor, q: Tensor, p: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """((tokens [B, depth + 1], how many count [B]), accepted [B], tried [B]); see
        ``speculative``.
        """
        depth = drafts.shape[1]
        chosen = drafts[..., None]
        p_token, q_token = p[:, :depth].gather(2, chosen), q.gather(2, chosen)
        kept = (torch.rand_like(q_token) * q_token < p_token).squeeze(2)
        accepted = kept.long().cumprod(1).sum(1)
        at = torch.arange(depth, device=self.device)
        stops = torch.isin(drafts, self._stop) & (at < accepted[:, None])
        stopped = stops.any(1)
        accepted = torch.where(stopped, stops.long().argmax(1) + 1, accepted)
        row = accepted[:, None, None].expand(-1, 1, p.shape[-1])
        target = p.gather(1, row).squeeze(1)
        beside = torch.cat([q, torch.zeros_like(q[:, :1])], 1).gather(1, row).squeeze(1)
        residual = (target - beside).clamp(min=0)
        # A residual without mass means equal distributions: then any draw from the target is right.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
        tokens = torch.cat([drafts, drafts[:, :1]], 1)
        tokens.scatter_(1, accepted[:, None], torch.multinomial(residual, 1))
        count = torch.where(stopped, accepted, accepted + 1)
        return (tokens, count), accepted, torch.where(stopped, accepted, depth)
