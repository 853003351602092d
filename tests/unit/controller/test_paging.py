"""The page pool against a brute-force twin, and its refusals."""

import random

import pytest

from flare_ray.controller.paging.pool import PagePool, pages_for
from flare_ray.errors import ContractViolation

STEPS = 3000


class Twin:
    """The pool as sets, recounted from scratch at every question."""

    def __init__(self, num_pages):
        self.pages = set(range(1, num_pages))
        self.reserved = {}
        self.granted = {}

    @property
    def free(self):
        held = sum(max(self.reserved[o], len(self.granted[o])) for o in self.reserved)
        return len(self.pages) - held


@pytest.mark.parametrize("num_pages", [2, 9, 64])
def test_random_use_agrees_with_the_twin(num_pages, random_seed):
    rng = random.Random(random_seed)
    pool, twin, next_owner = PagePool(num_pages), Twin(num_pages), 0
    for _ in range(STEPS):
        action = rng.choice(["reserve", "grant", "grant", "release"])
        if action == "reserve":
            wanted = rng.randint(1, num_pages)
            assert pool.reserve(next_owner, wanted) == (wanted <= twin.free)
            if wanted <= twin.free:
                twin.reserved[next_owner], twin.granted[next_owner] = wanted, []
            next_owner += 1
        elif twin.reserved:
            owner = rng.choice(list(twin.reserved))
            left = twin.reserved[owner] - len(twin.granted[owner])
            if action == "grant" and left:
                pages = pool.grant(owner, rng.randint(1, left))
                others = {page for held in twin.granted.values() for page in held}
                assert set(pages) <= twin.pages - others and len(set(pages)) == len(pages)
                twin.granted[owner] += pages
            elif action == "release":
                pool.release(owner)
                del twin.reserved[owner], twin.granted[owner]
        assert pool.free_pages == twin.free
        pool.check_integrity()
    for owner in list(twin.reserved):
        pool.release(owner)
    assert pool.free_pages == pool.total_pages and pool.is_untouched


def test_reservation_that_does_not_fit_changes_nothing():
    pool = PagePool(5)
    assert pool.reserve(1, 3)
    assert not pool.reserve(2, 2)
    assert pool.free_pages == 1
    assert pool.reserve(2, 1)


def test_null_page_is_never_granted():
    pool = PagePool(4)
    pool.reserve(1, 3)
    assert sorted(pool.grant(1, 3)) == [1, 2, 3]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.reserve(1, 1),
        lambda pool: pool.grant(1, 3),
        lambda pool: pool.grant(9, 1),
        lambda pool: pool.release(9),
    ],
    ids=["reserve-twice", "grant-beyond-reservation", "grant-unknown", "release-unknown"],
)
def test_misuse_is_our_own_bug(misuse):
    pool = PagePool(8)
    pool.reserve(1, 2)
    with pytest.raises(ContractViolation):
        misuse(pool)


@pytest.mark.parametrize("damage", ["lost", "doubled", "miscounted"])
def test_integrity_check_catches(damage):
    """Negative control: each kind of corruption is found."""
    pool = PagePool(8)
    pool.reserve(1, 2)
    pool.grant(1, 1)
    if damage == "lost":
        pool._free.pop()
    elif damage == "doubled":
        pool._free[0] = pool._granted[1][0]
    else:
        pool._promised += 1
    with pytest.raises(ContractViolation):
        pool.check_integrity()


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_pages_for_rounds_up(tokens, pages):
    assert pages_for(tokens) == pages
