"""The delta rule on CPU: a head's state stays in the core's cache over all rows of a lane.

The definition of `reference.delta_rule`, row by row. A row passes the state twice, once for what it
recalls and once to change it; sums over key channels stay in registers. Columns (value channels) do
not meet, so states of more than 128 go through all rows in slices.

A round keeps the state after each row, a prefill the last one; both compute each row alike, so that
a prompt's chunking changes no bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from flare_ray.device.ops.kda.gated import GatedRows, Gates
from flare_ray.device.ops.kda.reference import L2_EPS
from flare_ray.device.ops.numba import aligned, cube, float_rows, inner, kernel, matrix, vector
from flare_ray.device.ops.vectors.numba import (
    FUSED,
    HELD,
    LANES,
    added_product,
    constant,
    exponential,
    load,
    loop,
    pointer,
    sigmoid,
    spread,
    store,
    store_past,
    zeros,
)

SLICE = min(128, LANES * HELD // 2)
"""Value channels that run through all rows together: their sums take half the registers."""
_PARTS = SLICE // LANES


def _sums(builder: ir.IRBuilder, dim: Any, terms: Any) -> list[Any]:
    """Sums over key channels: vectors [SLICE]; `terms(channel)` emits a factor and its vectors."""

    def add_channel(channel: Any, sums: list[Any]) -> list[Any]:
        factor, values = terms(channel)
        pairs = zip(sums, values, strict=True)
        return [added_product(builder, total, factor, value) for total, value in pairs]

    return loop(builder, dim, [zeros()] * _PARTS, add_channel)


def _emit(builder: ir.IRBuilder, numbers: tuple[Any, ...], keeps: Any) -> None:
    """See `_step`; `numbers` are its arguments in order."""
    *addresses, dim, kept_stride, beta, scale_query, scale_key = numbers
    query, key, decay, value, state, out, kept = (pointer(builder, a) for a in addresses)

    def number(source: Any, channel: Any) -> Any:
        return builder.load(builder.gep(source, [channel]))

    def places(channel: Any, stride: Any) -> list[Any]:
        first = builder.mul(channel, stride)
        return [builder.add(first, constant(LANES * part)) for part in range(_PARTS)]

    def seen(channel: Any) -> tuple[Any, list[Any]]:
        weight = builder.fmul(number(key, channel), number(decay, channel))
        values = [load(builder, state, place) for place in places(channel, constant(SLICE))]
        return spread(builder, weight), values

    key_scale = spread(builder, scale_key)
    factor = builder.fmul(spread(builder, beta), key_scale)
    deltas = []
    for part, total in enumerate(_sums(builder, dim, seen)):
        wanted = load(builder, value, constant(LANES * part))
        missing = builder.fsub(wanted, builder.fmul(total, key_scale, flags=FUSED), flags=FUSED)
        deltas.append(builder.fmul(missing, factor))

    def update(channel: Any) -> tuple[Any, list[Any]]:
        fade = spread(builder, number(decay, channel))
        weight = spread(builder, number(key, channel))
        news = []
        for place, delta in zip(places(channel, constant(SLICE)), deltas, strict=True):
            faded = builder.fmul(load(builder, state, place), fade, flags=FUSED)
            news.append(added_product(builder, faded, weight, delta))
            store(builder, news[-1], state, place)
        if keeps is not None:
            for new, place in zip(news, places(channel, kept_stride), strict=True):
                keeps(builder, new, kept, place)
        return spread(builder, number(query, channel)), news

    query_scale = spread(builder, scale_query)
    for part, total in enumerate(_sums(builder, dim, update)):
        store(builder, builder.fmul(total, query_scale), out, constant(LANES * part))


def _step(keeps: Any) -> Any:
    """Advances a slice [dim, SLICE] of a head's state by one row; for kernels:

    addresses of query, key and decay [dim], value [SLICE], state, output [SLICE], and of a second
    place for the new state, which `keeps` writes there unless it is None; dim, and floats between
    the second place's lines; beta, and what normalises the query and the key, float32.
    """

    @intrinsic
    def step(_context, addresses, sizes, factors):
        def emit(_inside: Any, builder: Any, signature: Any, args: Any) -> Any:
            numbers = (
                builder.extract_value(group, place)
                for group, kind in zip(args, signature.args, strict=True)
                for place in range(len(kind))
            )
            _emit(builder, tuple(numbers), keeps)
            return ir.Constant(ir.IntType(8).as_pointer(), None)

        return types.void(addresses, sizes, factors), emit

    return step


_advance: Any = _step(None)
_advance_and_keep: Any = _step(store)
_advance_and_put_away: Any = _step(store_past)


@inner
def _scales(inputs, first, width, heads, head, scales):
    """scales [2, width]: factors that normalise a head's queries (and D^-0.5) and keys."""
    dim = inputs.shape[2]
    for t in range(width):
        query, key = inputs[first + t, head], inputs[first + t, heads + head]
        length_q, length_k = np.float32(0.0), np.float32(0.0)
        for i in range(dim):
            length_q += query[i] * query[i]
            length_k += key[i] * key[i]
        scales[0, t] = np.float32(1.0 / math.sqrt((length_q + L2_EPS) * dim))
        scales[1, t] = np.float32(1.0 / math.sqrt(length_k + L2_EPS))


@inner
def _copy(source, target, columns):
    """The first `columns` of both matrices."""
    for i in range(source.shape[0]):
        old, new = source[i], target[i]
        for j in range(columns):
            new[j] = old[j]


@inner
def _rows(qkv, decay, beta, saved, read, write, out, lanes, width, heads, dim, rows, keeps_all):
    """All lanes; see `_run`."""
    inputs = cube(qkv, lanes * width, 3 * heads, dim, np.float32)
    betas = matrix(beta, lanes * width, heads, np.float32)
    states = cube(saved, rows * heads, dim, dim, np.float32)
    outputs = cube(out, lanes * width, heads, dim, np.float32)
    first = vector(read, lanes, np.int64)
    place = vector(write, lanes * width if keeps_all else lanes, np.int64)
    state, spare, scales = (
        aligned(dim, SLICE),
        aligned(dim, SLICE),
        np.empty((2, width), np.float32),
    )
    value, result = np.zeros(SLICE, np.float32), np.empty(SLICE, np.float32)
    # Signed as the other addresses: numba would unite both kinds as floats.
    ends = (np.int64(value.ctypes.data), np.int64(state.ctypes.data), np.int64(result.ctypes.data))
    # Of several states a lane one is read again, a round later; put away past the caches they
    # displace nothing, and no line is read only to be overwritten.
    apart = width > 1 and dim % LANES == 0 and saved % 64 == 0
    for lane in range(lanes):
        for head in range(heads):
            _scales(inputs, lane * width, width, heads, head, scales)
            for start in range(0, dim, SLICE):
                columns = min(SLICE, dim - start)
                # A copy: the row read may be one of those written.
                _copy(states[first[lane] * heads + head][:, start:], state, columns)
                for t in range(width):
                    row = lane * width + t
                    value[:columns] = inputs[row, 2 * heads + head][start : start + columns]
                    query = qkv + (row * 3 * heads + head) * dim * 4
                    key, fade = query + heads * dim * 4, decay + (row * heads + head) * dim * 4
                    kept, stride = np.int64(spare.ctypes.data), SLICE
                    if keeps_all and columns == SLICE:
                        kept = saved + ((place[row] * heads + head) * dim * dim + start) * 4
                        stride = dim
                    addresses = (query, key, fade, ends[0], ends[1], ends[2], kept)
                    factors = (betas[row, head], scales[0, t], scales[1, t])
                    if keeps_all and apart and columns == SLICE:
                        _advance_and_put_away(addresses, (dim, stride), factors)
                    elif keeps_all:
                        _advance_and_keep(addresses, (dim, stride), factors)
                    else:
                        _advance(addresses, (dim, stride), factors)
                    outputs[row, head][start : start + columns] = result[:columns]
                    if keeps_all and columns < SLICE:
                        _copy(spare, states[place[row] * heads + head][:, start:], columns)
                if not keeps_all:
                    _copy(state, states[place[lane] * heads + head][:, start:], columns)


@kernel("iiiiiiiiiiiii")
def _run(qkv, decay, beta, saved, read, write, out, lanes, width, heads, dim, rows, keeps_all):
    _rows(qkv, decay, beta, saved, read, write, out, lanes, width, heads, dim, rows, keeps_all)


@inner
def _open_gates(outer, raw_beta, constants, decays, betas, bound):
    """decays [R, H D] and betas [R, H] of forget gates `outer` [R, H D] and `raw_beta` [R, H], both
    before their sigmoids; constants: factor and offset [H D]."""
    factor, offset = constants
    for row in range(decays.shape[0]):
        raw, decay = outer[row], decays[row]
        for i in range(decay.shape[0]):
            decay[i] = exponential(bound * sigmoid(offset[i] + factor[i] * raw[i]))
        for head in range(betas.shape[1]):
            betas[row, head] = sigmoid(raw_beta[row, head])


@inner
def _gate(results, gates, weight, floor):
    """results [R, H, D] become norm(results) times sigmoid of the raw gates [R, H, D]."""
    for row in range(results.shape[0]):
        for head in range(results.shape[1]):
            line, gate = results[row, head], gates[row, head]
            length = np.float32(0.0)
            for i in range(line.shape[0]):
                length += line[i] * line[i]
            scale = np.float32(1.0 / math.sqrt(length + floor))
            for i in range(line.shape[0]):
                line[i] = line[i] * scale * weight[i] * sigmoid(gate[i])


@kernel("iiiiiiiiiiiiiiiiff")
def _run_gated(
    qkv,
    outer,
    beta,
    factor,
    offset,
    norm,
    saved,
    read,
    write,
    out,
    lanes,
    width,
    heads,
    dim,
    rows,
    beta_stride,
    bound,
    floor,
):
    total, channels = lanes * width, heads * dim
    forget = matrix(outer, total, channels, np.float32)
    # A view of wider rows: only the first `heads` of each `beta_stride` belong to it.
    flat = vector(beta, (total - 1) * beta_stride + heads, np.float32)
    raw, betas = np.empty((total, heads), np.float32), np.empty((total, heads), np.float32)
    for row in range(total):
        raw[row] = flat[row * beta_stride : row * beta_stride + heads]
    decays = np.empty((total, channels), np.float32)
    constants = (vector(factor, channels, np.float32), vector(offset, channels, np.float32))
    _open_gates(forget, raw, constants, decays, betas, np.float32(bound))
    inner_gates = (np.int64(decays.ctypes.data), np.int64(betas.ctypes.data))
    fades, factors = inner_gates
    _rows(qkv, fades, factors, saved, read, write, out, lanes, width, heads, dim, rows, 1)
    gates = cube(outer + total * channels * 4, total, heads, dim, np.float32)
    results = cube(out, total, heads, dim, np.float32)
    _gate(results, gates, vector(norm, dim, np.float32), np.float32(floor))


def run(
    qkv: Tensor, decay: Tensor, beta: Tensor, *, saved: Tensor, read: Tensor, write: Tensor
) -> Tensor:
    """As `reference.delta_rule`, but writes states and returns the outputs only.

    Args:
        qkv: [B, T, 3, H, D] float32, before normalisation.
        decay: [B, T, H, D] float32, factors in (0, 1]; 1 where a row leaves the state alone.
        beta: [B, T, H] float32, 0 there.
        saved: [M, H, D, D] float32, contiguous, written in place.
        read: [B] int64 rows of `saved`.
        write: rows of `saved`, int64: [B * T], one for every row's state, or [B], for the last's.
    """
    lanes, width, _, heads, dim = qkv.shape
    qkv, decay, beta = qkv.contiguous(), decay.contiguous(), beta.contiguous()
    read, write = read.contiguous(), write.contiguous()
    out = torch.empty((lanes, width, heads, dim))
    _run(
        qkv.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        saved.data_ptr(),
        read.data_ptr(),
        write.data_ptr(),
        out.data_ptr(),
        lanes,
        width,
        heads,
        dim,
        saved.shape[0],
        write.shape[0] != lanes or width == 1,
    )
    return out


def gated_round(
    rows: GatedRows, gates: Gates, saved: Tensor, *, read: Tensor, write: Tensor
) -> Tensor:
    """See `gated.gated_round`; rows and states float32."""
    heads, dim = saved.shape[1:3]
    lanes, total = read.shape[0], write.shape[0]
    qkv, outer = rows.qkv.contiguous(), float_rows(rows.outer, heads * dim)
    beta = rows.beta if rows.beta.stride(1) == 1 else rows.beta.contiguous()
    read, write = read.contiguous(), write.contiguous()
    out = torch.empty((total, heads * dim))
    _run_gated(
        qkv.data_ptr(),
        outer.data_ptr(),
        beta.data_ptr(),
        gates.factor.data_ptr(),
        gates.offset.data_ptr(),
        gates.norm.data_ptr(),
        saved.data_ptr(),
        read.data_ptr(),
        write.data_ptr(),
        out.data_ptr(),
        lanes,
        total // lanes,
        heads,
        dim,
        saved.shape[0],
        beta.stride(0),
        gates.bound,
        gates.floor,
    )
    return out
