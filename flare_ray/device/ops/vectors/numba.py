"""Vectors of sixteen floats in registers: what intrinsics of CPU kernels are written with.

numba keeps the sums of an inner loop in memory where they are elements of an array; written as
LLVM vectors they stay in registers over the whole loop. A vector is two of the core's where those
have 256 bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flare_ray.device.ops.numba import inner_ordered

LANES = 16
FLOAT, INT16, INT32, INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, SHORTS, INTS = (ir.VectorType(kind, LANES) for kind in (FLOAT, INT16, INT32))


def _held_vectors() -> int:
    """Vectors of `LANES` floats that this core's registers hold together."""
    if platform.machine() in ("aarch64", "arm64"):
        return 8
    features = llvmlite.binding.get_host_cpu_features()
    return 32 if features.get("avx512f") else 8 if features.get("avx2") else 4


HELD = _held_vectors()
"""What a loop carries beyond this goes to memory and back in every pass: with 16 registers of 256
bits, sums made for 32 of 512 bits cost three times the arithmetic."""
FUSED = ("contract",)
"""One fused multiply-add where the core has it."""


def constant(value: int) -> ir.Constant:
    """A 64-bit number."""
    return ir.Constant(INT64, value)


def zeros() -> ir.Constant:
    """A vector of zeros."""
    return ir.Constant(FLOATS, [ir.Constant(FLOAT, 0.0)] * LANES)


def pointer(builder: ir.IRBuilder, address: Any, kind: Any = FLOAT) -> Any:
    """A pointer to elements at an integer address."""
    return builder.inttoptr(address, kind.as_pointer())


def spread(builder: ir.IRBuilder, number: Any) -> Any:
    """One float in all places of a vector."""
    none, first = ir.Constant(FLOATS, ir.Undefined), ir.Constant(INT32, 0)
    vector = builder.insert_element(none, number, first)
    return builder.shuffle_vector(vector, none, ir.Constant(INTS, [first] * LANES))


def load(builder: ir.IRBuilder, source: Any, index: Any) -> Any:
    """The vector that begins at element `index` of floats."""
    place = builder.gep(source, [index])
    return builder.load(builder.bitcast(place, FLOATS.as_pointer()), align=4)


def store(builder: ir.IRBuilder, value: Any, target: Any, index: Any) -> None:
    """Write a vector where element `index` begins."""
    place = builder.gep(target, [index])
    builder.store(value, builder.bitcast(place, FLOATS.as_pointer()), align=4)


def store_past(builder: ir.IRBuilder, value: Any, target: Any, index: Any) -> None:
    """As `store` to a whole cache line, past the caches: for what is not read again soon."""
    place = builder.gep(target, [index])
    stored = builder.store(value, builder.bitcast(place, FLOATS.as_pointer()), align=64)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(INT32, 1)]))


def added_product(builder: ir.IRBuilder, total: Any, a: Any, b: Any) -> Any:
    """total + a * b."""
    return builder.fadd(total, builder.fmul(a, b, flags=FUSED), flags=FUSED)


def fetch(builder: ir.IRBuilder, place: Any) -> None:
    """Ask for a cache line that will be read soon; a pointer to anywhere, which is not read."""
    kinds = [ir.IntType(8).as_pointer(), INT32, INT32, INT32]
    name = "llvm.prefetch.p0i8"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
    # To read, into the second cache, as data.
    hints = [ir.Constant(INT32, number) for number in (0, 2, 1)]
    builder.call(function, [builder.bitcast(place, kinds[0]), *hints])


def added_up(builder: ir.IRBuilder, values: Any) -> Any:
    """The sum of a vector's floats, halves upon halves."""
    width = LANES
    while width > 1:
        width //= 2
        none = ir.Constant(values.type, ir.Undefined)
        halves = []
        for first in (0, width):
            places = [ir.Constant(INT32, first + lane) for lane in range(width)]
            chosen = ir.Constant(ir.VectorType(INT32, width), places)
            halves.append(builder.shuffle_vector(values, none, chosen))
        values = builder.fadd(*halves)
    return builder.extract_element(values, ir.Constant(INT32, 0))


def loop(
    builder: ir.IRBuilder,
    count: Any,
    starts: Sequence[Any],
    body: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Emit a loop over 0 .. count - 1 (at least one pass) that carries values in registers.

    Args:
        starts: the values before the first pass.
        body: emits one pass from its number and the values, and returns the new ones.
    Returns:
        The values after the last pass.
    """
    entry = builder.block
    inside, after = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(inside)
    builder.position_at_end(inside)
    step = builder.phi(INT64)
    step.add_incoming(constant(0), entry)
    carried = []
    for start in starts:
        carried.append(builder.phi(start.type))
        carried[-1].add_incoming(start, entry)
    results = list(body(step, carried))
    following = builder.add(step, constant(1))
    last = builder.block
    step.add_incoming(following, last)
    for phi, result in zip(carried, results, strict=True):
        phi.add_incoming(result, last)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    return results


DOTS = 4
"""Lines that `dots` multiplies together."""


@intrinsic
def _dots(_context, line, others, out, dim, stride):
    """See `dots`."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        line, others, out, dim, stride = args
        one, results = pointer(builder, line), pointer(builder, out)
        lines = [
            pointer(builder, builder.add(others, builder.mul(stride, constant(4 * number))))
            for number in range(DOTS)
        ]

        def add_part(step: Any, sums: list[Any]) -> list[Any]:
            place = builder.mul(step, constant(LANES))
            value = load(builder, one, place)
            return [
                added_product(builder, total, value, load(builder, other, place))
                for total, other in zip(sums, lines, strict=True)
            ]

        parts = builder.sdiv(dim, constant(LANES))
        for number, total in enumerate(loop(builder, parts, [zeros()] * DOTS, add_part)):
            builder.store(added_up(builder, total), builder.gep(results, [constant(number)]))
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), emit


dots: Any = _dots
"""out [DOTS] = products of one line [dim] with DOTS others; for kernels: addresses of the line, of
the first other and of out, dim (a multiple of LANES), floats between the others."""


@intrinsic
def _as_float(_context, bits):
    """The float32 with these bits."""

    def emit(_inside: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), emit


_float_of: Any = _as_float


@inner_ordered
def exponential(x):
    """exp of a float32 within 2e-7 of itself; a loop over elements becomes vectors, which libm's
    does not. x is cut to [-87, 88], where results stay normal numbers.

    Source: the reduction to |r| <= ln(2) / 2 and the polynomial of Cephes' expf (Moshier).
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - power * np.float32(0.693359375) - power * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    return y * _float_of(np.int32(np.int32(power) + np.int32(127)) << np.int32(23))


@inner_ordered
def sigmoid(x):
    """1 / (1 + exp(-x)) of a float32."""
    return np.float32(1.0) / (np.float32(1.0) + exponential(-x))
