"""Which text a request's next round copies from, if any (contract: H2, H3, C1).

Each source finds at most one continuation of the text so far. What it found is held against the
tokens that really came: by the policy's own survival where it was offered, and here where it was
not. So a source that is never offered is judged all the same, from the text and for nothing, and
needs no probes:

    found       e f g h i j k      at "a b c d"
    committed   e f | g X          two rounds of learned drafts: three passed, the fourth failed

A copy takes the first depths of a round and the drafter goes on behind it, within the same budget;
or the drafter has all depths. Expected tokens over the round's price decide; a round of copies
alone is cheaper on the CPU, where it runs no drafter. Copies follow from the last round's tokens,
so none is queued behind a round that is unanswered: where rounds are queued, they must be better by
WAIT_SHARE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flare_ray.contracts.request import GenerationRequest
from flare_ray.controller.history.own_text import OwnText
from flare_ray.controller.history.prediction import PredictionFollower
from flare_ray.controller.history.ring import HistoryRing, Response
from flare_ray.controller.history.windows import LONG_MATCH, MOST_COPIES, Match, window_of
from flare_ray.controller.verification import CohortLane, ProposalSource, VerificationPolicy

WAIT_SHARE = 0.03
"""What waiting for tokens before the next round is planned may cost of a round."""


class Copy(NamedTuple):
    """Tokens to copy, and the `ProposalSource` they are judged as."""

    source: int
    tokens: tuple[int, ...]


class _Source(Protocol):
    def advance(self, tokens: Sequence[int]) -> None:
        """Take committed tokens; the request's text ends with them."""

    def find(self, window: bytes) -> Copy | None:
        """What may follow the text that ends with `window`."""


class _Predicted:
    """The client's prediction."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._follower = PredictionFollower(prediction)

    def advance(self, tokens: Sequence[int]) -> None:
        self._follower.advance(tokens)

    def find(self, window: bytes) -> Copy | None:
        tokens = self._follower.propose(MOST_COPIES)
        return Copy(int(ProposalSource.PREDICTION), tokens) if tokens else None


class _Own:
    """The request's prompt and output."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = OwnText(text)

    def advance(self, tokens: Sequence[int]) -> None:
        self._text.catch_up()

    def find(self, window: bytes) -> Copy | None:
        found = self._text.find(window)
        return _labelled(found, ProposalSource.REQUEST, ProposalSource.REQUEST_SHORT)


class _Shared:
    """What the tenant's requests generated."""

    def __init__(self, ring: HistoryRing, tenant: str) -> None:
        self._ring, self._tenant = ring, tenant
        self._response = Response(ring, tenant)

    def advance(self, tokens: Sequence[int]) -> None:
        self._response.write(tokens)

    def find(self, window: bytes) -> Copy | None:
        found = self._ring.find(self._tenant, window)
        return _labelled(found, ProposalSource.HISTORY, ProposalSource.HISTORY_SHORT)


def _labelled(found: Match | None, long: ProposalSource, short: ProposalSource) -> Copy | None:
    if found is None:
        return None
    return Copy(int(long if found.length == LONG_MATCH else short), found.tokens)


@dataclass(frozen=True, slots=True)
class CopyRules:
    """What copies are chosen by.

    Attributes:
        most: drafts of the widest round.
        alone: the drafter's own drafts are never offered.
        queued: rounds are queued behind unanswered ones (`queue_depth` 2).
    """

    most: int
    alone: bool = False
    queued: bool = False


class _Open(NamedTuple):
    """A copy whose tokens are still coming; `passed` of them have come as foretold."""

    copy: Copy
    passed: int


class RequestCopies:
    """The copies of one request. Used by the controller's thread only.

    Args:
        sources: in order of preference among equals.
        text: prompt and output; grows before `advance` is told.
    """

    def __init__(
        self,
        uid: int,
        sources: Sequence[_Source],
        text: Sequence[int],
        *,
        policy: VerificationPolicy,
        rules: CopyRules,
    ) -> None:
        self._uid, self._sources, self._text = uid, sources, text
        self._policy, self._rules = policy, rules
        self._open: list[_Open | None] = [None] * len(sources)
        self._chosen: Copy | None = None
        self._find()

    @property
    def on_track(self) -> bool:
        """Whether the next round copies, so that it needs the last one's tokens."""
        return self._chosen is not None

    def propose(self, most: int) -> Copy | None:
        """What the next round copies, at most `most` tokens; None = nothing."""
        chosen = self._chosen
        if chosen is None or most < 1:
            return None
        return Copy(chosen.source, chosen.tokens[:most])

    def prepare(self) -> None:
        """A part of the prompt has been consumed: its own text is indexed meanwhile."""
        for source in self._sources:
            source.advance(())

    def advance(self, tokens: Sequence[int], offered: Sequence[int]) -> None:
        """Take committed tokens.

        Args:
            tokens: at least one, in order; the text ends with them.
            offered: `ProposalSource` by depth of the round that brought them.
        """
        for place, source in enumerate(self._sources):
            self._compare(place, tokens, offered)
            source.advance(tokens)
        self._find()

    def _compare(self, place: int, tokens: Sequence[int], offered: Sequence[int]) -> None:
        """Hold what a source found against what came, unless it was offered: then the policy
        learns from the round itself."""
        held = self._open[place]
        if held is None:
            return
        source, passed = held.copy.source, held.passed
        if source in offered:
            self._open[place] = None
            return
        foretold = held.copy.tokens[passed:]
        right = _agreeing(foretold, tokens)
        failed = right < min(len(foretold), len(tokens))
        passed += right
        if failed or passed == len(held.copy.tokens):
            self._policy.compared(self._uid, source, passed=passed, failed=failed)
            self._open[place] = None
        else:
            self._open[place] = _Open(held.copy, passed)

    def _find(self) -> None:
        """Look all sources up and choose."""
        window = window_of(self._text)
        self._chosen = None
        most = 0.0
        for place, source in enumerate(self._sources):
            found = source.find(window)
            if found is None:
                continue
            if self._open[place] is None:
                self._open[place] = _Open(found, 0)
            expected = self._expected(found)
            if expected > most:
                self._chosen, most = found, expected
        if self._chosen is not None and not self._rules.alone:
            learned = self._policy.expected_rate(CohortLane(self._uid, self._rules.most))
            if most < learned * (1.0 + WAIT_SHARE * self._rules.queued):
                self._chosen = None

    def _expected(self, copy: Copy) -> float:
        rules = self._rules
        count = min(len(copy.tokens), rules.most)
        ceiling = count if rules.alone else rules.most
        return self._policy.expected_rate(CohortLane(self._uid, ceiling, (copy.source,) * count))


def _agreeing(foretold: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the first tokens are equal."""
    count = 0
    for expected, token in zip(foretold, tokens, strict=False):
        if expected != token:
            break
        count += 1
    return count


class Copying:
    """Copies of one engine's requests.

    Args:
        history: they copy from each other's output (contract: H1, H2).
        own_text: they copy from their own prompt and output (contract: H3).
    """

    def __init__(
        self, policy: VerificationPolicy, rules: CopyRules, *, history: bool, own_text: bool
    ) -> None:
        self._policy, self._rules, self._own_text = policy, rules, own_text
        self.ring = HistoryRing() if history else None

    def open(
        self, uid: int, request: GenerationRequest, text: Sequence[int]
    ) -> RequestCopies | None:
        """Copies of a new request; None where it has no source.

        Args:
            text: its prompt and output, which the caller appends to.
        """
        sources: list[_Source] = []
        if request.prediction:
            sources.append(_Predicted(request.prediction))
        if self._own_text:
            sources.append(_Own(text))
        if self.ring is not None:
            sources.append(_Shared(self.ring, request.cache_salt))
        if not sources:
            return None
        return RequestCopies(uid, sources, text, policy=self._policy, rules=self._rules)
