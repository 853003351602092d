"""How many engines a load asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_ray.controller.fleet.scaling import FleetLoad, ScalingTargets, wanted_engines

TARGETS = ScalingTargets(waiting_tokens=1000, page_usage=0.9, slots=8)

counts = st.integers(1, 12)
waiting = st.floats(0, 50_000)
shares = st.floats(0, 1)


def load(engines: int, *, waiting: float = 0, pages: float = 0, running: float = 0) -> FleetLoad:
    return FleetLoad(engines, waiting, pages, running)


@pytest.mark.parametrize(
    ("now", "wanted"),
    [
        (load(1), 1),
        (load(1, waiting=1000), 1),
        (load(1, waiting=1001), 2),
        (load(1, waiting=9000), 2),
        (load(3, waiting=4100), 5),
        (load(1, pages=0.91), 2),
        (load(2, pages=1.0, running=9), 2),
        (load(2, pages=0.5, running=4), 1),
        (load(2, pages=0.5, running=5), 2),
        (load(2, waiting=700), 2),
        (load(5, running=3), 4),
    ],
)
def test_load_asks_for(now, wanted):
    assert wanted_engines(now, TARGETS) == wanted


@given(counts, waiting, shares, st.integers(0, 8))
def test_neither_step_is_taken_back_by_the_same_load(engines, tokens, share, slots):
    now = load(engines, waiting=tokens, pages=share * engines, running=slots * engines)
    wanted = wanted_engines(now, TARGETS)
    after = wanted_engines(
        load(wanted, waiting=tokens, pages=now.page_usage, running=now.running), TARGETS
    )
    assert after >= wanted if wanted > engines else after <= wanted
    assert 1 <= wanted <= 2 * engines and wanted >= engines - 1


@given(counts, waiting, waiting, shares, st.integers(0, 8))
def test_more_load_never_asks_for_fewer(engines, tokens, more, share, slots):
    now = load(engines, waiting=tokens, pages=share * engines, running=slots)
    heavier = load(engines, waiting=tokens + more, pages=share * engines, running=slots)
    assert wanted_engines(heavier, TARGETS) >= wanted_engines(now, TARGETS)
