"""A client's predicted output as copied drafts of its own request (contract: H3).

The follower walks the prediction beside the generated text. While both agree, what the prediction
says next is proposed; verification decides, so a wrong prediction costs rejected drafts and never
changes the output's law. Where they part the place is lost, and found again by the last generated
tokens:

    prediction   a b c d e f g h      generated   a b X d e .
                     ^ lost at c                        ^ "d e" stands once: f g h is next

Of several places that match, the longest match wins, then the nearest one ahead of where the text
left: an edit usually goes on behind itself. A place that turns out wrong soon makes the next one
need a longer match, so that prose in which pairs of tokens recur does not cost a rejection each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

PAIR = 2
"""Tokens that the index of places is keyed by, and the shortest match that is trusted."""
LONGEST_MATCH = 8
"""Tokens after which a place counts as certain, and the longest match that is asked for."""
MAX_PLACES = 64
"""Places of one pair that are compared, nearest first: bounds the host's time per token."""


class PredictionFollower:
    """Where one request stands in its prediction.

    Args:
        prediction: token ids, at least one.
    """

    __slots__ = ("_index", "_left_at", "_needed", "_place", "_recent", "_run", "_tokens")

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = tuple(prediction)
        self._place = 0
        self._left_at = 0
        # The beginning was not found by a match that could be to blame.
        self._run = LONGEST_MATCH
        self._needed = PAIR
        self._recent: deque[int] = deque(maxlen=LONGEST_MATCH)
        self._index: dict[tuple[int, int], list[int]] | None = None

    @property
    def on_track(self) -> bool:
        """Whether there is something to propose."""
        return 0 <= self._place < len(self._tokens)

    def propose(self, most: int) -> tuple[int, ...]:
        """The next predicted tokens, at most `most` >= 0; () where the place is lost."""
        return self._tokens[self._place : self._place + most] if self.on_track else ()

    def advance(self, tokens: Sequence[int]) -> None:
        """Take committed tokens, in order."""
        for token in tokens:
            self._recent.append(token)
            if self.on_track and self._tokens[self._place] == token:
                self._place += 1
                self._run += 1
                if self._run >= LONGEST_MATCH:
                    self._needed = PAIR
                continue
            if self._place >= 0:
                self._leave()
            self._place = self._find()

    def _leave(self) -> None:
        """The text has left the prediction."""
        if self._run < self._needed:
            self._needed = min(self._needed + 1, LONGEST_MATCH)
        self._left_at, self._place, self._run = self._place, -1, 0

    def _find(self) -> int:
        """Place behind the best match of the last tokens; -1 = none is long enough."""
        recent = tuple(self._recent)
        if len(recent) < self._needed:
            return -1
        if self._index is None:
            self._index = _pairs(self._tokens)
        places = self._index.get((recent[-2], recent[-1]), [])
        near = sorted(places, key=self._distance)[:MAX_PLACES]
        best, longest = -1, self._needed - 1
        for place in near:
            length = _match(self._tokens, place, recent)
            if length > longest:
                best, longest = place, length
        return best

    def _distance(self, place: int) -> tuple[bool, int]:
        """Places ahead of where the text left come first, then those behind, nearest first."""
        return place < self._left_at, abs(place - self._left_at)


def _pairs(tokens: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """For each pair of neighbours, the places behind it, in order."""
    index: dict[tuple[int, int], list[int]] = {}
    for place in range(PAIR, len(tokens) + 1):
        index.setdefault((tokens[place - 2], tokens[place - 1]), []).append(place)
    return index


def _match(tokens: Sequence[int], place: int, recent: Sequence[int]) -> int:
    """How many tokens in front of `place` equal the last ones of `recent`."""
    most = min(place, len(recent))
    length = 0
    while length < most and tokens[place - 1 - length] == recent[-1 - length]:
        length += 1
    return length
