"""Manifold-constrained hyper-connections: n residual streams around a block (Xie et al. 2026).

    f    = flatten(streams) / sqrt(mean^2 + norm_eps)           float32
    pre  = sigmoid(...) + eps          streams -> block input
    post = 2 sigmoid(...)              block output -> each stream
    mix  = Sinkhorn(softmax(...))      streams -> streams, applied transposed

An eager round pays per operator, and the Sinkhorn passes are most of a site. Two things keep their
number down: the streams' norm divides the projected coefficients, not the streams; and a pass over
[R, n * n] is one product with a constant matrix of zeros and ones, and one division. The rows carry
a last entry of 1, which brings eps into every sum. On CPU in float32 a site is two compiled calls,
on CUDA with four streams three kernels; other numbers of streams take the torch form there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape

CUDA_STREAMS = 4
"""Streams of the CUDA kernels; every known checkpoint has four."""


@dataclass(slots=True)
class StreamMix:
    """What `mix_out` needs of a site: post [R, n], mix [R, n, n], both float32."""

    post: Tensor
    mix: Tensor


@dataclass(frozen=True, slots=True)
class SinkhornShape:
    """iterations: column passes; eps: added to every sum and to pre; norm_eps: of the streams."""

    iterations: int
    eps: float
    norm_eps: float


class HyperConnection:
    """One site's coefficients and passes.

    Args:
        projection: [(2 + n) n, n H] float32.
        base: [(2 + n) n] float32; order pre, post, mix row by row.
        scale: [3] float32 factors of pre, post, mix.
        streams: n.
        shape: iterations and epsilons.
    """

    def __init__(
        self, projection: Tensor, base: Tensor, scale: Tensor, *, streams: int, shape: SinkhornShape
    ) -> None:
        n = self._n = streams
        rows = (2 + n) * n
        expect_shape("projection", projection, rows, None)
        expect_shape("base", base, rows)
        expect_shape("scale", scale, 3)
        flat = projection.shape[1]
        device = projection.device
        # The norm is hypot(|f|, sqrt(norm_eps * nH)) / sqrt(nH): its root goes into the weights.
        parts = zip(scale.split(1), (n, n, n * n), strict=True)
        factor = torch.cat([part.expand(size) for part, size in parts])
        root = math.sqrt(flat)
        self._projection = (projection * (factor * root).unsqueeze(1)).t().contiguous()
        self._base = base.clone()
        self._floor = torch.full((1,), math.sqrt(shape.norm_eps * flat), device=device)
        self._iterations = shape.iterations
        self._eps_row = torch.full((n * n,), shape.eps, device=device)
        place = torch.arange(n * n, device=device)
        same_row = place.unsqueeze(1) // n == place.unsqueeze(0) // n
        same_column = place.unsqueeze(1) % n == place.unsqueeze(0) % n
        self._sums = [
            torch.cat((same.to(torch.float32), self._eps_row.unsqueeze(0)))
            for same in (same_column, same_row)
        ]
        self._site: Any = None
        self._cuda_site: Any = None
        if device.type == "cpu":
            self._site = _compiled_site(projection, factor, base, shape)
        elif n == CUDA_STREAMS:
            self._cuda_site = _cuda_site(self._projection.t(), base, shape)
        self._offset = torch.tensor([shape.eps] * n + [0.0] * n, device=device)
        self._factor = torch.tensor([1.0] * n + [2.0] * n, device=device)

    def mix_in(self, streams: Tensor) -> tuple[Tensor, StreamMix]:
        """Streams [R, n, H] -> (block input [R, H] of their type, the coefficients for mix_out)."""
        expect_shape("streams", streams, None, self._n, None)
        if self._site is not None and streams.dtype == torch.float32:
            from flare_ray.device.ops.hyper_connection import numba

            x, post, mix = numba.mix_in(streams, self._site)
            return x, StreamMix(post, mix)
        if self._cuda_site is not None:
            x, _pre, post, mix = self._cuda_site.mix_in(streams)
            return x, StreamMix(post, mix)
        pre, site = self._coefficients(streams)
        return collapse(streams, pre), site

    def mix_late(self, streams: Tensor, before: Tensor) -> tuple[Tensor, Tensor, StreamMix]:
        """As `mix_in`, but the block input takes the coefficients of the site before.

        Args:
            streams: [R, n, H].
            before: [R, n] float32, what the last site handed on; one stream's 1 at the first.
        Returns:
            (block input [R, H], this site's coefficients [R, n] for the next one, mix_out's).
        """
        expect_shape("streams", streams, None, self._n, None)
        expect_shape("before", before, streams.shape[0], self._n)
        if self._site is not None and streams.dtype == torch.float32:
            from flare_ray.device.ops.hyper_connection import numba

            x, pre, post, mix = numba.mix_late(streams, before, self._site)
            return x, pre, StreamMix(post, mix)
        if self._cuda_site is not None:
            x, pre, post, mix = self._cuda_site.mix_in(streams, before)
            return x, pre, StreamMix(post, mix)
        pre, site = self._coefficients(streams)
        return collapse(streams, before), pre, site

    def _coefficients(self, streams: Tensor) -> tuple[Tensor, StreamMix]:
        n = self._n
        wide = streams.flatten(1).to(torch.float32)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self._floor)
        raw = torch.addcdiv(self._base, torch.mm(wide, self._projection), length)
        gates = torch.sigmoid(raw[:, : 2 * n])
        gates = torch.addcmul(self._offset, gates, self._factor)
        return gates[:, :n], StreamMix(gates[:, n:], self._sinkhorn(raw[:, 2 * n :]))

    def _sinkhorn(self, logits: Tensor) -> Tensor:
        """[R, n * n] -> [R, n, n]."""
        n, rows = self._n, logits.shape[0]
        start = torch.softmax(logits.view(rows, n, n), dim=-1).view(rows, n * n)
        carried = torch.ones((rows, n * n + 1), device=logits.device)
        mix, sums = carried[:, :-1], torch.empty_like(start)
        torch.add(start, self._eps_row, out=mix)
        columns, lines = self._sums
        torch.mm(carried, columns, out=sums)
        mix.div_(sums)
        for _ in range(self._iterations - 1):
            torch.mm(carried, lines, out=sums)
            mix.div_(sums)
            torch.mm(carried, columns, out=sums)
            mix.div_(sums)
        return mix.view(rows, n, n)


def _compiled_site(projection: Tensor, factor: Tensor, base: Tensor, shape: SinkhornShape) -> Any:
    """The site as the compiled form takes it; `factor` [(2 + n) n] scales the projection's rows."""
    from flare_ray.device.ops.hyper_connection import numba

    scaled = (projection * factor.unsqueeze(1)).contiguous()
    return numba.Site(
        scaled, base.contiguous().clone(), shape.iterations, shape.eps, shape.norm_eps
    )


def _cuda_site(projection: Tensor, base: Tensor, shape: SinkhornShape) -> Any:
    """The site's kernels; `projection` [24, 4 H] with scale and root in its rows."""
    from flare_ray.device.ops.hyper_connection import triton

    return triton.Site(
        projection,
        base,
        floor=shape.norm_eps * projection.shape[1],
        iterations=shape.iterations,
        eps=shape.eps,
    )


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Sum over streams of pre [R, n] float32 times streams [R, n, H], in float32: [R, H]."""
    if streams.device.type == "cpu" and streams.dtype == torch.float32:
        from flare_ray.device.ops.hyper_connection import numba

        return numba.collapse(streams, pre)
    mixed = torch.bmm(pre.unsqueeze(1), streams.to(torch.float32)).squeeze(1)
    return mixed.to(streams.dtype)


def mean_stream(streams: Tensor) -> Tensor:
    """Mean over streams [R, n, H]: [R, H]."""
    if streams.device.type == "cpu" and streams.dtype == torch.float32:
        rows, n, _ = streams.shape
        return collapse(streams, streams.new_full((rows, n), 1.0 / n))
    return streams.mean(1)


def mix_out(block: Tensor, streams: Tensor, site: StreamMix) -> Tensor:
    """new[j] = post[j] * block + sum over i of mix[i, j] * streams[i].

    Args:
        block: [R, H].
        streams: [R, n, H], as given to the site's `mix_in`.
        site: its coefficients.
    Returns:
        [R, n, H] of the streams' type, mixed in float32.
    Raises:
        ContractViolation: shapes disagree.
    """
    expect_shape("block", block, streams.shape[0], streams.shape[2])
    if streams.device.type == "cpu" and streams.dtype == block.dtype == torch.float32:
        from flare_ray.device.ops.hyper_connection import numba

        mix = site.mix.contiguous()
        return numba.mix_out(block, streams, site.post.contiguous(), mix)
    if streams.is_cuda and streams.shape[1] == CUDA_STREAMS and streams.dtype == block.dtype:
        from flare_ray.device.ops.hyper_connection import triton

        return triton.mix_out(block, streams, site.post, site.mix)
    mixed = site.post.unsqueeze(2) * block.to(torch.float32).unsqueeze(1)
    mixed.baddbmm_(site.mix.transpose(1, 2), streams.to(torch.float32))
    return mixed.to(streams.dtype)
