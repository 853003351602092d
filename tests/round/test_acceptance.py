"""Every accepted count at every width and batch capacity; text never depends on either."""

import itertools

import pytest

from flare_ray.contracts.plan import LanePlan
from flare_ray.contracts.record import Status
from tests.support.scripted.geometry import Script
from tests.support.scripted.harness import GREEDY, Driver, Setup, scripted_rank

BUDGET = 40
PROMPT = (1, 2, 3, 4, 5)
WIDTHS = range(1, 9)


def greedy_script(right: int) -> Script:
    return Script(vocab_size=16, order=2, seed=3, drafter="prefix", draft_right=right)


def plain_text(script: Script, prompt=PROMPT, budget: int = BUDGET) -> list[int]:
    """Greedy continuation straight from the table, without any engine."""
    table = script.table().argmax(1).tolist()
    tokens = list(prompt)
    for _ in range(budget):
        previous = tokens[-2] if len(tokens) > 1 and script.order == 2 else 0
        tokens.append(table[previous * script.vocab_size + tokens[-1]])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("right", range(8))
def test_round_accepts_exactly_the_right_prefix_of_the_drafts(width, right):
    script = greedy_script(right)
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    request = driver.generate(PROMPT, width=width, budget=BUDGET)
    assert request.tokens == plain_text(script)
    for before, record in itertools.pairwise(request.records):
        offered = min(width - 1, before.budget_left - 1)
        assert (record.drafted, record.offered) == (width - 1, offered)
        assert record.accepted == min(right, offered)
        assert record.emitted == record.accepted + 1
        assert record.width == width
    assert all(record.status == Status.ACTIVE for record in request.records[:-1])
    driver.ranks[0].check_integrity()


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_every_batch_capacity_gives_each_lane_its_own_text(slots, width):
    script = Script(vocab_size=16, order=2, seed=9, draft_noise=1.0)
    driver = Driver(scripted_rank(script, Setup(slots=slots)))
    prompts = [tuple(range(i, i + 3 + i)) for i in range(slots)]
    opened = [
        driver.open([t % 16 for t in prompt], slot, budget=20 + slot)
        for slot, prompt in enumerate(prompts)
    ]
    requests = driver.prefill(opened)
    while alive := [r for r in requests if not r.ended]:
        driver.round(alive, width)
    for request in requests:
        assert request.tokens == plain_text(script, request.prompt, request.budget)
    driver.ranks[0].check_integrity()


@pytest.mark.parametrize("width", WIDTHS)
def test_padded_lanes_change_nothing_and_report_nothing(width):
    script = greedy_script(2)
    rank = scripted_rank(script, Setup(slots=8))
    driver = Driver(rank)
    requests = driver.prefill([driver.open(PROMPT, slot, budget=BUDGET) for slot in range(8)])
    before = rank.store.request.core[5:].clone()
    while not requests[0].ended:
        driver.round(requests[:5], width)
    padded = rank.backend.program(
        driver.shape("speculative", 5, width, True)  # type: ignore[arg-type]
    ).record[5:]
    assert requests[4].tokens == plain_text(script)
    assert (rank.store.request.core[5:] == before).all()
    assert (padded[:, 3:] == 0).all()
    rank.check_integrity()


def test_ordinary_rounds_give_the_same_text_and_keep_no_drafter_state():
    script = greedy_script(7)
    rank = scripted_rank(script, Setup(slots=2))
    driver = Driver(rank)
    request = driver.generate(PROMPT, width=1, budget=BUDGET, speculation=False)
    assert request.tokens == plain_text(script)
    assert all(record.draft_position == 0 for record in request.records)
    for name in ("pair_pages", "pair_ring"):
        assert (rank.store.groups[name] == 0).all()
    assert (rank.store.request.tail == 0).all()


def test_width_changes_between_rounds_do_not_change_the_text(random_seed):
    script = greedy_script(5)
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    opened = driver.open(PROMPT, 0, budget=200, sampling=GREEDY)
    (request,) = driver.prefill([opened])
    width = random_seed
    while not request.ended:
        width = (width * 1103515245 + 12345) % 2**31
        driver.round([request], 1 + width // 65536 % 8)
        driver.ranks[0].check_integrity()
    assert request.tokens == plain_text(script, budget=200)


def test_width_eight_to_one_keeps_preceding_accepted_count():
    script = greedy_script(7)
    rank = scripted_rank(script, Setup(slots=1))
    driver = Driver(rank)
    (request,) = driver.prefill([driver.open(PROMPT, 0, budget=BUDGET)])
    driver.round([request], 8)
    assert request.records[-1].emitted == 8
    column = rank.store.request.core[0, 7]
    assert int(column) == 7
    driver.round([request], 1)
    assert int(column) == 0
    driver.round([request], 8)
    assert request.tokens == plain_text(script)[: len(request.tokens)]


def test_drafts_of_a_list_drafter_are_verified_whatever_they_are():
    script = Script(
        vocab_size=16, order=1, seed=4, drafter="list", draft_tokens=(9, 9, 1, 2, 3, 4, 5)
    )
    driver = Driver(scripted_rank(script, Setup(slots=1)))
    for width in WIDTHS:
        request = driver.generate(PROMPT, width=width, budget=30)
        assert request.tokens == plain_text(script, budget=30)


@pytest.mark.parametrize("ceiling", range(8))
def test_lane_with_a_ceiling_verifies_no_more_drafts_than_that(ceiling):
    script = greedy_script(7)
    driver = Driver(scripted_rank(script, Setup(slots=2)))
    requests = driver.prefill([driver.open(PROMPT, slot, budget=BUDGET) for slot in range(2)])
    lanes = [
        LanePlan(requests[0].slot, requests[0].epoch, ceiling),
        LanePlan(requests[1].slot, requests[1].epoch, 7),
    ]
    first, second = driver.round(requests, 8, lanes=lanes)
    assert (first.offered, first.accepted, first.emitted) == (ceiling, ceiling, ceiling + 1)
    assert (second.offered, second.emitted) == (7, 8)
    while alive := [r for r in requests if not r.ended]:
        driver.round(alive, 4)
    assert requests[0].tokens == requests[1].tokens == plain_text(script)
