"""The lightning indexer over pooled keys, in steps that a kernel may take over one by one.

K_p     = per channel: sum over the pool's rows of softmax(gate + ape) * key
score   = sum over heads of w_h * relu(q_h . K_p * D^-0.5) * heads^-0.5
SEL(t)  = tokens of the best pools among those finished by t, and of the unfinished one
"""

from __future__ import annotations

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.pooled_index import reference


def pool_keys(rows: Tensor, ape: Tensor) -> Tensor:
    """One key per pool.

    Args:
        rows: [P, pool, 2, D]: key and gate of each of a pool's rows, in order.
        ape: [pool, D] float32, added to the gates by place in the pool.
    Returns:
        [P, D] of the rows' type; softmax and sum in float32.
    Raises:
        ContractViolation: shapes disagree.
    """
    expect_shape("rows", rows, None, ape.shape[0], 2, ape.shape[1])
    if rows.device.type == "cpu" and rows.dtype == torch.float32:
        from flare_ray.device.ops.pooled_index import numba

        return numba.pool_keys(rows, ape)
    return reference.pool_keys(rows, ape)


def pool_scores(query: Tensor, keys: Tensor, weights: Tensor | None) -> Tensor:
    """Score of every pool for every row, in float32.

    Args:
        query: [B, T, heads, D].
        keys: [B, P, D] pooled keys.
        weights: [B, T, heads]; None = the heads' products are summed as they are, without the
            factor heads^-0.5.
    Returns:
        [B, T, P] float32; pools that a row may not see have a meaningless score.
    Raises:
        ContractViolation: shapes disagree.
    """
    batch, width, heads, dim = query.shape
    expect_shape("keys", keys, batch, None, dim)
    if weights is not None:
        expect_shape("weights", weights, batch, width, heads)
    if keys.is_cuda:
        from flare_ray.device.ops.pooled_index import triton

        if triton.fits(query, keys):
            return triton.pool_scores(query, keys, weights)
    kinds = {query.dtype, keys.dtype, query.dtype if weights is None else weights.dtype}
    if keys.device.type == "cpu" and kinds == {torch.float32}:
        from flare_ray.device.ops.pooled_index import numba

        return numba.pool_scores(query, keys, weights)
    return reference.pool_scores(query, keys, weights)


def best_pools(scores: Tensor, visible: Tensor, *, count: int) -> Tensor:
    """The `count` best pools of each row among the first `visible` ones.

    Equal scores go to the lower pool on every path: exact ties are common, since relu makes zeros.

    Args:
        scores: [..., P] float32.
        visible: [...] int64, finished pools the row may see.
    Returns:
        [..., min(count, P)] int64 in order of pool, then -1 where there are fewer. So what attends
        to them sums in an order that no other pool's score decides.
    Raises:
        ContractViolation: shapes disagree.
    """
    expect_shape("visible", visible, *scores.shape[:-1])
    if scores.is_cuda:
        from flare_ray.device.ops.pooled_index.selection import triton

        return triton.best_pools(scores, visible, count=count)
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        from flare_ray.device.ops.pooled_index import numba

        return numba.best_pools(scores, visible, count=count)
    return reference.best_pools(scores, visible, count=count)


def candidate_blocks(scores: Tensor, visible: Tensor, *, count: int, size: int) -> Tensor:
    """Pools in the `count` best blocks of `size` pools, the block of the newest one among them.

    A block is as good as its best visible pool; equal ones go to the lower block.

    Args:
        scores: [..., P] float32.
        visible: [...] int64, pools the row may see.
    Returns:
        [..., P] bool; blocks without a visible pool are never taken.
    Raises:
        ContractViolation: shapes disagree.
    """
    expect_shape("visible", visible, *scores.shape[:-1])
    return reference.candidate_blocks(scores, visible, count=count, size=size)


def selected_tokens(pools: Tensor, positions: Tensor, *, pool: int) -> Tensor:
    """Token positions of selected pools and of the row's unfinished pool.

    Args:
        pools: [..., K] int64 pool numbers, -1 = none.
        positions: [...] int64, the rows' positions.
        pool: tokens per pool.
    Returns:
        [..., K * pool + pool - 1] int64 positions, -1 = none. A row whose position ends a pool has
        no unfinished one, so it need not attend to itself.
    Raises:
        ContractViolation: shapes disagree.
    """
    expect_shape("positions", positions, *pools.shape[:-1])
    return reference.selected_tokens(pools, positions, pool=pool)
