"""The gated delta rule on CPU, one head at a time: the state stays in the core's cache between
rows.

The definition of `reference.gated_delta_rule`, row by row: two passes over a head's [dk, dv] state.
A round keeps the state after each row or its record, a prefill the last state; all compute each row
alike, so that neither a prompt's chunking nor the form of a round changes a bit.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from flare_ray.contracts.shapes import MAX_WIDTH
from flare_ray.device.ops.gated_delta.records import Records
from flare_ray.device.ops.gated_delta.reference import L2_EPS, GatedRows, HeadShape
from flare_ray.device.ops.numba import cube, inner, inner_ordered, kernel, matrix, vector
from flare_ray.errors import ContractViolation

ENTRIES = MAX_WIDTH
"""Records that a slot keeps."""


@inner_ordered
def faded(value, decay):
    """One element of the decayed state, rounded by itself."""
    return value * decay


@inner_ordered
def added(value, key, delta):
    """One element of the state after a row's update, every operation rounded by itself."""
    return value + key * delta


@inner
def normalise(line, scale_of_sum, out):
    """out = line / sqrt((sum of squares + eps) * scale_of_sum)."""
    total = np.float32(0.0)
    for i in range(line.shape[0]):
        total += line[i] * line[i]
    scale = np.float32(1.0 / math.sqrt((total + L2_EPS) * scale_of_sum))
    for i in range(line.shape[0]):
        out[i] = line[i] * scale


@inner
def step(state, row, gates, delta, out, kept):
    """Advance state [dk, dv] by one row: its query, key and value, and its decay and beta. delta
    [dv] is the row's correction; the new state goes to `kept` too, which must not be `state`."""
    query, key, value = row
    decay, beta = gates
    keys, values = state.shape
    for j in range(values):
        delta[j] = np.float32(0.0)
        out[j] = np.float32(0.0)
    for i in range(keys):
        k = key[i]
        for j in range(values):
            old = faded(state[i, j], decay)
            state[i, j] = old
            delta[j] += k * old
    for j in range(values):
        delta[j] = (value[j] - delta[j]) * beta
    for i in range(keys):
        k, q = key[i], query[i]
        for j in range(values):
            new = added(state[i, j], k, delta[j])
            state[i, j] = new
            kept[i, j] = new
            out[j] += q * new


@inner
def normalised_rows(mixed, heads, queries, keys):
    """queries, keys [T, Hk, dk] of rows [T, channels]."""
    key_heads, dim = heads
    for t in range(mixed.shape[0]):
        for head in range(key_heads):
            at = head * dim
            normalise(mixed[t, at : at + dim], dim, queries[t, head])
            at += key_heads * dim
            normalise(mixed[t, at : at + dim], 1, keys[t, head])


@kernel("iiiiiiiiiiiiiii")
def _run(
    mixed, decay, beta, saved, read, write, out, lanes, width, hk, hv, dk, dv, rows, keeps_all
):
    channels, first_value = 2 * hk * dk + hv * dv, 2 * hk * dk
    inputs = matrix(mixed, lanes * width, channels, np.float32)
    decays, betas = (
        matrix(decay, lanes * width, hv, np.float32),
        matrix(beta, lanes * width, hv, np.float32),
    )
    states = cube(saved, rows * hv, dk, dv, np.float32)
    outputs = cube(out, lanes * width, hv, dv, np.float32)
    first = vector(read, lanes, np.int64)
    place = vector(write, lanes * width if keeps_all else lanes, np.int64)
    state, unused = np.empty((dk, dv), np.float32), np.empty((dk, dv), np.float32)
    queries, keys = np.empty((width, hk, dk), np.float32), np.empty((width, hk, dk), np.float32)
    delta = np.empty(dv, np.float32)
    for lane in range(lanes):
        normalised_rows(inputs[lane * width : (lane + 1) * width], (hk, dk), queries, keys)
        for head in range(hv):
            # A copy: the row read may be one of those written.
            state[:] = states[first[lane] * hv + head]
            shared, at = head // (hv // hk), first_value + head * dv
            for t in range(width):
                row = lane * width + t
                parts = (queries[t, shared], keys[t, shared], inputs[row, at : at + dv])
                gates = (decays[row, head], betas[row, head])
                kept = unused
                if keeps_all:
                    kept = states[place[row] * hv + head]
                step(state, parts, gates, delta, outputs[row, head], kept)
            if not keeps_all:
                states[place[lane] * hv + head] = state


def run(rows: GatedRows, heads: HeadShape, *, saved: Tensor, read: Tensor, write: Tensor) -> Tensor:
    """As `reference.gated_delta_rule`, but writes states and returns the outputs only.

    Args:
        saved: [M, Hv, dk, dv] float32, contiguous, written in place.
        read: [B] int64 rows of `saved`.
        write: rows of `saved`, int64: [B * T], one for every row's state, or [B], for the last's.
    """
    lanes, width = rows.beta.shape[:2]
    mixed, beta = rows.mixed.contiguous(), rows.beta.contiguous()
    decay = rows.log_decay.exp().contiguous()
    read, write = read.contiguous(), write.contiguous()
    out = torch.empty((lanes, width, heads.value_heads, heads.value_dim))
    _run(
        mixed.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        saved.data_ptr(),
        read.data_ptr(),
        write.data_ptr(),
        out.data_ptr(),
        lanes,
        width,
        heads.key_heads,
        heads.value_heads,
        heads.key_dim,
        heads.value_dim,
        saved.shape[0],
        write.shape[0] != lanes or width == 1,
    )
    return out


@kernel("iiiiiiiiiiiiiiii")
def _record(
    mixed, decay, beta, base, slots, corrections, keys, decays, out, lanes, width, hk, hv, dk, dv, n
):
    channels, first_value = 2 * hk * dk + hv * dv, 2 * hk * dk
    inputs = matrix(mixed, lanes * width, channels, np.float32)
    fades, betas = (
        matrix(decay, lanes * width, hv, np.float32),
        matrix(beta, lanes * width, hv, np.float32),
    )
    states = cube(base, n * hv, dk, dv, np.float32)
    outputs = cube(out, lanes * width, hv, dv, np.float32)
    deltas = cube(corrections, n * ENTRIES, hv, dv, np.float32)
    kept_keys = cube(keys, n * ENTRIES, hk, dk, np.float32)
    kept_decays = matrix(decays, n * ENTRIES, hv, np.float32)
    chosen = vector(slots, lanes, np.int64)
    state, unused = np.empty((dk, dv), np.float32), np.empty((dk, dv), np.float32)
    queries = np.empty((width, hk, dk), np.float32)
    for lane in range(lanes):
        slot = chosen[lane]
        first = slot * ENTRIES
        lane_keys = kept_keys[first : first + width]
        normalised_rows(inputs[lane * width : (lane + 1) * width], (hk, dk), queries, lane_keys)
        kept_decays[first : first + width] = fades[lane * width : (lane + 1) * width]
        for head in range(hv):
            state[:] = states[slot * hv + head]
            shared, at = head // (hv // hk), first_value + head * dv
            for t in range(width):
                row = lane * width + t
                parts = (queries[t, shared], lane_keys[t, shared], inputs[row, at : at + dv])
                gates = (fades[row, head], betas[row, head])
                step(state, parts, gates, deltas[first + t, head], outputs[row, head], unused)


def record(
    rows: GatedRows, heads: HeadShape, base: Tensor, records: Records, slots: Tensor
) -> Tensor:
    """Run a round's rows from base[slots] and leave their records; returns outputs [B, T, Hv, dv]
    float32."""
    lanes, width = rows.beta.shape[:2]
    mixed, beta = rows.mixed.contiguous(), rows.beta.contiguous()
    decay, slots = rows.log_decay.exp().contiguous(), slots.contiguous()
    out = torch.empty((lanes, width, heads.value_heads, heads.value_dim))
    _record(
        mixed.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        base.data_ptr(),
        slots.data_ptr(),
        *_addresses(records),
        out.data_ptr(),
        lanes,
        width,
        heads.key_heads,
        heads.value_heads,
        heads.key_dim,
        heads.value_dim,
        base.shape[0],
    )
    return out


@kernel("iiiiiiiiiiiii")
def _replay(base, slots, counts, corrections, keys, decays, out, lanes, hk, hv, dk, dv, rows):
    states = cube(base, rows * hv, dk, dv, np.float32)
    results = states
    if out != 0:
        results = cube(out, lanes * hv, dk, dv, np.float32)
    deltas = cube(corrections, rows * ENTRIES, hv, dv, np.float32)
    kept_keys = cube(keys, rows * ENTRIES, hk, dk, np.float32)
    kept_decays = matrix(decays, rows * ENTRIES, hv, np.float32)
    chosen, taken = vector(slots, lanes, np.int64), vector(counts, lanes, np.int64)
    state = np.empty((dk, dv), np.float32)
    for lane in range(lanes):
        slot = chosen[lane]
        target = lane if out != 0 else slot
        for head in range(hv):
            state[:] = states[slot * hv + head]
            for entry in range(taken[lane]):
                place = slot * ENTRIES + entry
                key, delta = kept_keys[place, head // (hv // hk)], deltas[place, head]
                decay = kept_decays[place, head]
                for i in range(dk):
                    k = key[i]
                    for j in range(dv):
                        state[i, j] = added(faded(state[i, j], decay), k, delta[j])
            results[target * hv + head] = state


def replay(
    base: Tensor, records: Records, slots: Tensor, counts: Tensor, *, out: Tensor | None
) -> None:
    """As `records.replayed` into `out` [R, Hv, dk, dv], or in place into base[slots] without it."""
    slots, counts = slots.contiguous(), counts.contiguous()
    rows, heads, key_dim, value_dim = base.shape
    _replay(
        base.data_ptr(),
        slots.data_ptr(),
        counts.data_ptr(),
        *_addresses(records),
        0 if out is None else out.data_ptr(),
        slots.shape[0],
        records.keys.shape[2],
        heads,
        key_dim,
        value_dim,
        rows,
    )


def _addresses(records: Records) -> tuple[int, int, int]:
    """Of contiguous records with the entries that kernels count on."""
    tensors = (records.corrections, records.keys, records.decays)
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.shape[1] != ENTRIES:
            raise ContractViolation(
                f"records of {list(tensor.shape)}: {ENTRIES} entries, contiguous"
            )
    first, second, third = (tensor.data_ptr() for tensor in tensors)
    return first, second, third
