"""Which engine takes a request: properties of the pure choice."""

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.contracts.routing import Choice, Route
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.controller.fleet.affinity import (
    MAX_PAGES,
    EngineLoad,
    KnownPrefixes,
    LoadGuard,
    choose,
    home_of,
    route_of,
)
from flare_ray.controller.paging.chain import TokenChain

SAMPLING = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
GUARD = LoadGuard(factor=1.5, spare=4)
HOME_PAGES = 4

names = st.lists(
    st.text(string.ascii_lowercase, min_size=1, max_size=6), min_size=1, max_size=8, unique=True
)
keys = st.binary(min_size=16, max_size=16)
salts = st.text(max_size=6)


@st.composite
def fleets(draw) -> list[EngineLoad]:
    return [EngineLoad(name, draw(st.integers(0, 40)), draw(st.booleans())) for name in draw(names)]


def request(tokens: int = 0, *, salt: str = "", session: str = "", first: int = 0):
    prompt = tuple(range(first, first + tokens)) or (1,)
    return GenerationRequest(
        request_id="r",
        prompt_tokens=prompt,
        sampling=SAMPLING,
        max_tokens=1,
        cache_salt=salt,
        session=session,
    )


def route(tokens: int = 0, **fields) -> Route:
    return route_of(request(tokens, **fields), home_pages=HOME_PAGES)


def picked(asked: Route, engines, known=None, guard=GUARD):
    return choose(asked, engines, known or KnownPrefixes(99), guard, random.Random(1))


def idle(*engines: str) -> list[EngineLoad]:
    return [EngineLoad(name, 0) for name in engines]


@given(st.integers(0, 6 * PAGE_TOKENS), st.integers(0, 6 * PAGE_TOKENS), salts)
def test_longer_prompt_passes_the_keys_of_the_one_it_begins_with(some, more, salt):
    turn, later = route(some, salt=salt), route(some + more, salt=salt)
    assert later.keys[: len(turn.keys)] == turn.keys


@given(st.integers(PAGE_TOKENS, 6 * PAGE_TOKENS), salts, salts)
def test_no_key_is_shared_between_salts(tokens, one, other):
    shared = set(route(tokens, salt=one).keys) & set(route(tokens, salt=other).keys)
    assert bool(shared) == (one == other)
    same = route(salt=one, session="s").keys == route(salt=other, session="s").keys
    assert same == (one == other)


def test_keys_are_the_digests_of_the_prefix_cache():
    asked = request(3 * PAGE_TOKENS, salt="tenant")
    chain = TokenChain(asked.prompt_tokens, "tenant")
    found = route_of(asked, home_pages=HOME_PAGES)
    assert found.keys == tuple(chain.digest(n) for n in (1, 2, 3))


def test_session_decides_instead_of_the_prompt():
    assert route(300, session="s") == route(500, session="s", first=7)
    assert route(300, session="s") != route(300, session="t")


def test_keys_of_a_long_prompt_are_bounded():
    assert len(route(2 * MAX_PAGES * PAGE_TOKENS).keys) == MAX_PAGES


@pytest.mark.parametrize(("tokens", "pages"), [(PAGE_TOKENS, 1), (9 * PAGE_TOKENS, HOME_PAGES)])
def test_home_hashes_the_first_pages(tokens, pages):
    found = route(tokens)
    assert found.home == found.keys[pages - 1]


@given(fleets(), keys, st.integers(0, 2**32))
def test_choice_is_among_the_ready_ones_and_never_above_the_guard(engines, key, seed):
    asked = Route(keys=(key,), home=key)
    chosen, choice = choose(asked, engines, KnownPrefixes(9), GUARD, random.Random(seed))
    ready = [e for e in engines if e.ready] or engines
    loads = {engine.name: engine for engine in ready}
    assert set(chosen) <= loads.keys() and len(set(chosen)) == len(chosen)
    if choice is Choice.HOME:
        assert chosen == (home_of(key, list(loads)),)
        assert GUARD.admits(loads[chosen[0]], ready)
    else:
        assert choice is Choice.GUARD and home_of(key, list(loads)) not in chosen


@given(names, keys, st.data())
def test_engine_that_goes_moves_its_own_keys_alone(engines, key, data):
    gone = data.draw(st.sampled_from(engines))
    left = [name for name in engines if name != gone]
    home = home_of(key, engines)
    if left and home != gone:
        assert home_of(key, left) == home


@given(names, keys, st.permutations(range(8)))
def test_every_replica_finds_the_same_home(engines, key, order):
    mixed = [engines[i] for i in order if i < len(engines)]
    assert home_of(key, mixed) == home_of(key, engines)


def test_homes_are_spread_evenly():
    engines = ["a", "b", "c", "d"]
    homes = [home_of(number.to_bytes(16, "big"), engines) for number in range(2000)]
    assert all(400 < homes.count(name) < 600 for name in engines)


def test_deepest_known_prefix_wins_over_the_home_and_over_shallower_ones():
    known, turn = KnownPrefixes(9), route(5 * PAGE_TOKENS)
    home = home_of(turn.home, ["a", "b", "c"])
    other, third = sorted({"a", "b", "c"} - {home})
    known.note(turn.keys[:2], third)
    known.note(turn.keys[:3], other)
    assert picked(turn, idle("a", "b", "c"), known) == ((other,), Choice.KNOWN)


def test_known_engine_that_is_not_ready_is_passed_over_for_the_next_one_known():
    known, turn = KnownPrefixes(9), route(5 * PAGE_TOKENS)
    known.note(turn.keys[:2], "a")
    known.note(turn.keys[:3], "b")
    engines = [EngineLoad("a", 0), EngineLoad("b", 0, ready=False), EngineLoad("c", 0)]
    assert picked(turn, engines, known) == (("a",), Choice.KNOWN)


@given(st.integers(0, 200))
def test_the_only_ready_engine_is_never_passed_over(open_requests):
    engines = [EngineLoad("a", open_requests), EngineLoad("b", 0, ready=False)]
    assert picked(route(PAGE_TOKENS), engines)[0] == ("a",)


@pytest.mark.parametrize(("open_requests", "passes"), [(3, False), (4, True), (30, True)])
def test_guard_passes_a_loaded_engine_over(open_requests, passes):
    known, turn = KnownPrefixes(9), route(PAGE_TOKENS)
    known.note(turn.keys, "a")
    engines = [EngineLoad("a", open_requests), *idle("b", "c")]
    names, choice = picked(turn, engines, known)
    assert (choice is Choice.GUARD) == passes
    assert ("a" in names) != passes


def test_evenly_loaded_engines_keep_their_sessions():
    known, turn = KnownPrefixes(9), route(PAGE_TOKENS)
    known.note(turn.keys, "a")
    engines = [EngineLoad(name, 100) for name in "abc"]
    assert picked(turn, engines, known) == (("a",), Choice.KNOWN)


def test_short_prompt_without_session_goes_by_load():
    names, choice = picked(route(PAGE_TOKENS - 1), idle("a", "b", "c"))
    assert choice is Choice.LOAD and len(set(names)) == 2


def test_least_recently_used_prefixes_are_forgotten():
    known = KnownPrefixes(2)
    for key in (b"1", b"2", b"1", b"3"):
        known.note([key], "a")
    assert len(known) == 2
    assert [known.engine_of([key], "a") for key in (b"1", b"2", b"3")] == ["a", None, "a"]
