"""The shared history against a brute-force twin, and what it costs (contract: H1)."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from flare_ray.controller.history.own_text import STEP_TOKENS, OwnText
from flare_ray.controller.history.ring import RING_TOKENS, HistoryRing, Response
from flare_ray.controller.history.windows import Match, window_of

SIZE = 24
TENANTS = ("", "a", "b")
TOKENS = st.integers(0, 2)
LOOKUP_LIMIT_US = 20.0


@dataclass
class Twin:
    """Every response as a plain list of (number, token); looks everything up by scanning."""

    size: int
    count: int = 0
    responses: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)

    def write(self, response: list[tuple[int, int]], token: int) -> None:
        response.append((self.count, token))
        self.count += 1

    def find(self, tenant: str, text: list[int]) -> Match | None:
        for length in (8, 4):
            found = []
            for owner, response in self.responses:
                if owner != tenant or len(text) < length:
                    continue
                tokens = [token for _, token in response]
                for at in range(length, len(tokens)):
                    number = response[at][0]
                    if (
                        number >= self.count - self.size
                        and tokens[at - length : at] == text[-length:]
                    ):
                        found.append((number, tuple(tokens[at : at + 7])))
            if found:
                return Match(max(found)[1], length)
        return None


class RingMachine(RuleBasedStateMachine):
    """Responses of three tenants that begin, pause, go on and stop in any order; a pause is what
    preemption looks like from here, a stop what a failure or a cancellation does."""

    def __init__(self) -> None:
        super().__init__()
        self.ring, self.twin = HistoryRing(SIZE), Twin(SIZE)
        self.live: list[tuple[Response, str, list[tuple[int, int]]]] = []

    @rule(tenant=st.sampled_from(TENANTS))
    def begin(self, tenant):
        told: list[tuple[int, int]] = []
        self.twin.responses.append((tenant, told))
        self.live.append((Response(self.ring, tenant), tenant, told))

    @rule(which=st.integers(0, 99), tokens=st.lists(TOKENS, min_size=1, max_size=8))
    def commit(self, which, tokens):
        if self.live:
            response, _, told = self.live[which % len(self.live)]
            response.write(tokens)
            for token in tokens:
                self.twin.write(told, token)

    @rule(which=st.integers(0, 99))
    def stop(self, which):
        if self.live:
            self.live.pop(which % len(self.live))

    @rule(tenant=st.sampled_from(TENANTS), text=st.lists(TOKENS, max_size=10))
    def look_up(self, tenant, text):
        """With a prompt of its own, which the ring has never seen."""
        assert self.ring.find(tenant, window_of(text)) == self.twin.find(tenant, text)

    @invariant()
    def responses_find_what_the_twin_finds(self):
        for _, tenant, told in self.live:
            text = [token for _, token in told]
            assert self.ring.find(tenant, window_of(text)) == self.twin.find(tenant, text)

    @invariant()
    def the_index_is_bounded_by_the_ring(self):
        assert len(self.ring) == min(self.twin.count, SIZE)
        assert self.ring.num_keys <= 2 * len(self.ring)


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        RingMachine,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )


def test_ring_finds_what_a_scan_finds():
    run(40, 30)


@pytest.mark.slow
def test_ring_finds_what_a_scan_finds_much():
    run(1500, 60)


def text_of(*responses: str) -> HistoryRing:
    ring = HistoryRing(64)
    for response in responses:
        Response(ring, "").write([ord(c) for c in response])
    return ring


def found(ring: HistoryRing, text: str) -> str | None:
    match = ring.find("", window_of([ord(c) for c in text]))
    return None if match is None else "".join(map(chr, match.tokens))


def test_eight_tokens_go_before_a_more_recent_four():
    ring = text_of("abcdefgh1", "efgh2")
    assert found(ring, "abcdefgh") == "1"
    assert found(ring, "Xefgh") == "2"


def test_the_most_recent_of_equals_is_taken_and_at_most_seven_tokens():
    assert found(text_of("abcd12", "abcd3456789XYZ"), "abcd") == "3456789"


def test_a_text_does_not_find_its_own_end():
    assert found(text_of("abcd"), "abcd") is None


def test_links_follow_their_response_through_others_that_share_the_ring():
    ring = HistoryRing(64)
    first, second = Response(ring, ""), Response(ring, "")
    for a, b in zip("abcdefg", "ABCDEFG", strict=True):
        first.write([ord(a)])
        second.write([ord(b)])
    assert found(ring, "abcd") == "efg"


def test_a_response_that_outlives_its_overwritten_tokens_links_to_nothing_of_others():
    ring = HistoryRing(8)
    slow, other = Response(ring, ""), Response(ring, "")
    slow.write([1, 2, 3, 4, 5])
    other.write([11, 12, 13, 14, 15, 16, 17, 18])
    slow.write([6])
    match = ring.find("", window_of([11, 12, 13, 14]))
    assert match is not None and match.tokens == (15, 16, 17, 18)
    assert ring.find("", window_of([2, 3, 4, 5])) == Match((6,), 4)


def test_tenants_find_their_own_responses_alone():
    ring = HistoryRing(64)
    Response(ring, "a").write([1, 2, 3, 4, 5])
    assert ring.find("a", window_of([1, 2, 3, 4])) == Match((5,), 4)
    assert ring.find("b", window_of([1, 2, 3, 4])) is None
    Response(ring, "b").write(range(100, 164))
    assert ring.find("a", window_of([1, 2, 3, 4])) is None
    assert set(ring._places) == {"b"}, "a tenant without tokens leaves nothing"


@pytest.mark.parametrize("seed", range(4))
def test_own_text_finds_the_newest_place_of_a_growing_text(seed):
    rng = random.Random(seed)
    text = [rng.randrange(3) for _ in range(STEP_TOKENS + 200)]
    own = OwnText(text)
    own.catch_up()
    own.catch_up()
    for _ in range(200):
        expected = None
        for length in (8, 4):
            places = [
                at for at in range(length, len(text)) if text[at - length : at] == text[-length:]
            ]
            if places:
                expected = Match(tuple(text[places[-1] : places[-1] + 7]), length)
                break
        assert own.find(window_of(text)) == expected
        text.extend(rng.randrange(3) for _ in range(rng.randrange(1, 6)))
        own.catch_up()


def test_a_prompt_is_indexed_a_step_at_a_time():
    text = [*range(STEP_TOKENS + 10), *range(STEP_TOKENS + 2, STEP_TOKENS + 6)]
    own = OwnText(text)
    own.catch_up()
    assert own.find(window_of(text)) is None
    own.catch_up()
    assert own.find(window_of(text)) == Match(tuple(text[STEP_TOKENS + 6 :][:7]), 4)


def test_a_lookup_in_a_full_ring_takes_less_than_twenty_microseconds():
    """CPU time, look-ups that follow seven links; official: `benchmarks.serving.history`."""
    rng = random.Random(1)
    ring = HistoryRing()
    tokens = [rng.randrange(8192) for _ in range(RING_TOKENS + 1000)]
    Response(ring, "").write(tokens)
    places = [rng.randrange(2000, len(tokens) - 8) for _ in range(500)]
    windows = [window_of(tokens[at - 8 : at]) for at in places]
    started = time.thread_time()
    matches = [ring.find("", window) for window in windows]
    spent_us = (time.thread_time() - started) / len(windows) * 1e6
    assert all(match is not None and len(match.tokens) == 7 for match in matches)
    assert spent_us < LOOKUP_LIMIT_US
