"""Products of float32 rows on CPU by a constant matrix stored in panels.

A panel holds 64 of the matrix's rows side by side, input by input: [k, 64]. One step of the
micro-kernel reads 64 numbers of one input, widens them, and adds their multiples to the sums of up
to six rows, which stay in registers: 24 of 32 at 512 bits. So a matrix streams through the core
once per six rows, one row is bound by reading it and six by arithmetic, and no sum runs across a
register (Goto and van de Geijn, 2008, name the parts). A core of fewer registers passes a panel
several times, with as many of its columns as its registers have room for. Meanwhile a panel of
bfloat16 asks for the next one, which lies behind it: prefetchers that see a cache line in two come
too late. In float32 every pass reads all of its lines, and asking gained nothing.

Checkpoints store bfloat16. A matrix whose every element is one stays one, at half the bytes, and
is widened in registers: the arithmetic is that of a float32 product. Every output is summed input
by input, whatever rows stand beside it: its bits do not depend on how rows were grouped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from flare_ray.device.ops.numba import inner, matrix
from flare_ray.device.ops.vectors.numba import (
    FLOAT,
    FLOATS,
    HELD,
    INT16,
    INT32,
    INTS,
    LANES,
    SHORTS,
    added_product,
    constant,
    fetch,
    loop,
    pointer,
    spread,
    store,
    zeros,
)

PANEL = 64
"""Matrix rows of a panel."""
CACHE_LINE = 64
"""Bytes."""
MOST_ROWS = 6
"""Rows whose sums fit the registers beside four vectors of a panel."""


def packed(weight: Tensor, *, narrow: bool) -> Tensor:
    """[..., n, k] float32 -> its panels [..., ceil(n / 64), k, 64], the last one filled with zeros.

    Args:
        narrow: to bfloat16, which must be exact (`narrows`).
    """
    *outer, rows, depth = weight.shape
    count = -(-rows // PANEL)
    kind = torch.bfloat16 if narrow else torch.float32
    panels = torch.zeros((*outer, count * PANEL, depth), dtype=kind, device=weight.device)
    panels[..., :rows, :] = weight
    return panels.unflatten(-2, (count, PANEL)).transpose(-1, -2).contiguous()


def narrows(*weights: Tensor) -> bool:
    """Whether every element is a bfloat16."""
    return all(torch.equal(w.to(torch.bfloat16).to(torch.float32), w) for w in weights)


def _widened(builder: ir.IRBuilder, source: Any, *, narrow: bool) -> Any:
    """Sixteen stored numbers as floats."""
    kind = SHORTS if narrow else FLOATS
    values = builder.load(builder.bitcast(source, kind.as_pointer()), align=4)
    if not narrow:
        return values
    shift = ir.Constant(INTS, [ir.Constant(INT32, 16)] * LANES)
    return builder.bitcast(builder.shl(builder.zext(values, INTS), shift), FLOATS)


def _together(rows: int) -> int:
    """Vectors of a line whose sums for so many rows fit the registers, beside one of the panel's
    and a spread number."""
    parts = PANEL // LANES
    while parts > 1 and rows * parts + 2 > HELD:
        parts //= 2
    return parts


def _emit(builder: ir.IRBuilder, args: tuple[Any, ...], rows: int, *, narrow: bool) -> None:
    """out [rows, 64] = x [rows, depth] times one panel; out_stride in elements."""
    x, panel, out, depth, out_stride = args
    parts = _together(rows)

    def row_of(address: Any, stride: Any, row: int) -> Any:
        offset = builder.mul(constant(4 * row), stride)
        return pointer(builder, builder.add(address, offset))

    inputs = [row_of(x, depth, row) for row in range(rows)]
    base = pointer(builder, panel, INT16 if narrow else FLOAT)
    following = builder.mul(depth, constant(PANEL))
    for first in range(0, PANEL, LANES * parts):

        def add_input(step: Any, sums: list[Any], first: int = first) -> list[Any]:
            place = builder.mul(step, constant(PANEL))
            line = builder.gep(base, [builder.add(place, constant(first))])
            if narrow:
                begins = range(first, first + LANES * parts, LANES)
                for begin in (begin for begin in begins if begin % (CACHE_LINE // 2) == 0):
                    offset = builder.add(following, constant(begin))
                    fetch(builder, builder.gep(base, [builder.add(place, offset)]))
            columns = [
                _widened(builder, builder.gep(line, [constant(LANES * part)]), narrow=narrow)
                for part in range(parts)
            ]
            results = []
            for row in range(rows):
                value = spread(builder, builder.load(builder.gep(inputs[row], [step])))
                held = sums[row * parts : (row + 1) * parts]
                pairs = zip(held, columns, strict=True)
                results += [added_product(builder, total, value, column) for total, column in pairs]
            return results

        sums = loop(builder, depth, [zeros()] * (rows * parts), add_input)
        for row in range(rows):
            target = row_of(out, out_stride, row)
            for part in range(parts):
                place = constant(first + LANES * part)
                store(builder, sums[row * parts + part], target, place)


def _micro_kernel(rows: int, *, narrow: bool) -> Any:
    """The micro-kernel of so many rows: addresses of x, panel, out; depth; out's stride."""

    @intrinsic
    def kernel(_context, x, panel, out, depth, out_stride):
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _emit(builder, args, rows, narrow=narrow)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 5)), emit

    return kernel


def _product(*, narrow: bool) -> Callable[..., None]:
    """See `product`."""
    one, two, three, four, five, six = (_micro_kernel(r, narrow=narrow) for r in range(1, 7))
    element_bytes = 2 if narrow else 4

    @inner
    def block(x, panel, out, depth, out_stride, rows):
        if rows == 1:
            one(x, panel, out, depth, out_stride)
        elif rows == 2:
            two(x, panel, out, depth, out_stride)
        elif rows == 3:
            three(x, panel, out, depth, out_stride)
        elif rows == 4:
            four(x, panel, out, depth, out_stride)
        elif rows == 5:
            five(x, panel, out, depth, out_stride)
        else:
            six(x, panel, out, depth, out_stride)

    @inner
    def run(x, panels, out, rows, columns, depth):
        whole = columns // PANEL
        rest = columns - whole * PANEL
        panel_bytes = depth * PANEL * element_bytes
        spare = np.empty((MOST_ROWS, PANEL), np.float32)
        for panel in range(whole + (rest > 0)):
            source = panels + panel * panel_bytes
            row = 0
            while row < rows:
                left = rows - row
                # Seven and eight rows: two even blocks are faster than six and a rest.
                count = (left + 1) // 2 if MOST_ROWS < left <= 8 else min(left, MOST_ROWS)
                inputs = x + row * depth * 4
                if panel < whole:
                    target = out + (row * columns + panel * PANEL) * 4
                    block(inputs, source, target, depth, columns, count)
                else:
                    block(inputs, source, spare.ctypes.data, depth, PANEL, count)
                    lines = matrix(out, rows, columns, np.float32)
                    for i in range(count):
                        for j in range(rest):
                            lines[row + i, whole * PANEL + j] = spare[i, j]
                row += count

    return run


product_narrow: Any = _product(narrow=True)
"""out [rows, columns] float32 = x [rows, depth] float32 times panels [.., depth, 64] bfloat16; for
kernels: addresses of x, panels and out, then rows, columns, depth. All rows are contiguous."""
product_wide: Any = _product(narrow=False)
"""As `product_narrow`, panels in float32."""
