"""Products of float32 rows on CPU by a constant matrix stored in panels.

A panel holds 64 of the matrix's rows side by side, input by input: [k, 64]. One step of the
micro-kernel reads 64 numbers of one input, widens them, and adds their multiples to the sums of up
to six rows, which stay in registers: 24 of 32 at 512 bits. So a matrix streams through the core
once per six rows, one row is bound by reading it and six by arithmetic, and no sum runs across a
register (Goto and van de Geijn, 2008, name the parts).

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

PANEL = 64
"""Matrix rows of a panel."""
MOST_ROWS = 6
"""Rows whose sums fit the registers beside four vectors of a panel."""
_LANES = 16
_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _SHORTS, _INTS = (ir.VectorType(kind, _LANES) for kind in (_FLOAT, _INT16, _INT32))


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


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_INT64, value)


def _widened(builder: ir.IRBuilder, source: Any, *, narrow: bool) -> Any:
    """Sixteen stored numbers as floats."""
    kind = _SHORTS if narrow else _FLOATS
    values = builder.load(builder.bitcast(source, kind.as_pointer()), align=4)
    if not narrow:
        return values
    shift = ir.Constant(_INTS, [ir.Constant(_INT32, 16)] * _LANES)
    return builder.bitcast(builder.shl(builder.zext(values, _INTS), shift), _FLOATS)


def _spread(builder: ir.IRBuilder, source: Any) -> Any:
    """One float in all places of a vector."""
    none, first = ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INT32, 0)
    vector = builder.insert_element(none, builder.load(source), first)
    return builder.shuffle_vector(vector, none, ir.Constant(_INTS, [first] * _LANES))


def _emit(builder: ir.IRBuilder, args: tuple[Any, ...], rows: int, *, narrow: bool) -> None:
    """out [rows, 64] = x [rows, depth] times one panel; out_stride in elements."""
    x, panel, out, depth, out_stride = args
    parts = PANEL // _LANES
    kind = _INT16 if narrow else _FLOAT

    def row_of(address: Any, stride: Any, row: int) -> Any:
        offset = builder.mul(_constant(4 * row), stride)
        return builder.inttoptr(builder.add(address, offset), _FLOAT.as_pointer())

    inputs = [row_of(x, depth, row) for row in range(rows)]
    base = builder.inttoptr(panel, kind.as_pointer())
    entry = builder.block
    loop, after = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(_INT64)
    step.add_incoming(_constant(0), entry)
    zero = ir.Constant(_FLOATS, [ir.Constant(_FLOAT, 0.0)] * _LANES)
    before = [[builder.phi(_FLOATS) for _ in range(parts)] for _ in range(rows)]
    line = builder.gep(base, [builder.mul(step, _constant(PANEL))])
    columns = [
        _widened(builder, builder.gep(line, [_constant(_LANES * part)]), narrow=narrow)
        for part in range(parts)
    ]
    flags = ("contract",)  # one fused operation where the core has it
    sums = []
    for row in range(rows):
        value = _spread(builder, builder.gep(inputs[row], [step]))
        terms = [builder.fmul(value, column, flags=flags) for column in columns]
        pairs = zip(before[row], terms, strict=True)
        sums.append([builder.fadd(held, term, flags=flags) for held, term in pairs])
    following = builder.add(step, _constant(1))
    step.add_incoming(following, loop)
    for held, added in zip(before, sums, strict=True):
        for phi, value in zip(held, added, strict=True):
            phi.add_incoming(zero, entry)
            phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    builder.position_at_end(after)
    for row in range(rows):
        target = row_of(out, out_stride, row)
        for part, value in enumerate(sums[row]):
            place = builder.gep(target, [_constant(_LANES * part)])
            builder.store(value, builder.bitcast(place, _FLOATS.as_pointer()), align=4)


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
