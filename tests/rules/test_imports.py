"""Who may import whom: the five lines of rooms, and where ray, torch and kernels may appear.

The rooms and their order are described in the README's tree. Imports inside functions count as much
as those at the top: laziness changes when a dependency loads, not whether it exists.
"""

import ast
from pathlib import PurePosixPath

import pytest

from tests.rules.sources import (
    PACKAGE,
    Import,
    Source,
    Violation,
    dotted_name,
    is_within,
    python_sources,
    report,
)

# Longest matching prefix wins. A lower line never imports a higher one.
LINE_OF_ROOM = {
    "flare_ray": 5,
    "flare_ray._version": 1,
    "flare_ray.contracts": 1,
    "flare_ray.config": 1,
    "flare_ray.metrics": 1,
    "flare_ray.rng": 1,
    "flare_ray.errors": 1,
    "flare_ray.recipes": 2,
    "flare_ray.recipes.declaration": 1,
    "flare_ray.controller": 2,
    "flare_ray.device": 2,
    "flare_ray.actors": 3,
    "flare_ray.frontend": 4,
    "flare_ray.cli": 5,
    "flare_ray.workload": 5,
}
# Rooms of one line that must not know each other.
FORBIDDEN_PAIRS = (
    ("flare_ray.controller", "flare_ray.device"),
    ("flare_ray.controller", "flare_ray.recipes"),
    ("flare_ray.device", "flare_ray.controller"),
    ("flare_ray.device", "flare_ray.recipes"),
    ("flare_ray.recipes", "flare_ray.controller"),
    ("flare_ray.workload", "flare_ray.cli"),
)
# The registry names families, which are data; preparation asks it for one by name.
ALWAYS_ALLOWED = ("flare_ray.recipes.declaration", "flare_ray.recipes.registry")
# Inside the device room: ahead -> prepare -> parts -> executor -> graphs -> speculation ->
# everything else, never the reverse.
DEVICE_ORDER = (
    "flare_ray.device.speculation",
    "flare_ray.device.graphs",
    "flare_ray.device.executor",
    "flare_ray.device.parts",
    "flare_ray.device.prepare",
    "flare_ray.device.ahead",
)

HOST_ROOMS = (
    "flare_ray.contracts",
    "flare_ray.config",
    "flare_ray.controller",
    "flare_ray.metrics",
    "flare_ray.rng",
    "flare_ray.errors",
    "flare_ray.recipes.declaration",
    "flare_ray.workload",
)
RAY_ROOMS = (
    "flare_ray.actors",
    "flare_ray.frontend.app",
    "flare_ray.frontend.ingress",
    "flare_ray.frontend.router",
    "flare_ray.metrics.export",
)
COLLECTIVE_ROOMS = ("flare_ray.device.parallel",)
KERNEL_LIBRARIES = ("flashinfer", "fla", "triton", "numba", "xgrammar")
KERNEL_ROOMS = ("flare_ray.device.ops", "flare_ray.device.sampling", "flare_ray.actors.grammar")
# Files that are a library's adapter: they import it at the top and are themselves imported on use.
ADAPTER_FILES = {"flashinfer.py", "fla.py", "triton.py", "numba.py", "xgrammar.py"}
HEAVY = ("torch", "ray", "transformers", *KERNEL_LIBRARIES)


def room_of(target: str) -> str | None:
    """The longest room prefix of a dotted name inside the package."""
    rooms = [room for room in LINE_OF_ROOM if is_within(target, room)]
    return max(rooms, key=len) if rooms else None


def check_layers(source: Source) -> list[Violation]:
    own = room_of(source.module)
    if own is None or (own == PACKAGE and source.module != PACKAGE):
        return [Violation(source.path, 1, f"{source.module} is in no room of LINE_OF_ROOM")]
    found = []
    for imported in source.imports:
        other = room_of(imported.target)
        if other is None or other == own:
            continue
        if LINE_OF_ROOM[other] > LINE_OF_ROOM[own]:
            reason = f"line {LINE_OF_ROOM[own]} imports line {LINE_OF_ROOM[other]}"
        elif any(is_within(imported.target, room) for room in ALWAYS_ALLOWED):
            continue
        elif any(is_within(own, a) and is_within(other, b) for a, b in FORBIDDEN_PAIRS):
            reason = f"{own} may not know {other}"
        else:
            continue
        found.append(Violation(source.path, imported.line, f"{reason} ({imported.target})"))
    return found


def check_device_order(source: Source) -> list[Violation]:
    if not is_within(source.module, "flare_ray.device"):
        return []
    rank = _device_rank(source.module)
    return [
        Violation(source.path, i.line, f"{i.target} stands above {source.module} in the device")
        for i in source.imports
        if is_within(i.target, "flare_ray.device") and _device_rank(i.target) > rank
    ]


def _device_rank(module: str) -> int:
    return max(
        (rank for rank, room in enumerate(DEVICE_ORDER, start=1) if is_within(module, room)),
        default=0,
    )


def check_family_isolation(source: Source) -> list[Violation]:
    """A recipe folder imports no other recipe folder, and only the registry names them."""
    family = _family_folder(source.module)
    found = []
    for imported in source.imports:
        other = _family_folder(imported.target)
        if other is None or other == family or source.module == "flare_ray.recipes.registry":
            continue
        if LINE_OF_ROOM[room_of(source.module) or PACKAGE] >= 3 or family is not None:
            found.append(
                Violation(source.path, imported.line, f"{imported.target}: ask the registry")
            )
    return found


def _family_folder(module: str) -> str | None:
    parts = module.split(".")
    if parts[:2] != ["flare_ray", "recipes"] or len(parts) < 3:
        return None
    common = {"declaration", "fields", "packed", "reading", "registry", "tables"}
    return None if parts[2] in common else parts[2]


def check_library(
    source: Source, *, library: str, rooms: tuple[str, ...], types_allowed: bool = True
) -> list[Violation]:
    """``library`` is imported or spelled out (``torch.distributed.x``) only inside ``rooms``."""
    if any(is_within(source.module, room) for room in rooms):
        return []
    lines = [
        i.line
        for i in source.imports
        if is_within(i.target, library) and not (types_allowed and i.for_types_only)
    ]
    if "." in library:
        lines += [
            node.lineno
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute) and dotted_name(node) == library
        ]
    where = ", ".join(rooms) or "nowhere in the package"
    return [Violation(source.path, n, f"{library} belongs in: {where}") for n in sorted(set(lines))]


def check_host_room(source: Source) -> list[Violation]:
    if not any(is_within(source.module, room) for room in HOST_ROOMS):
        return []
    allowed = {"ray"} if any(is_within(source.module, room) for room in RAY_ROOMS) else set()
    return [
        Violation(source.path, i.line, f"host room imports {i.target}")
        for i in source.imports
        for library in HEAVY
        if is_within(i.target, library) and library not in allowed and not i.for_types_only
    ]


def check_kernels_lazy(source: Source) -> list[Violation]:
    """Only an adapter file imports a kernel library at its top, and nobody imports it at theirs."""
    if PurePosixPath(source.path).name in ADAPTER_FILES:
        return []
    found = []
    for i in source.imports:
        if not i.at_module_level or i.for_types_only:
            continue
        parts = i.target.split(".")
        adapter = is_within(i.target, "flare_ray.device") and any(
            f"{part}.py" in ADAPTER_FILES for part in parts
        )
        if adapter or parts[0] in KERNEL_LIBRARIES:
            found.append(Violation(source.path, i.line, f"{i.target} is imported before its use"))
    return found


def load_closure(sources: dict[str, Source], start: str) -> dict[str, Import]:
    """External top-level names that importing ``start`` loads, each with one responsible import."""
    seen: set[str] = set()
    external: dict[str, Import] = {}
    queue = [start]
    while queue:
        name = queue.pop()
        if name in seen or name not in sources:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        queue.append(parent)
        for imported in sources[name].imports:
            if not imported.at_module_level or imported.for_types_only:
                continue
            if is_within(imported.target, PACKAGE):
                queue += [imported.target, imported.target.rpartition(".")[0]]
            else:
                external.setdefault(imported.target.split(".")[0], imported)
    return external


def check_light_import(
    sources: tuple[Source, ...], starts: list[str], heavy: tuple[str, ...]
) -> list[Violation]:
    """Importing a host room or a recipe's declaration loads no heavy library, even indirectly."""
    by_name = {source.module: source for source in sources}
    found = []
    for start in starts:
        loaded = load_closure(by_name, start)
        allowed = {"ray"} if any(is_within(start, room) for room in RAY_ROOMS) else set()
        found += [
            Violation(by_name[start].path, 1, f"importing {start} loads {name}")
            for name in heavy
            if name in loaded and name not in allowed
        ]
    return found


def light_modules(sources: tuple[Source, ...]) -> list[str]:
    """Modules whose import must stay light: host rooms, the root, the registry, each recipe.py."""
    return [
        source.module
        for source in sources
        if source.module in {PACKAGE, "flare_ray.recipes.registry"}
        or source.path.endswith("/recipe.py")
        or any(is_within(source.module, room) for room in HOST_ROOMS)
    ]


def check_builder_annotations(source: Source) -> list[Violation]:
    """Serve validates the builder's arguments only if its annotation is a class at run time."""
    if source.path != "flare_ray/frontend/app.py":
        return []
    return [
        Violation(source.path, i.line, "the Serve builder needs run-time annotations")
        for i in source.imports
        if i.target == "__future__.annotations"
    ]


PACKAGE_SOURCES = python_sources(PACKAGE)


def _all(check, sources=PACKAGE_SOURCES, **kwargs) -> list[Violation]:
    return [violation for source in sources for violation in check(source, **kwargs)]


def test_package_sources_are_found():
    assert any(source.module == PACKAGE for source in PACKAGE_SOURCES)


def test_lower_line_never_imports_higher_line():
    found = _all(check_layers)
    assert not found, report(found)


def test_device_graphs_stand_above_speculation_above_the_rest():
    found = _all(check_device_order)
    assert not found, report(found)


def test_recipe_families_are_reached_through_the_registry():
    found = _all(check_family_isolation)
    assert not found, report(found)


def test_ray_is_imported_only_in_actor_and_serve_files():
    found = _all(check_library, library="ray", rooms=RAY_ROOMS)
    assert not found, report(found)


def test_torch_distributed_is_used_only_in_parallel():
    found = _all(check_library, library="torch.distributed", rooms=COLLECTIVE_ROOMS)
    assert not found, report(found)


@pytest.mark.parametrize("library", KERNEL_LIBRARIES)
def test_kernel_library_is_imported_only_in_ops_and_sampling(library):
    found = _all(check_library, library=library, rooms=KERNEL_ROOMS)
    assert not found, report(found)


def test_kernel_libraries_are_imported_on_use():
    found = _all(check_kernels_lazy)
    assert not found, report(found)


def test_host_rooms_import_neither_torch_nor_ray():
    found = _all(check_host_room)
    assert not found, report(found)


def test_host_rooms_and_recipe_declarations_load_no_heavy_library_indirectly():
    found = check_light_import(PACKAGE_SOURCES, light_modules(PACKAGE_SOURCES), HEAVY)
    assert not found, report(found)


def test_serve_builder_keeps_runtime_annotations():
    found = _all(check_builder_annotations)
    assert not found, report(found)


# Negative controls: each rule must catch a small offending source, and let its neighbour pass.


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("flare_ray/contracts/x.py", "from flare_ray.controller.loop import Loop\n"),
        ("flare_ray/controller/x.py", "def f():\n    import flare_ray.actors.engine\n"),
        ("flare_ray/controller/x.py", "from ..device import state\n"),
        ("flare_ray/controller/paging/__init__.py", "from ...frontend import stream\n"),
        ("flare_ray/device/ops/x.py", "from flare_ray import controller\n"),
        ("flare_ray/device/ops/x.py", "from flare_ray.recipes.glm5_next import target\n"),
        ("flare_ray/actors/x.py", "import importlib\nimportlib.import_module('flare_ray.cli.x')\n"),
        ("flare_ray/frontend/x.py", "from flare_ray import LLM\n"),
        ("flare_ray/errors.py", "if TYPE_CHECKING:\n    from flare_ray.actors import rank\n"),
        ("flare_ray/nowhere/x.py", "x = 1\n"),
    ],
)
def test_layer_rule_catches_offender(path, text):
    assert check_layers(Source.parse(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("flare_ray/controller/x.py", "from flare_ray.contracts.request import Request\n"),
        ("flare_ray/device/state/x.py", "from flare_ray.recipes.declaration import StateSpec\n"),
        ("flare_ray/recipes/glm5_next/x.py", "from flare_ray.device.ops.kda import api\n"),
        ("flare_ray/actors/x.py", "from flare_ray.controller.loop import Loop\n"),
        ("flare_ray/cli/x.py", "from flare_ray.frontend.app import build\n"),
    ],
)
def test_layer_rule_accepts_downward_import(path, text):
    assert not check_layers(Source.parse(path, text))


def test_device_order_rule_catches_state_importing_the_round():
    source = Source.parse(
        "flare_ray/device/state/x.py", "from flare_ray.device.speculation import round\n"
    )
    assert check_device_order(source)


def test_family_rule_catches_sideways_and_upper_imports():
    text = "from flare_ray.recipes.other import target\n"
    assert check_family_isolation(Source.parse("flare_ray/recipes/mine/x.py", text))
    assert check_family_isolation(Source.parse("flare_ray/cli/x.py", text))
    assert not check_family_isolation(Source.parse("flare_ray/recipes/other/x.py", text))


@pytest.mark.parametrize(
    "text",
    ["import ray\n", "from ray import serve\n", "def f():\n    from ray.util import state\n"],
)
def test_ray_rule_catches_offender(text):
    offender = Source.parse("flare_ray/cli/x.py", text)
    assert check_library(offender, library="ray", rooms=RAY_ROOMS)
    allowed = Source.parse("flare_ray/actors/x.py", text)
    assert not check_library(allowed, library="ray", rooms=RAY_ROOMS)


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\n",
        "from torch import distributed\n",
        "import torch\ntorch.distributed.barrier()\n",
    ],
)
def test_collective_rule_catches_offender(text):
    offender = Source.parse("flare_ray/actors/rank.py", text)
    assert check_library(offender, library="torch.distributed", rooms=COLLECTIVE_ROOMS)


def test_kernel_rule_catches_offender_and_laziness_is_required():
    outside = Source.parse("flare_ray/recipes/x/target.py", "def f():\n    import flashinfer\n")
    assert check_library(outside, library="flashinfer", rooms=KERNEL_ROOMS)
    eager = Source.parse("flare_ray/device/ops/kda/api.py", "import fla\n")
    assert check_kernels_lazy(eager)
    indirect = Source.parse("flare_ray/device/ops/kda/api.py", "from . import triton\n")
    assert check_kernels_lazy(indirect)
    on_use = Source.parse("flare_ray/device/ops/kda/api.py", "def f():\n    from . import fla\n")
    assert not check_kernels_lazy(on_use)


def test_host_rule_catches_torch_but_not_type_only_import():
    offender = Source.parse("flare_ray/controller/x.py", "def f():\n    import torch\n")
    assert check_host_room(offender)
    typed = Source.parse(
        "flare_ray/controller/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
    )
    assert not check_host_room(typed)
    otherwise = Source.parse(
        "flare_ray/controller/x.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch\n"
    )
    assert check_host_room(otherwise)


def test_light_import_rule_follows_package_imports():
    sources = (
        Source.parse("flare_ray/recipes/a/recipe.py", "from .geometry import G\n"),
        Source.parse("flare_ray/recipes/a/geometry.py", "from flare_ray.device import dtypes\n"),
        Source.parse("flare_ray/device/dtypes.py", "import torch\n"),
    )
    assert check_light_import(sources, light_modules(sources), HEAVY)
    assert not check_light_import(sources[:2], light_modules(sources[:2]), HEAVY)


def test_builder_rule_catches_string_annotations():
    source = Source.parse("flare_ray/frontend/app.py", "from __future__ import annotations\n")
    assert check_builder_annotations(source)
