"""Recorded programs on CPU: a replay computes from new inputs what the function would."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from flare_ray.device.ops.lifetimes import Lifetime, assign_places
from flare_ray.device.ops.linear.api import Linear
from flare_ray.device.ops.replay import Pool, record, repeatable
from flare_ray.errors import ContractViolation

SIZE = 12


def checked(function, inputs, outputs):
    """Record on one set of values, replay on others, compare with the function itself."""
    function()
    recorded = record(function, Pool())
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for tensor in inputs:
            fresh = torch.randn(tensor.shape, generator=generator) * 3
            tensor.copy_(fresh.to(tensor.dtype))
        begun = [output.clone() for output in outputs]
        recorded.replay()
        replayed = [output.clone() for output in outputs]
        for output, value in zip(outputs, begun, strict=True):
            output.copy_(value)
        function()
        assert all(map(torch.equal, replayed, outputs))
    return recorded


def test_views_and_allocations_are_not_repeated():
    x, out = torch.randn(4, 6), torch.zeros(2, 6)

    def function():
        halves = x.view(2, 2, 6).transpose(0, 1).unbind(0)
        torch.add(halves[0], halves[1], out=out)

    assert len(checked(function, [x], [out]).calls) == 1


def test_what_follows_from_constants_alone_is_not_repeated():
    x, out = torch.randn(SIZE), torch.zeros(SIZE)

    def function():
        ramp = torch.arange(SIZE).to(torch.float32) * 2 + torch.ones(SIZE)
        out.copy_(x * ramp)

    assert len(checked(function, [x], [out]).calls) == 2


def test_a_constant_that_is_overwritten_starts_anew_each_time():
    x, out = torch.randn(SIZE), torch.zeros(SIZE)

    def function():
        total = torch.zeros(SIZE)
        total[3:].add_(x[3:])
        total[0] = 5.0
        out.add_(total)

    checked(function, [x], [out])


@pytest.mark.parametrize(
    "expression",
    [
        lambda x, i: torch.where(x > 0, x, -1.0),
        lambda x, i: torch.where(x > 0, 2.0, x.double()).float(),
        lambda x, i: ((i & 7) ^ (i >> 1) | 4).float(),
        lambda x, i: torch.topk(x, 3).values.repeat(SIZE // 3),
        lambda x, i: x.max(0).values + x.sort(stable=True).indices,
        lambda x, i: torch.nn.functional.layer_norm(x, (SIZE,)),
        lambda x, i: torch.isfinite(x / (i - 1)).float(),
        lambda x, i: x[i.clamp(0, SIZE - 1)].flip(0),
        lambda x, i: torch.nn.functional.pad(x, (0, 2))[2:].cumsum(0),
        lambda x, i: x.unsqueeze(1).expand(SIZE, 2).contiguous().sum(1),
        lambda x, i: torch.full_like(x, 3.0) * x.to(torch.bfloat16),
        lambda x, i: x.to(torch.float8_e4m3fn)[i.clamp(0, SIZE - 1)].float(),
        lambda x, i: 1 / torch.full_like(x, -0.0).mul_(x.abs()),
    ],
)
def test_operators_of_many_forms_are_repeated_bit_by_bit(expression):
    x, index, out = torch.randn(SIZE), torch.arange(SIZE), torch.zeros(SIZE)
    checked(lambda: out.copy_(expression(x, index)), [x, index], [out])


def test_compiled_kernels_are_repeated_at_the_places_their_tensors_moved_to():
    x, out = torch.randn(3, 20), torch.zeros(3, 70)
    first, second = Linear(torch.randn(30, 20)), Linear(torch.randn(70, 30))

    def function():
        out.copy_(second(torch.relu(first(x) * 2)))

    checked(function, [x], [out])


def test_a_result_survives_what_other_programs_do_in_the_pool():
    pool, x = Pool(), torch.randn(SIZE)

    @dataclasses.dataclass
    class Result:
        value: torch.Tensor

    def first():
        return Result((x + 1) * 2)

    def second():
        return (x.exp() - 1).cosh() * 3

    assert torch.equal(first().value, (x + 1) * 2)
    second()
    one, two = record(first, pool), record(second, pool)
    kept = one.replay()
    two.replay()
    assert torch.equal(kept.value, (x + 1) * 2)


def test_whole_calls_are_repeated_with_the_values_of_the_replay():
    x, out, calls = torch.randn(SIZE), torch.zeros(SIZE), []

    @repeatable
    def exchange(value):
        calls.append(1)
        return torch.stack([value, value * 2]).sum(0)

    checked(lambda: out.copy_(exchange(x + 1) * 2), [x], [out])
    assert len(calls) == 2 + 2 * 3


def test_a_program_that_reads_a_value_is_refused_and_the_next_one_recorded():
    x, out = torch.ones(SIZE), torch.zeros(SIZE)
    with pytest.raises(ContractViolation, match="reads a tensor's value"):
        record(lambda: out.copy_(x * x.sum().item()), Pool())
    checked(lambda: out.copy_(x * x.sum()), [x], [out])


def test_a_value_moves_to_where_a_dead_one_was():
    x, out = torch.randn(1000), torch.zeros(1000)

    def function():
        value = x
        for _ in range(20):
            value = value * 1.5
        out.copy_(value)

    function()
    pool = Pool()
    record(function, pool)
    assert pool.block(0).numel() <= 3 * 4 * 1024


@st.composite
def programs(draw):
    """Steps over a few vectors: new ones, writes into old ones, views of both."""
    steps = st.tuples(
        st.sampled_from(["add", "mul", "scale", "halve", "view", "zeros", "write"]),
        st.integers(0, 7),
        st.integers(0, 7),
    )
    return draw(st.lists(steps, min_size=1, max_size=25))


def run_program(steps, x, out):
    values = [x, x.flip(0)]
    for name, a, b in steps:
        left, right = values[a % len(values)], values[b % len(values)]
        if name == "write" and left is not x:
            left[: SIZE // 2].add_(right[SIZE // 2 :])
        elif name == "add":
            values.append(left + right)
        elif name == "mul":
            values.append(left * right.sigmoid())
        elif name == "scale":
            values.append(left * 0.5)
        elif name == "halve" and left is not x:
            left.mul_(0.5)
        elif name == "view":
            values.append(left.view(2, SIZE // 2).view(SIZE))
        elif name == "zeros":
            values.append(torch.zeros(SIZE))
    base = [value for value in values if value is not x]
    out.copy_(torch.stack(base).sum(0))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_random_programs_are_repeated_exactly(steps):
    x, out = torch.randn(SIZE), torch.zeros(SIZE)
    views_of_input = any(name == "view" for name, _, _ in steps)
    start = x.clone() if views_of_input else x
    checked(lambda: run_program(steps, start.clone(), out), [start], [out])


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 10)), max_size=40)
)
def test_values_that_live_at_once_never_overlap(drawn):
    values = {n: Lifetime(size, first, first + more) for n, (size, first, more) in enumerate(drawn)}
    places, needed = assign_places(values)
    for a, one in values.items():
        assert places[a] + one.size <= needed
        for b, other in values.items():
            if a < b and one.first <= other.last and other.first <= one.last:
                apart = places[a] + one.size <= places[b] or places[b] + other.size <= places[a]
                assert apart
