"""Compiled indices of a pass, pair inputs and chain verification against their torch forms."""

import pytest
import torch

from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.device.layers.rows import IndexLayout, Span, _plain_rows, paged_rows
from flare_ray.device.ops.pair_join import reference as plain_join
from flare_ray.device.ops.pair_join.api import PairJoin
from flare_ray.device.ops.rmsnorm.api import RmsNorm
from flare_ray.device.sampling.chain import reference_chain, verify_chain
from flare_ray.device.sampling.numba import filter_rows, soften
from flare_ray.errors import ContractViolation

COLUMNS = 3
NULL_SLOT = 9
FIELDS = (
    "latent_write",
    "ring_read",
    "ring_write",
    "pool_rows",
    "pool_write",
    "pool_number",
    "seen",
    "read",
    "bias",
    "pool_read",
)


def span(width: int, seed: int) -> Span:
    """Six lanes: at the beginning, inside, at edges of pages and of the view, with rows that take
    no part at the end, at the beginning (clamped positions) and everywhere."""
    generator = torch.Generator().manual_seed(seed)
    inside = int(torch.randint(1, COLUMNS * PAGE_TOKENS - width, (1,), generator=generator))
    starts = [0, inside, PAGE_TOKENS - 1, COLUMNS * PAGE_TOKENS - 1, 5, 7]
    positions = torch.tensor(starts).unsqueeze(1) + torch.arange(width)
    valid = torch.ones(6, width, dtype=torch.bool)
    valid[1, int(torch.randint(0, width + 1, (1,), generator=generator)) :] = False
    valid[4] = False
    if width > 2:
        positions[5, :2], valid[5, :2] = positions[5, 2], False
    table = torch.randperm(6 * COLUMNS, generator=generator).view(6, COLUMNS) + 1
    return Span(positions, valid, torch.tensor([4, 0, 7, 2, 8, 1]), table)


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("top_k", [COLUMNS * PAGE_TOKENS, COLUMNS * PAGE_TOKENS - 1])
@pytest.mark.parametrize("width", range(1, 9))
def test_compiled_places_of_a_pass_equal_the_plain_ones(width, top_k, attends):
    layout = IndexLayout(pool=4, entries=12, top_k=top_k)
    for seed in range(5):
        rows = span(width, seed)
        settings = {"null_slot": NULL_SLOT, "dtype": torch.float32, "attends": attends}
        got = paged_rows(rows, layout, **settings)
        wanted = _plain_rows(rows, layout, **settings)
        assert (got.batch, got.width, got.ring_rows) == (6, width, None)
        for name in FIELDS:
            one, other = getattr(got, name), getattr(wanted, name)
            assert (one is None) == (other is None), name
            assert one is None or torch.equal(one, other), name


def test_steps_cut_compiled_places_like_plain_ones():
    layout = IndexLayout(pool=4, entries=12, top_k=COLUMNS * PAGE_TOKENS)
    settings = {"null_slot": NULL_SLOT, "dtype": torch.float32, "attends": True}
    got = paged_rows(span(1, 3), layout, **settings).steps(3)
    wanted = _plain_rows(span(1, 3), layout, **settings).steps(3)
    for one, other in zip(got, wanted, strict=True):
        for name in set(FIELDS) - {"pool_rows", "pool_read"}:
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_a_pass_wider_than_its_ring_keeps_the_plain_form():
    layout = IndexLayout(pool=4, entries=12, top_k=COLUMNS * PAGE_TOKENS)
    rows = paged_rows(span(13, 1), layout, null_slot=NULL_SLOT, dtype=torch.float32)
    assert rows.ring_rows is not None


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("eps", [(1e-6, 1e-6), (1e-6, 1e-5)])
def test_a_pair_is_joined_as_in_torch(rows, eps):
    table, hidden = torch.randn(50, 24), torch.randn(rows, 40)[:, 8:32]
    norms = tuple(RmsNorm(torch.rand(24) + 0.5, eps=e) for e in eps)
    tokens = torch.randint(0, 50, (rows,))
    positions = torch.randint(0, 3, (rows,))
    positions[0] = 0
    got = PairJoin(table, *norms)(tokens, hidden, positions)
    wanted = plain_join.joined(table, tokens, hidden, positions, norms)
    assert torch.allclose(got, wanted, rtol=2e-6, atol=2e-6)
    assert not got[0, :24].any()


def chain(lanes: int, depth: int, vocabulary: int, seed: int):
    """Random rows; lane 0 offers nothing, lane 1 equals its proposal (all accepted)."""
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(lanes, depth + 1, vocabulary, generator=g).pow(6)
    q = torch.rand(lanes, depth + 2, vocabulary, generator=g).pow(6)[:, :depth]
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    q = q.contiguous() if seed % 2 else q
    q[1] = p[1, :depth]
    drafts = torch.multinomial(q.reshape(-1, vocabulary), 1, generator=g).view(lanes, depth)
    lengths = torch.randint(0, depth + 1, (lanes,), generator=g)
    lengths[0], lengths[1] = 0, depth
    uniforms = torch.rand(lanes, depth + 4, generator=g)[:, : depth + 2].clamp(min=1e-6)
    return p, q, drafts, lengths, uniforms


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("vocabulary", [5, 64, 1000])
def test_the_compiled_chain_equals_the_plain_one(depth, vocabulary):
    for seed in range(20):
        given = chain(4, depth, vocabulary, seed)
        got, wanted = verify_chain(*given), reference_chain(*given)
        assert torch.equal(got.accepted, wanted.accepted)
        assert torch.equal(got.token, wanted.token)
        assert got.accepted[0] == 0
        assert got.accepted[1] == depth


def test_an_empty_residual_gives_the_draft_itself():
    p, q, drafts, lengths, uniforms = chain(3, 2, 16, 1)
    p[:, :2], lengths[:], uniforms[:] = q, 2, 1.0
    got = verify_chain(p, q, drafts, lengths, uniforms)
    assert got.accepted.tolist() == [0, 0, 0]
    assert torch.equal(got.token, drafts[:, 0])


def test_a_row_that_holds_no_numbers_ends_with_some_token_of_the_vocabulary():
    p, q, drafts, lengths, uniforms = chain(3, 2, 16, 1)
    p[2], q[0] = float("nan"), float("nan")
    got = verify_chain(p, q, drafts, lengths, uniforms)
    assert ((got.token >= 0) & (got.token < 16)).all()
    assert ((got.accepted >= 0) & (got.accepted <= lengths)).all()


@pytest.mark.parametrize("lanes", [1, 3])
def test_draft_probabilities_are_written_in_place(lanes):
    kept = torch.full((lanes, 5, 40), -1.0)
    logits, warmth = torch.randn(lanes, 1, 40), torch.rand(lanes) + 0.5
    top, low = torch.rand(lanes) * 0.5 + 0.5, torch.rand(lanes) * 0.1
    place = kept[:, 2:3]
    got = filter_rows(soften(logits, warmth, place), top, low)
    assert got.data_ptr() == place.data_ptr()
    wanted = filter_rows(soften(logits, warmth), top, low)
    assert torch.equal(kept[:, 2:3], wanted)
    assert (kept[:, [0, 1, 3, 4]] == -1.0).all()


def test_rows_at_unequal_distances_never_reach_a_kernel():
    with pytest.raises(ContractViolation, match="strides"):
        soften(torch.randn(2, 2, 8), torch.ones(2), torch.empty(2, 3, 8)[:, :2])
