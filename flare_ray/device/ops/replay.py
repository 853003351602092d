"""A program on CPU recorded once and replayed: what a captured graph is on a GPU.

An eager round spends more time between operators than in them: Python, allocations, views. `record`
runs a function once and keeps every operator that computed something, with the very tensors it read
and wrote; `Recorded.replay` calls those again, in order. Views and allocations are not repeated,
since their results stay, nor is what follows from constants alone.

The conditions are those of capture (contract: G1, G4): inputs and state at fixed addresses, and no
branch, shape or Python value that depends on what a tensor holds. An operator without a form that
writes into a given tensor is called as it is and its result copied. Every form is compared with
the recorded result, bit by bit, before it is kept.

Values that die inside a program move into a pool that all programs share, as captured graphs do:
they run one after another. A place is used again as soon as its value is dead, which keeps the
round's values in the cache.

Compiled kernels and collectives do not pass torch's dispatcher; they report themselves (`notice`,
`repeatable`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flare_ray.device.ops.lifetimes import Lifetime, assign_places
from flare_ray.errors import ContractViolation

T = TypeVar("T")

_ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
_READ_SHAPES_ONLY = {
    "full_like",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "zeros_like",
}
"""Operators with a tensor argument whose elements do not matter."""
_COPIES = {"_to_copy", "clone", "contiguous", "to"}
_PUBLIC_NAMES = {
    "__and__": "bitwise_and",
    "__lshift__": "bitwise_left_shift",
    "__or__": "bitwise_or",
    "__rshift__": "bitwise_right_shift",
    "__xor__": "bitwise_xor",
}
"""What Python's operators are called in torch's own module."""

_PLAIN = (int, float, str, torch.dtype, torch.device, type(None))
"""Arguments that hold no tensor, most of them."""

_active = threading.local()


@dataclasses.dataclass(slots=True)
class _Step:
    """One operator or kernel.

    Attributes:
        call: repeats it.
        reads / writes: storages by address; of a kernel every one that an argument points into.
        fresh: its outputs were allocated by it, so that it may be left out if they are constant.
        kernel: its arguments are numbers, addresses among them.
    """

    call: functools.partial[Any]
    reads: frozenset[int]
    writes: frozenset[int]
    fresh: bool = False
    kernel: bool = False


class Pool:
    """Memory that recordings share. A larger one replaces it for later recordings; the old one
    lives as long as those made in it."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def block(self, num_bytes: int) -> Tensor:
        """[>= num_bytes] uint8."""
        if self._block.numel() < num_bytes:
            self._block = torch.empty(num_bytes, dtype=torch.uint8)
        return self._block


@dataclasses.dataclass(slots=True, frozen=True)
class Recorded(Generic[T]):
    """What `record` kept.

    Attributes:
        result: what the function returned; its tensors hold each replay's values.
        calls: operators and kernels of one replay.
    """

    result: T
    calls: tuple[Callable[[], object], ...]

    def replay(self) -> T:
        """Repeat everything, in the mode (inference) that was on when it was recorded."""
        for call in self.calls:
            call()
        return self.result


def record(function: Callable[[], T], pool: Pool) -> Recorded[T]:
    """Run a function and keep what it did.

    Args:
        function: takes its inputs from, and leaves its outputs in, tensors at fixed addresses. It
            has run before: what it caches on its first run must not end up in the pool.
        pool: where values that are dead at its end go.
    Raises:
        ContractViolation: it reads a tensor's value.
    """
    recorder = _Recorder()
    _active.recorder = recorder
    try:
        with recorder:
            result = function()
    finally:
        _active.recorder = None
    steps = recorder.remaining_steps()
    recorder.move_into(pool, steps, staying=_storages(_parts(result)))
    return Recorded(result, tuple(step.call for step in steps))


def notice(kernel: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """A compiled kernel was called with these numbers; keep it where a recording is being made."""
    recorder = getattr(_active, "recorder", None)
    if recorder is not None:
        recorder.add_kernel(kernel, arguments)


def repeatable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of tensors whose result is one tensor, repeated as a whole: a collective, which
    meets other ranks besides."""

    @functools.wraps(function)
    def call(*args: object) -> Tensor:
        recorder = getattr(_active, "recorder", None)
        if recorder is None:
            return function(*args)
        _active.recorder = None
        try:
            with _disable_current_modes():
                result = function(*args)
        finally:
            _active.recorder = recorder
        recorder.add_whole(function, args, result)
        return result

    return call


def _parts(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results: in sequences, mappings and records."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Tensor):
                yield item
            elif not isinstance(item, _PLAIN):
                yield from _parts(item)
    elif isinstance(value, dict):
        yield from _parts(tuple(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _parts(tuple(getattr(value, f.name) for f in dataclasses.fields(value)))


def _storage(tensor: Tensor) -> int:
    """Address of a tensor's memory, 0 if it has none."""
    return tensor.untyped_storage().data_ptr()


def _storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(_storage(tensor) for tensor in tensors) - {0}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one type and shape hold the same bytes, NaN included."""
    if a.dtype.is_floating_point:
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.view(whole), b.view(whole)
    return torch.equal(a, b)


class _Recorder(TorchDispatchMode):
    """Sees every operator below autograd and composite ones.

    Attributes:
        steps: in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self._seen: list[Tensor] = []
        self._sizes: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and being skipped imports the compiler, seconds of a
        start, and costs each operator a detour."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise ContractViolation(
                f"a program that is recorded reads a tensor's value ({func}), which a replay would "
                "not do again; decide on the device, or by what the host knows"
            )
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        inputs, results = _storages(_parts((args, kwargs))), tuple(_parts(result))
        outputs = _storages(results)
        # Every tensor stays alive while recording, so no address is given to a second one.
        self._seen += results
        if func._schema.is_mutable:
            call = functools.partial(_mutating(func, name), *args, **kwargs)
            self.steps.append(_Step(call, inputs, inputs | outputs))
        elif outputs and not outputs & inputs:
            self._made(results)
            if name not in _ALLOCATIONS:
                reads = frozenset() if name in _READ_SHAPES_ONLY else inputs
                call = _writing(func, name, (args, kwargs), results, constant=not reads)
                self.steps.append(_Step(call, reads, outputs, fresh=True))
        return result

    def add_kernel(self, kernel: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Note a compiled kernel; `remaining_steps` finds out where its addresses point."""
        call = functools.partial(kernel, *arguments)
        self.steps.append(_Step(call, frozenset(), frozenset(), kernel=True))

    def add_whole(
        self, function: Callable[..., Tensor], args: tuple[object, ...], result: Tensor
    ) -> None:
        """Note a call that passes the dispatcher by, and its result."""
        inputs = _storages(_parts(args))
        if _storage(result) not in inputs:
            self._made((result,))
        self._seen.append(result)
        places = inputs | _storages((result,))
        call = functools.partial(_repeat, functools.partial(function, *args), result)
        self.steps.append(_Step(call, places, places))

    def _made(self, results: Iterable[Tensor]) -> None:
        for tensor in results:
            self._sizes[_storage(tensor)] = tensor.untyped_storage().nbytes()
        self._sizes.pop(0, None)

    def remaining_steps(self) -> list[_Step]:
        """Steps without those whose every input is constant and whose output nobody overwrites."""
        starts = sorted(self._sizes)
        for step in self.steps:
            if step.kernel:
                pointed = (self._pointed_at(value, starts) for value in step.call.args)
                step.reads = step.writes = frozenset(p for p in pointed if p is not None)
        changed = {place for step in self.steps if not step.fresh for place in step.writes}
        constant: set[int] = set()
        remaining = []
        for step in self.steps:
            if step.fresh and step.reads <= constant and not step.writes & changed:
                constant |= step.writes
            else:
                remaining.append(step)
        for place in constant:
            del self._sizes[place]
        return remaining

    def _pointed_at(self, value: Any, starts: list[int]) -> int | None:
        """The one of the storages at ascending `starts` that a kernel's argument points into."""
        if isinstance(value, int) and (place := bisect.bisect_right(starts, value)):
            start = starts[place - 1]
            if value < start + self._sizes[start]:
                return start
        return None

    def move_into(self, pool: Pool, steps: list[_Step], *, staying: frozenset[int]) -> None:
        """Give every value that dies inside a place in the pool, in tensors and addresses alike."""
        uses: dict[int, list[int]] = {}
        for number, step in enumerate(steps):
            for place in (step.reads | step.writes) & self._sizes.keys() - staying:
                uses.setdefault(place, []).append(number)
        lifetimes = {p: Lifetime(self._sizes[p], when[0], when[-1]) for p, when in uses.items()}
        places, needed = assign_places(lifetimes)
        block = pool.block(needed)
        starts = sorted(lifetimes)
        for step in steps:
            if step.kernel:
                base, arguments = block.data_ptr(), step.call.args
                moved = (self._moved(value, starts, places, base) for value in arguments)
                step.call = functools.partial(step.call.func, *moved)
        home = block.untyped_storage()
        for tensor in {id(t): t for t in self._seen}.values():
            offset = places.get(_storage(tensor))
            if offset is not None:
                first = offset // tensor.element_size() + tensor.storage_offset()
                tensor.set_(home, first, tensor.shape, tensor.stride())

    def _moved(self, value: Any, starts: list[int], places: Any, base: int) -> Any:
        """A kernel's argument, with an address in a moved storage moved along."""
        start = self._pointed_at(value, starts)
        return value if start is None else base + places[start] + value - start


def _repeat(call: Callable[[], Tensor], result: Tensor) -> None:
    value = call()
    if value is not result:
        result.copy_(value)


def _mutating(func: Any, name: str) -> Callable[..., object]:
    """The shortest way to call an operator that writes into its arguments: torch's own bindings
    parse arguments several times faster than `torch.ops`."""
    if func._schema.overload_name.endswith("out"):
        return getattr(torch, name, func)
    if not name.endswith("_"):
        return func
    return getattr(Tensor, name, None) or getattr(torch._C._nn, name, func)


def _writing(
    func: Any, name: str, given: tuple[Any, Any], results: tuple[Tensor, ...], *, constant: bool
) -> functools.partial[Any]:
    """A call that computes an operator again, into `results`."""
    args, kwargs = given
    if constant:
        value = results[0].clone()
        if _same_bits(value, torch.zeros_like(value)):
            return functools.partial(Tensor.zero_, results[0])
        return functools.partial(Tensor.copy_, results[0], value)
    if name in _COPIES:
        return functools.partial(Tensor.copy_, results[0], args[0])
    if name == "where":  # takes `out` only where nothing is a number
        args = tuple(a if isinstance(a, Tensor) else results[0].new_tensor(a) for a in args)
    wanted = [result.clone() for result in results]
    out: Any = results[0] if len(results) == 1 else results
    for form in _forms(func, name):
        call = functools.partial(form, *args, **kwargs, out=out)
        try:
            call()
        except (TypeError, RuntimeError):
            continue
        if all(map(_same_bits, results, wanted)):
            return call
    for result, value in zip(results, wanted, strict=True):
        result.copy_(value)
    return functools.partial(_call_and_copy, functools.partial(func, *args, **kwargs), results)


def _forms(func: Any, name: str) -> Iterator[Callable[..., object]]:
    """Forms of an operator that may take `out`, fastest first."""
    if name == "index":
        yield _indexed
    public = getattr(torch, _PUBLIC_NAMES.get(name, name), None)
    if public is not None:
        yield public
    packet = func.overloadpacket
    for overload in packet.overloads():
        if overload.endswith("out"):
            yield getattr(packet, overload)


def _indexed(values: Tensor, places: list[Tensor | None], *, out: Tensor) -> None:
    """`values[places]`: `torch.ops` takes ten times as long to read a list of tensors."""
    out.copy_(values[tuple(slice(None) if place is None else place for place in places)])


def _call_and_copy(call: Callable[[], Any], results: tuple[Tensor, ...]) -> None:
    for result, value in zip(results, _parts(call()), strict=True):
        result.copy_(value)
