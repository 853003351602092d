"""Lanes do not touch each other: padding, batches, page numbers, invalid rows (contract: T4)."""

from __future__ import annotations

import pytest
import torch

from flare_ray.device.state.layout import StateLimits
from tests.recipes.parity.test_target import LOGITS_ATOL, largest_error, run_rounds
from tests.support.recipe_driver import PAGE, RecipeDriver


def snapshot(driver: RecipeDriver) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in driver.state.items()}


def changed(before: dict[str, torch.Tensor], driver: RecipeDriver) -> dict[str, torch.Tensor]:
    """Which leading entries differ bit by bit: [pages, places], [slots, columns] and so on."""
    result = {}
    for name, tensor in driver.state.items():
        different = before[name].view(torch.uint8) != tensor.view(torch.uint8)
        result[name] = different.reshape(*tensor.shape[:2], -1).any(2)
    return result


def outside_null(driver: RecipeDriver, name: str, marks: torch.Tensor) -> torch.Tensor:
    """Marks without the null page or the null slot."""
    kind = {group.name: group.kind for group in driver.store.spec_groups}[name]
    return marks[1:] if kind == "page" else marks[:-1]


def test_padded_lanes_write_only_to_the_null_slot_and_page(tiny):
    driver = tiny.driver
    lanes = tiny.fresh(2)
    driver.prefill(lanes, [tiny.tokens[:20], tiny.tokens[:70]])
    before = snapshot(driver)
    driver.verify([], [], width=8, padded=4, columns=2)
    driver.propose([], [], 5, padded=4, columns=2)
    for name, marks in changed(before, driver).items():
        assert not outside_null(driver, name, marks).any(), name


def test_invalid_rows_leave_pages_rings_and_other_slots_as_they_were(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    lane, other = tiny.fresh(2)
    driver.prefill([lane, other], [tokens[:61], tokens[:61]])
    before = snapshot(driver)
    driver.verify([lane], [tokens[61:64]], width=8, padded=1, columns=2)
    pool = driver.pool
    groups = {group.name: group for group in driver.store.spec_groups}
    finished = [p for p in range(61 // pool, 64 // pool) if (p + 1) * pool <= 64]
    for name, marks in changed(before, driver).items():
        group, marks = groups[name], outside_null(driver, name, marks)
        if group.family == "drafter":
            assert not marks.any(), "verification touches no drafter state"
            continue
        where = [tuple(place) for place in marks.nonzero().tolist()]
        if group.kind == "page" and group.shape[0] == PAGE:
            wanted = {(lane.pages[0] - 1, place) for place in (61, 62, 63)}
        elif group.kind == "page":
            wanted = {(lane.pages[0] - 1, number) for number in finished}
        elif group.kind == "ring":
            wanted = {(lane.slot, place % marks.shape[1]) for place in (61, 62, 63)}
        else:
            # a replayed group changes when the next pass settles it
            touched = set() if group.kind == "replayed" else {lane.slot}
            assert {slot for slot, _ in where} == touched, name
            continue
        assert set(where) == wanted, name


def test_invalid_rows_change_no_valid_result(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    lanes = tiny.fresh(3)
    driver.prefill(lanes, [tokens[:30]] * 3)
    rows = [tokens[30:31], tokens[30:34], tokens[30:38]]
    verified = driver.verify(lanes, rows, width=8)
    for i, row in enumerate(rows):
        got = verified.output.logits[i, : len(row)]
        assert largest_error(got, tiny.oracle.logits[30 : 30 + len(row)]) <= LOGITS_ATOL
    driver.commit(verified, [1, 4, 8])
    more = [tokens[lane.consumed : lane.consumed + 5] for lane in lanes]
    verified = driver.verify(lanes, more)
    for i, lane in enumerate(lanes):
        wanted = tiny.oracle.logits[lane.consumed : lane.consumed + 5]
        assert largest_error(verified.output.logits[i], wanted) <= LOGITS_ATOL


def test_batch_of_different_lengths_equals_oracle_for_each_lane(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    lengths = [3, 130, 64, 17]
    lanes = tiny.fresh(4)
    driver.prefill(lanes, [tokens[:length] for length in lengths])
    for width in (1, 6, 8, 2):
        rows = [tokens[lane.consumed : lane.consumed + width] for lane in lanes]
        verified = driver.verify(lanes, rows, padded=2, columns=3)
        for i, lane in enumerate(lanes):
            wanted = tiny.oracle.logits[lane.consumed : lane.consumed + width]
            assert largest_error(verified.output.logits[i], wanted) <= LOGITS_ATOL
        driver.commit(verified, [width] * 4)


def test_order_of_lanes_and_slots_does_not_matter(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    lanes = tiny.fresh(3)
    driver.prefill(lanes, [tokens[:25], tokens[:40], tokens[:55]])
    swapped = [lanes[2], lanes[0], lanes[1]]
    rows = [tokens[lane.consumed : lane.consumed + 4] for lane in swapped]
    verified = driver.verify(swapped, rows)
    for i, lane in enumerate(swapped):
        wanted = tiny.oracle.logits[lane.consumed : lane.consumed + 4]
        assert largest_error(verified.output.logits[i], wanted) <= LOGITS_ATOL


@pytest.mark.parametrize("name", ["wide", "qwen-fused"])
def test_high_page_numbers_in_falling_order(load_tiny, name):
    tiny = load_tiny(name)
    pages = 5000
    driver = RecipeDriver(tiny.folder, slots=1, num_pages=pages)
    assert isinstance(driver.store.limits, StateLimits)
    lane = driver.open(0, [pages - 1, pages - 2, 4097])
    first = driver.prefill([lane], [tiny.tokens[:70]])[0]
    logits = torch.cat((first, run_rounds(driver, lane, tiny.tokens[70:], 6)))
    assert largest_error(logits, tiny.oracle.logits) <= LOGITS_ATOL


def test_a_slot_handed_over_sees_nothing_of_its_last_request(tiny):
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = tiny.fresh()
    driver.prefill([lane], [tokens[50:120]])
    verified = driver.verify([lane], [tokens[:8]])
    driver.commit(verified, [5])
    lane = driver.open(lane.slot, lane.pages)
    logits = driver.prefill([lane], [tokens[:90]])[0]
    assert largest_error(logits, tiny.oracle.logits[:90]) <= LOGITS_ATOL


def test_rows_past_the_table_in_view_go_to_the_null_page(tiny):
    """A drafter's last rows may lie past the last granted page; they must not wrap into it."""
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = tiny.fresh()
    driver.prefill([lane], [tokens[: PAGE - 2]])
    before = snapshot(driver)
    driver.propose([lane], [tokens[PAGE - 2]], 7, columns=1)
    groups = driver.store.spec_groups
    [cached, *_] = [g for g in groups if g.family == "drafter" and g.shape[0] == PAGE]
    marks = outside_null(driver, cached.name, changed(before, driver)[cached.name])
    where = {tuple(place) for place in marks.nonzero().tolist()}
    assert where == {(lane.pages[0] - 1, PAGE - 3), (lane.pages[0] - 1, PAGE - 2)} | {
        (lane.pages[0] - 1, PAGE - 1)
    }


@pytest.mark.parametrize("columns", [2, 3])
def test_columns_in_view_do_not_change_results(tiny, columns):
    driver, tokens = tiny.driver, tiny.tokens
    [lane] = tiny.fresh()
    driver.prefill([lane], [tokens[:50]])
    verified = driver.verify([lane], [tokens[50:56]], columns=columns)
    assert largest_error(verified.output.logits[0], tiny.oracle.logits[50:56]) <= LOGITS_ATOL
