"""Uniforms, filters, and draws by inverse CDF or by position on CPU.

The nucleus is looked for among a row's few large probabilities, one pass over them per digit; only
where they hold less than top-p asks for, over the whole row.

A draw makes noise only where it can matter. A token of probability zero needs none, and of the
others only those that could beat the best so far need its logarithm: -log u > 1 - u, so p / (1 - u)
bounds p / -log u from above. Equal to `coupled.py` token for token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flare_ray.device.ops.checks import expect_shape
from flare_ray.device.ops.numba import float_rows, inner, inner_ordered, kernel, matrix, vector
from flare_ray.device.ops.vectors.numba import exponential
from flare_ray.errors import ContractViolation

_DIGIT_BITS = 10
_BINS = 1 << _DIGIT_BITS
_SCALE = 2.0**-32
_GROUP = 16
"""Philox blocks made at once: several vectors of 64-bit lanes."""
_LARGE = int(np.float32(2.0**-13).view(np.int32))
"""Bits of the smallest probability that counts as large; a distribution has at most 8,192."""
_CHUNK = 64


@kernel("iiiiiii")
def _soften(logits, temperature, out, rows, vocabulary, lanes, stride):
    """Rows of `out`, `stride` apart: softmax of a lane's logits divided by its temperature."""
    lines = matrix(logits, rows, vocabulary, np.float32)
    divisor = vector(temperature, lanes, np.float32)
    for row in range(rows):
        line, result = lines[row], vector(out + 4 * row * stride, vocabulary, np.float32)
        warmth = divisor[row // (rows // lanes)]
        highest, total = np.float32(-np.inf), np.float32(0.0)
        for i in range(vocabulary):
            highest = max(highest, line[i])
        for i in range(vocabulary):
            # Below the highest first: nothing overflows, however small the temperature.
            power = (line[i] - highest) / warmth
            weight = exponential(power) if power > np.float32(-87.0) else np.float32(0.0)
            result[i] = weight
            total += weight
        share = np.float32(1.0) / total
        for i in range(vocabulary):
            result[i] *= share


def _row_stride(x: Tensor) -> int:
    """Elements from one row of [B, W, V] float32 to the next, where that is one number.

    Raises:
        ContractViolation: it is not, or the type differs.
    """
    lanes, width, vocabulary = x.shape
    stride = x.stride(0) if width == 1 else x.stride(1)
    even = width == 1 or lanes == 1 or x.stride(0) == width * stride
    if x.dtype != torch.float32 or x.stride(2) != 1 or not even:
        raise ContractViolation(f"rows {x.shape} {x.dtype} at strides {x.stride()} for a kernel")
    return stride if lanes * width > 1 else vocabulary


def soften(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    """Softmax of logits [B, W, V] float32 over temperatures [B] float32; less than exp(-87) of the
    highest is 0.

    Args:
        out: [B, W, V] float32, rows at equal distances; overwritten and returned.
    """
    lanes, width, vocabulary = logits.shape
    logits, temperature = float_rows(logits, vocabulary), temperature.contiguous()
    out = torch.empty_like(logits) if out is None else out
    expect_shape("out", out, lanes, width, vocabulary)
    sizes = (lanes * width, vocabulary, lanes, _row_stride(out))
    _soften(logits.data_ptr(), temperature.data_ptr(), out.data_ptr(), *sizes)
    return out


@inner
def _sum(value):
    total = 0.0
    for i in range(value.shape[0]):
        total += value[i]
    return total


@inner_ordered
def _large_places(bit, place):
    """Write the places of large probabilities, ascending; how many."""
    count = 0
    for start in range(0, bit.shape[0], _CHUNK):
        end = min(start + _CHUNK, bit.shape[0])
        highest = np.int32(0)
        for i in range(start, end):
            highest = max(highest, bit[i])
        if highest < _LARGE:
            continue
        for i in range(start, end):
            if bit[i] >= _LARGE:
                place[count] = i
                count += 1
    return count


@inner_ordered
def _boundary(value, bit, mass, goal):
    """(bit pattern of the smallest kept probability, mass above it)."""
    above, prefix = 0.0, 0
    for shift in (2 * _DIGIT_BITS, _DIGIT_BITS, 0):
        mass[:] = 0.0
        for i in range(value.shape[0]):
            if bit[i] >> (shift + _DIGIT_BITS) == prefix:
                mass[(bit[i] >> shift) & (_BINS - 1)] += value[i]
        digit = _BINS - 1
        while digit > 0 and above + mass[digit] < goal:
            above += mass[digit]
            digit -= 1
        prefix = (prefix << _DIGIT_BITS) | digit
    return prefix, above


@inner_ordered
def _keep(value, bit, mass, top_p, min_p, goal):
    """Zero what the filters cut off; the mass that is left. `goal` is the mass to keep."""
    boundary, above = 0, 0.0
    if top_p < 1.0:
        boundary, above = _boundary(value, bit, mass, goal)
    floor = np.float32(0.0)
    if min_p > 0.0:
        floor = min_p * value.max()
    kept = 0.0
    for i in range(value.shape[0]):
        if bit[i] == boundary and boundary > 0:
            # Equal probabilities enter in order of id until the mass is reached.
            if above >= goal:
                value[i] = 0.0
            above += value[i]
        if bit[i] < boundary or value[i] < floor:
            value[i] = 0.0
        kept += value[i]
    return kept


@kernel("iiiiiii", ordered=True)
def _filter(probs, top_p, min_p, rows, vocabulary, lanes, stride):
    """Rows of `probs`, `stride` apart, rows // lanes of them per lane, become filtered."""
    top, low = vector(top_p, lanes, np.float32), vector(min_p, lanes, np.float32)
    mass, place = np.empty(_BINS, np.float64), np.empty(vocabulary, np.int64)
    few = np.empty(vocabulary, np.float32)
    few_bits = few.view(np.int32)
    for row in range(rows):
        lane = row // (rows // lanes)
        value = vector(probs + 4 * row * stride, vocabulary, np.float32)
        bit = vector(probs + 4 * row * stride, vocabulary, np.int32)
        goal, count, held = 1.0, 0, 0.0
        if top[lane] < 1.0:
            goal = np.float64(top[lane]) * _sum(value)
            count = _large_places(bit, place)
            for i in range(count):
                few[i] = value[place[i]]
                held += few[i]
        if count > 0 and held >= goal:
            kept = _keep(few[:count], few_bits[:count], mass, top[lane], low[lane], goal)
            value[:] = 0.0
            for i in range(count):
                value[place[i]] = np.float32(few[i] / kept)
        else:
            kept = _keep(value, bit, mass, top[lane], low[lane], goal)
            for i in range(vocabulary):
                value[i] = np.float32(value[i] / kept)


def filter_rows(probs: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep each row's nucleus and what reaches its min-p floor, renormalised.

    Args:
        probs: [B, W, V] float32, each in [0, 1], rows at equal distances; overwritten.
        top_p: [B] float32 in (0, 1], 1 = off.
        min_p: [B] float32 in [0, 1), 0 = off.
    Returns:
        `probs`.
    """
    lanes, width, vocabulary = probs.shape
    top_p, min_p = top_p.contiguous(), min_p.contiguous()
    sizes = (lanes * width, vocabulary, lanes, _row_stride(probs))
    _filter(probs.data_ptr(), top_p.data_ptr(), min_p.data_ptr(), *sizes)
    return probs


@inner_ordered
def _cumulative(weights, ends):
    """ends[c]: the float32 sum through chunk c, added in order in float64 (as torch's cumsum);
    the whole sum."""
    total = 0.0
    for chunk in range(ends.shape[0]):
        start = chunk * _CHUNK
        end = min(start + _CHUNK, weights.shape[0])
        highest = np.float32(0.0)
        for i in range(start, end):
            highest = max(highest, weights[i])
        if highest > 0.0:
            for i in range(start, end):
                total += weights[i]
        ends[chunk] = total
    return np.float32(total)


@inner_ordered
def _drawn(line, ends, uniform):
    """(`chain.draw` of one row, the row's sum); `ends` is scratch for `_cumulative`."""
    total = _cumulative(line, ends)
    # Below the total by at least one float, so that some id's cumulative weight exceeds it.
    goal = min(uniform * total, np.nextafter(total, np.float32(0.0)))
    chunk = 0
    while chunk < ends.shape[0] and not np.float32(ends[chunk]) > goal:
        chunk += 1
    held = ends[chunk - 1] if chunk > 0 else 0.0
    for i in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, line.shape[0])):
        held += line[i]
        if np.float32(held) > goal:
            return i, total
    return line.shape[0] - 1, total


@kernel("iiiiii", ordered=True)
def _inverse_cdf(weights, uniforms, out, rows, vocabulary, stride):
    drawn, uniform = vector(out, rows, np.int64), vector(uniforms, rows, np.float32)
    ends = np.empty((vocabulary + _CHUNK - 1) // _CHUNK, np.float64)
    for row in range(rows):
        line = vector(weights + 4 * row * stride, vocabulary, np.float32)
        drawn[row], _ = _drawn(line, ends, uniform[row])


@kernel("iiiiiiiiiii", ordered=True)
def _verify(p, q, drafts, lengths, uniforms, accepted, tokens, lanes, shape, q_stride, u_stride):
    """`shape` = drafts of a lane * 2**32 + vocabulary; strides of a lane."""
    depth, vocabulary = shape >> 32, shape & 0xFFFFFFFF
    draft, offered = matrix(drafts, lanes, depth, np.int64), vector(lengths, lanes, np.int64)
    count, token = vector(accepted, lanes, np.int64), vector(tokens, lanes, np.int64)
    rest = np.empty(vocabulary, np.float32)
    ends = np.empty((vocabulary + _CHUNK - 1) // _CHUNK, np.float64)
    for lane in range(lanes):
        target = matrix(p + 4 * lane * (depth + 1) * vocabulary, depth + 1, vocabulary, np.float32)
        proposal = matrix(q + 4 * lane * q_stride, depth, vocabulary, np.float32)
        uniform = vector(uniforms + 4 * lane * u_stride, depth + 2, np.float32)
        passed = 0
        while passed < offered[lane]:
            guess = draft[lane, passed]
            if not uniform[passed] * proposal[passed, guess] < target[passed, guess]:
                break
            passed += 1
        count[lane] = passed
        if passed == offered[lane]:
            token[lane], _ = _drawn(target[passed], ends, uniform[passed])
            continue
        for i in range(vocabulary):
            left = target[passed, i] - proposal[passed, i]
            rest[i] = left if left > np.float32(0.0) else np.float32(0.0)
        drawn, total = _drawn(rest, ends, uniform[offered[lane] + 1])
        token[lane] = drawn if total > np.float32(0.0) else draft[lane, passed]


def verify_chain(
    p: Tensor, q: Tensor, drafts: Tensor, lengths: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """As `chain.verify_chain` with D > 0, float32, token for token where p holds numbers; elsewhere
    some token of the vocabulary. Both results [B] int64: accepted, token."""
    lanes, rows, vocabulary = p.shape
    expect_shape("q", q, lanes, rows - 1, vocabulary)
    expect_shape("drafts", drafts, lanes, rows - 1)
    p, drafts, lengths = float_rows(p, vocabulary), drafts.contiguous(), lengths.contiguous()
    if q.dtype != torch.float32 or not q[0].is_contiguous():
        raise ContractViolation(f"q {q.shape} {q.dtype} at strides {q.stride()} for a kernel")
    if uniforms.stride(1) != 1 or uniforms.shape[1] != rows + 1:
        raise ContractViolation(f"uniforms {uniforms.shape} at strides {uniforms.stride()}")
    accepted, tokens = torch.empty_like(lengths), torch.empty_like(lengths)
    places = [t.data_ptr() for t in (p, q, drafts, lengths, uniforms, accepted, tokens)]
    _verify(*places, lanes, (rows - 1) << 32 | vocabulary, q.stride(0), uniforms.stride(0))
    return accepted, tokens


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """As `chain.draw`, float32, token for token."""
    rows, vocabulary = weights.shape
    stride, uniforms = _row_stride(weights.unsqueeze(1)), uniforms.contiguous()
    out = torch.empty(rows, dtype=torch.int64)
    _inverse_cdf(weights.data_ptr(), uniforms.data_ptr(), out.data_ptr(), rows, vocabulary, stride)
    return out


@inner_ordered
def _philox(key, group, subsequence, words):
    """`words` [4, _GROUP]: the four words of each block of a group, Philox4x32-10 at counters
    (block, subsequence)."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    key_low, key_high = np.uint64(key) & mask, np.uint64(key) >> half
    low, high = np.uint64(subsequence) & mask, np.uint64(subsequence) >> half
    start = np.uint64(group * _GROUP)
    for i in range(_GROUP):
        words[0, i] = (start + np.uint64(i)) & mask
        words[1, i] = (start + np.uint64(i)) >> half
        words[2, i] = low
        words[3, i] = high
    for _ in range(10):
        for i in range(_GROUP):
            one = words[0, i] * np.uint64(0xD2511F53)
            two = words[2, i] * np.uint64(0xCD9E8D57)
            words[0, i] = (two >> half) ^ words[1, i] ^ key_low
            words[1, i] = two & mask
            words[2, i] = (one >> half) ^ words[3, i] ^ key_high
            words[3, i] = one & mask
        key_low = (key_low + np.uint64(0x9E3779B9)) & mask
        key_high = (key_high + np.uint64(0xBB67AE85)) & mask


@kernel("iiiii", ordered=True)
def _uniforms(keys, offsets, out, batch, count):
    key, offset = vector(keys, batch, np.int64), vector(offsets, batch, np.int64)
    drawn = matrix(out, batch, count, np.float32)
    words = np.empty((4, _GROUP), np.uint64)
    scale, half = np.float32(_SCALE), np.float32(_SCALE / 2)
    for lane in range(batch):
        held = -1
        for i in range(count):
            block, word = (offset[lane] + i) >> 2, (offset[lane] + i) & 3
            group = block // _GROUP
            if group != held:
                _philox(key[lane], group, 0, words)
                held = group
            drawn[lane, i] = np.float32(words[word, block - group * _GROUP]) * scale + half


def uniforms(keys: Tensor, offsets: Tensor, count: int) -> Tensor:
    """As `philox.uniforms`."""
    keys, offsets = keys.contiguous(), offsets.contiguous()
    out = torch.empty((keys.shape[0], count))
    _uniforms(keys.data_ptr(), offsets.data_ptr(), out.data_ptr(), keys.shape[0], count)
    return out


@inner_ordered
def _winner(row, key, position, power, words):
    """The token whose p ** power (power >= 1) divided by its noise is largest, ties to the lowest
    id."""
    best, best_ratio = 0, -1.0
    size = row.shape[0]
    for group in range((size + 4 * _GROUP - 1) // (4 * _GROUP)):
        start = group * 4 * _GROUP
        end = min(start + 4 * _GROUP, size)
        highest = np.float32(0.0)
        for token in range(start, end):
            highest = max(highest, row[token])
        if highest <= 0.0:
            continue
        _philox(key, group, position + 1, words)
        for token in range(start, end):
            place = token - start
            if row[token] <= 0.0:
                continue
            uniform = (np.float64(words[place & 3, place >> 2]) + 0.5) * _SCALE
            weight = np.float64(row[token])
            if weight <= best_ratio * (1.0 - uniform):
                continue
            if power != 1.0:
                weight = weight**power
            ratio = weight / -np.log(uniform)
            if ratio > best_ratio:
                best, best_ratio = token, ratio
    return best


@kernel("iiiiiiif", ordered=True)
def _draw(probs, lanes, keys, first, out, batch, shape, power):
    """`shape` = rows of a lane * 2**32 + vocabulary."""
    width, vocabulary = shape >> 32, shape & 0xFFFFFFFF
    rows = matrix(probs, batch * width, vocabulary, np.float32)
    coupled = vector(lanes, batch, np.uint8)
    key, start = vector(keys, batch, np.int64), vector(first, batch, np.int64)
    tokens = vector(out, batch * width, np.int64)
    words = np.empty((4, _GROUP), np.uint64)
    for lane in range(batch):
        for place in range(width):
            row = lane * width + place
            tokens[row] = 0
            if coupled[lane]:
                tokens[row] = _winner(rows[row], key[lane], start[lane] + place, power, words)


def draw_rows(probs: Tensor, lanes: Tensor, keys: Tensor, first: Tensor, *, power: float) -> Tensor:
    """The draw of every row of the coupled lanes, 0 in the others.

    Args:
        probs: [B, W, V] float32.
        lanes: [B] bool; keys: [B] int64; first: [B] int64, position of each lane's row 0.
        power: exponent of the probabilities, at least 1.
    Returns:
        [B, W] int64.
    """
    batch, width, vocabulary = probs.shape
    probs = float_rows(probs, vocabulary)
    lanes, keys, first = lanes.contiguous(), keys.contiguous(), first.contiguous()
    out = torch.empty((batch, width), dtype=torch.int64)
    _draw(
        probs.data_ptr(),
        lanes.data_ptr(),
        keys.data_ptr(),
        first.data_ptr(),
        out.data_ptr(),
        batch,
        (width << 32) | vocabulary,
        power,
    )
    return out
