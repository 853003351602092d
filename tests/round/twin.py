"""A round as a plain loop: the same random law and filters, no batch, no device state.

Used against the engine where equality is exact: every draw's domain, offset and use is written out.
"""

from __future__ import annotations

import torch

from flare_ray.device.sampling.chain import draw
from flare_ray.device.sampling.filters import FilterParams, draft_probs, target_probs
from flare_ray.device.sampling.philox import uniforms
from flare_ray.rng import RngDomain, as_int64, stream_key
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import Sampling


class Twin:
    """One request, by itself."""

    def __init__(self, script: Script, sampling: Sampling, prompt: tuple[int, ...]) -> None:
        self.script = script
        self.sampling = sampling
        self.tokens = list(prompt)
        self.table = script.table()
        self.drafts = script.draft_table()
        self.prompt_tokens = len(prompt)
        first = 12 * (len(prompt) - 1)
        self.tokens.append(self._draw(self._p(self.tokens), RngDomain.SAMPLE, first))

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def round(self, drafts: int) -> int:
        """One round that verifies `drafts` drafts; returns how many were accepted."""
        offset = 12 * (len(self.tokens) - 1)
        if drafts == 0:
            self.tokens.append(self._draw(self._p(self.tokens), RngDomain.SAMPLE, offset))
            return 0
        candidate, laws = list(self.tokens), []
        for depth in range(drafts):
            q = draft_probs(self._row(self.drafts, candidate)[None], self._params())[0]
            laws.append(q)
            candidate.append(self._draw(q, RngDomain.DRAFT, offset + depth))
        start = len(self.tokens)
        for depth in range(drafts):
            token = candidate[start + depth]
            p = self._p(candidate[: start + depth])
            u = self._uniform(RngDomain.ACCEPT, offset + depth)
            if not u * laws[depth][token] < p[token]:
                residual = (p - laws[depth]).clamp(min=0)
                final = self._draw(residual, RngDomain.ACCEPT, offset + drafts + 1)
                self.tokens = [*candidate[: start + depth], final]
                return depth
        final = self._draw(self._p(candidate), RngDomain.ACCEPT, offset + drafts)
        self.tokens = [*candidate, final]
        return drafts

    def _params(self) -> FilterParams:
        s = self.sampling
        return FilterParams(
            temperature=torch.tensor([s.temperature]),
            top_k=torch.tensor([s.top_k]),
            top_p=torch.tensor([s.top_p]),
            min_p=torch.tensor([s.min_p]),
            max_top_k=s.top_k,
            every_lane_greedy=s.top_k == 1,
            any_top_p=s.top_p < 1,
            any_min_p=s.min_p > 0,
        )

    def _row(self, table: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        previous = tokens[-2] if len(tokens) > 1 and self.script.order == 2 else 0
        return table[previous * self.script.vocab_size + tokens[-1]]

    def _p(self, tokens: list[int]) -> torch.Tensor:
        return target_probs(self._row(self.table, tokens)[None, None], self._params())[0, 0]

    def _uniform(self, domain: RngDomain, offset: int) -> torch.Tensor:
        key = torch.tensor([as_int64(stream_key(self.sampling.seed, domain))])
        return uniforms(key, torch.tensor([offset]), 1)[0, 0]

    def _draw(self, weights: torch.Tensor, domain: RngDomain, offset: int) -> int:
        return int(draw(weights[None], self._uniform(domain, offset)[None])[0])
