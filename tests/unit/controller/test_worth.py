"""Which prefix goes first, against a brute-force twin of the documented formula (contract: M7)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_ray.controller.paging.chain import TokenChain
from flare_ray.controller.paging.pool import PagePool, pages_for
from flare_ray.controller.paging.prefix import PrefixIndex
from flare_ray.controller.paging.worth import MAX_HITS
from tests.support.fake_channel import make_manifest
from tests.unit.controller.test_prefix_reuse import prompt_of, run

ROW_BYTES, PAGE_BYTES = 1000, 100
LENGTHS = (1, 40, 64, 65, 130, 300)


class Twin:
    """The formula of `worth.py` over plain lists, written from its text alone.

    A prefix is named by (its root, its length).
    """

    def __init__(self, rows):
        self.rows, self.now, self.kept = rows, 0, {}

    def worth(self, name, used, hits):
        root, tokens = name
        shorter = [n for r, n in self.kept if r == root and n < tokens]
        held = ROW_BYTES + PAGE_BYTES * -(-tokens // 64)
        saved = tokens - max(shorter, default=0)
        return saved * (1 + hits) / held / (self.now - used + 1)

    def add(self, name):
        self.now += 1
        if name in self.kept:
            self.kept[name] = (self.now, self.kept[name][1])
            return
        if len(self.kept) == self.rows:
            worst = min(self.kept, key=lambda other: self.worth(other, *self.kept[other]))
            if self.worth(worst, *self.kept[worst]) >= self.worth(name, self.now, 0):
                return
            del self.kept[worst]
        self.kept[name] = (self.now, 0)

    def hit(self, name):
        if name in self.kept:
            self.now += 1
            self.kept[name] = (self.now, min(self.kept[name][1] + 1, MAX_HITS))


@given(
    rows=st.integers(1, 5),
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from(LENGTHS)), max_size=60
    ),
)
def test_device_tier_keeps_what_the_formula_keeps(rows, steps):
    pool = PagePool(200)
    index = PrefixIndex(pool, rows, row_bytes=ROW_BYTES, page_bytes=PAGE_BYTES)
    twin = Twin(rows)
    for owner, (is_hit, root, tokens) in enumerate(steps):
        chain = TokenChain(prompt_of(400, seed=root), "")
        if is_hit:
            snapshot = index.get(chain.key(tokens))
            if snapshot is not None:
                index.hit(snapshot)
            twin.hit((root, tokens))
        else:
            snapshot = index.claim(chain, tokens)
            if snapshot is not None:
                assert pool.reserve(owner, pages_for(tokens))
                pool.grant(owner, pages_for(tokens))
                index.publish(snapshot, pool.pages_of(owner))
                pool.release(owner)
            twin.add((root, tokens))
        assert {s.key for s in index} == {
            TokenChain(prompt_of(400, seed=r), "").key(n) for r, n in twin.kept
        }
        index.check_integrity()


@pytest.mark.parametrize("rows", [2, 3])
def test_prompt_that_many_begin_with_outlives_the_ends_of_single_requests(make_harness, rows):
    """Saves of finished requests pushed out the prompt they began with when rows were few."""
    manifest = msgspec.structs.replace(make_manifest(), snapshot_rows=rows)
    harness = make_harness(manifest=manifest)
    shared = prompt_of(128)
    run(harness, "root", shared, max_tokens=1)
    hits = [
        run(harness, f"r{n}", (*shared, *prompt_of(30, n)), max_tokens=40).cached_tokens
        for n in range(12)
    ]
    assert all(tokens >= 128 for tokens in hits[1:]), hits


def test_prefix_that_was_popular_once_is_given_up(make_harness):
    manifest = msgspec.structs.replace(make_manifest(), snapshot_rows=2)
    harness = make_harness(manifest=manifest)
    popular = prompt_of(128)
    for number in range(30):
        run(harness, f"p{number}", (*popular, number), max_tokens=1)
    for number in range(60):
        run(harness, f"o{number}", prompt_of(70, seed=number + 1), max_tokens=1)
    assert run(harness, "late", (*popular, 5), max_tokens=1).cached_tokens == 0
