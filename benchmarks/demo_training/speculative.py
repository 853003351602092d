"""Speculative generation over the reference: true-q rejection sampling, one request."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import Reference, Session


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy.

    Attributes:
        temperature: divides the logits of target and drafter alike.
        top_p: smallest set of tokens with this probability.
        depth: drafts a round.
        limit: most output tokens.
        stop: ids that end the answer; the answer includes the one met.
    """

    temperature: float
    top_p: float
    depth: int
    limit: int
    stop: Set[int]


@dataclass(slots=True)
class Output:
    """Tokens of one answer; per round: accepted drafts, drafts that could have been, emitted."""

    tokens: list[int]
    rounds: list[tuple[int, int, int]] = field(default_factory=list)


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Sampling distribution [..., V] of logits [..., V]; the lowest index wins ties when greedy."""
    if sampling.temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    p = torch.softmax(logits / sampling.temperature, -1)
    if sampling.top_p < 1:
        values, order = torch.sort(p, dim=-1, descending=True, stable=True)
        values = values.masked_fill(values.cumsum(-1) - values >= sampling.top_p, 0)
        p = torch.zeros_like(p).scatter(-1, order, values)
        p = p / p.sum(-1, keepdim=True)
    return p


def _draw(p: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(p, 1, generator=generator))


@dataclass(slots=True)
class _Pending:
    """The token emitted but not yet verified, and the pairs that the MTP layer has not seen."""

    token: int
    ids: Tensor
    hidden: Tensor


@torch.no_grad()
def generate(
    reference: Reference, prompt: list[int], sampling: Sampling, generator: torch.Generator
) -> Output:
    """Answer one prompt; the output distribution is the target's whatever the drafts are."""
    session = Session(reference)
    ids = torch.tensor(prompt)
    hidden, logits = session.verify(ids)
    session.commit(len(prompt))
    first = _draw(distribution(logits[-1], sampling), generator)
    pending = _Pending(first, torch.cat([ids[1:], torch.tensor([first])]), hidden)
    output = Output([first])
    while pending.token not in sampling.stop and len(output.tokens) < sampling.limit:
        drafts, q = _propose(session, pending, sampling, generator)
        hidden, logits = session.verify(torch.tensor([pending.token, *drafts]))
        emitted, accepted, tried = _judge(
            drafts, q, distribution(logits, sampling), sampling, generator
        )
        session.commit(len(emitted))
        pending = _Pending(emitted[-1], torch.tensor(emitted), hidden[: len(emitted)])
        output.rounds.append((accepted, tried, len(emitted)))
        output.tokens += emitted
    return output


def _propose(
    session: Session, pending: _Pending, sampling: Sampling, generator: torch.Generator
) -> tuple[list[int], list[Tensor]]:
    reference = session.reference
    hidden = session.draft(pending.ids, pending.hidden, session.draft_rows)[-1:]
    session.draft_rows += len(pending.ids)
    drafts: list[int] = []
    q: list[Tensor] = []
    for at in range(session.draft_rows, session.draft_rows + sampling.depth):
        q.append(distribution(reference.linear(hidden, "lm_head")[0], sampling))
        drafts.append(_draw(q[-1], generator))
        if len(drafts) < sampling.depth:
            hidden = session.draft(torch.tensor(drafts[-1:]), hidden, at)
    return drafts, q


def _judge(
    drafts: list[int],
    q: list[Tensor],
    p: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[list[int], int, int]:
    """Emitted tokens, accepted drafts, and drafts that could have been accepted before a stop."""
    accepted = 0
    for i, token in enumerate(drafts):
        if torch.rand(1, generator=generator).item() * q[i][token] >= p[i][token]:
            break
        accepted += 1
        if token in sampling.stop:
            return drafts[:accepted], accepted, accepted
    if accepted < len(drafts):
        residual = torch.clamp(p[accepted] - q[accepted], min=0)
    else:
        residual = p[accepted]
    return [*drafts[:accepted], _draw(residual, generator)], accepted, len(drafts)
