"""A target and a drafter that let a test hear every logit they compute, and steer acceptance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flare_ray.device.executor import ModelParts
from flare_ray.device.state.layout import Core
from flare_ray.device.state.store import StateStore

TargetKey = tuple[int, int, tuple[int, ...]]
"""(request uid, position of the row, inputs of its round through that row)."""
DraftKey = tuple[int, int, tuple[int, ...]]
"""(request uid, consumed tokens, drafts before the one whose logits these are)."""
Truth = Callable[[int, int, int], int]
"""(request uid, consumed tokens, depth) -> the draft to offer there; -1 = the drafter's own."""


@dataclass
class Heard:
    """What was computed, by request. `store` is set once the rank exists."""

    store: StateStore | None = None
    target: list[tuple[TargetKey, Tensor]] = field(default_factory=list)
    drafter: list[tuple[DraftKey, Tensor]] = field(default_factory=list)
    truth: Truth = lambda uid, consumed, depth: -1

    def uids(self, slots: Tensor) -> list[int]:
        """Requests of lanes; 0 = a padded one."""
        assert self.store is not None
        return self.store.request.core[slots, Core.UID].tolist()

    def take(self) -> Heard:
        """Everything heard so far, which is forgotten here."""
        taken = Heard(self.store, self.target, self.drafter)
        self.target, self.drafter = [], []
        return taken


class _HeardTarget:
    def __init__(self, target, heard: Heard) -> None:
        self._target, self._heard = target, heard

    def forward(self, rows, state):
        output = self._target.forward(rows, state)
        for lane, uid in enumerate(self._heard.uids(rows.slots)):
            length = int(rows.lengths[lane])
            tokens = rows.tokens[lane, :length].tolist()
            start = int(rows.positions[lane, 0])
            for row in range(length) if uid else ():
                if rows.last_only and row < length - 1:
                    continue
                logits = output.logits[lane, 0 if rows.last_only else row].clone()
                key = (uid, start + row, tuple(tokens[: row + 1]))
                self._heard.target.append((key, logits))
        return output

    def head(self, sampling):
        return self._target.head(sampling)

    def commit(self, rows, emitted, state):
        self._target.commit(rows, emitted, state)


class _SteeredSink:
    """Offers the truth at the depths that the test asks for: a greedy target accepts it."""

    def __init__(self, sink, heard: Heard, start) -> None:
        self._sink, self._heard = sink, heard
        self._uids = heard.uids(start.slots)
        self._consumed = start.consumed.tolist()
        self._drafts: list[list[int]] = [[] for _ in self._uids]

    def forecast(self, depth, confidence):
        self._sink.forecast(depth, confidence)

    def copy(self, depth):
        self._sink.copy(depth)

    def draw(self, depth, logits):
        tokens = self._sink.draw(depth, logits).clone()
        for lane, uid in enumerate(self._uids):
            if not uid:
                continue
            consumed, drafts = self._consumed[lane], self._drafts[lane]
            self._heard.drafter.append(((uid, consumed, tuple(drafts)), logits[lane].clone()))
            wanted = self._heard.truth(uid, consumed, depth)
            if wanted >= 0:
                tokens[lane] = wanted
            drafts.append(int(tokens[lane]))
        return tokens


class _HeardDrafter:
    def __init__(self, drafter, heard: Heard) -> None:
        self._drafter, self._heard = drafter, heard

    def absorb(self, rows, state):
        self._drafter.absorb(rows, state)

    def propose(self, start, state, sink):
        self._drafter.propose(start, state, _SteeredSink(sink, self._heard, start))


def heard_parts(parts: ModelParts, heard: Heard) -> ModelParts:
    """The same model, listened to."""
    target, drafter = _HeardTarget(parts.target, heard), _HeardDrafter(parts.drafter, heard)
    return ModelParts(parts.spec, target, drafter, recordable=False)


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of finite logits; infinite if one of ours is not finite."""
    if not torch.isfinite(ours).all():
        return float("inf")
    return float((ours - theirs).abs().max())
