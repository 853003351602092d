"""What a checkpoint's configuration declares about quantised modules, and where the stored tensors
contradict it.

The rule (contract: R5). The stored tensors decide how each tensor is read; the declaration is
checked against them, and a contradiction is a problem:
    1. a tensor stored quantised needs a declaration of its kind (fp8_block, nvfp4), must not be on
       the skip list, and must be among the targets where targets are named;
    2. a target tensor stored plain, though declared quantised and not skipped, is a problem.
Two published habits are followed, because there the tensors are known to be right:
    3. a *drafter* tensor stored plain is accepted although no skip entry names it (exports leave
       the drafter in BF16 and forget to say so); this is noted;
    4. a declaration of mixed precision names kinds only per layer and often incompletely: under it
       every supported kind and plain are accepted, except against the skip list (1).

Skip lists name modules in other spellings than tensors do (without `model.` or `language_model.`,
as globs, or as `re:` expressions), so names are compared component by component: `layers.1` never
matches `layers.10`, `mlp.gate` never `mlp.gate_proj`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flare_ray.device.weights.formats.fp8_block import DEFAULT_BLOCK
from flare_ray.device.weights.formats.nvfp4 import GROUP
from flare_ray.device.weights.index import CheckpointIndex
from flare_ray.device.weights.stored import StoredWeight, module_of
from flare_ray.errors import CheckpointError

SKIP_KEYS = (
    *("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"),
    "ignored_modules",
)
DROPPED_COMPONENT = "language_model"
EVERY_LINEAR = "Linear"
MIXED_KINDS = {"FP8": "fp8_tensor"}
"""Kinds that only a declaration per layer may name: tables have them, linears do not."""
MODELOPT_KINDS = {
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "NVFP4_W4A16", "NVFP4A16"), "nvfp4"),
    **dict.fromkeys(("FP8_PB_WO", "FP8_BLOCK_SCALES", "FP8_PB_REAL"), "fp8_block"),
}


class ModulePatterns:
    """A set of module patterns as configurations write them.

    Args:
        entries: plain names (a run of whole components anywhere in a module's path, its
            submodules included), globs with `*` or `?` (matching a module or any of its parents),
            `re:` expressions (matched from the start of a name).
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._runs: set[tuple[str, ...]] = set()
        globs, self._expressions = [], []
        for entry in entries:
            if entry.startswith("re:"):
                self._expressions.append(re.compile(entry[3:]))
            elif "*" in entry or "?" in entry:
                globs.append(f"(?:{fnmatch.translate('.'.join(_canonical(entry)))})")
            elif components := _canonical(entry):
                self._runs.add(components)
        self._glob = re.compile("|".join(globs)) if globs else None
        self._lengths = sorted({len(run) for run in self._runs})

    def matches(self, module: str) -> bool:
        """Whether a module (a tensor's name without `.weight`) is among the patterns."""
        components = _canonical(module)
        for length in self._lengths:
            for start in range(len(components) - length + 1):
                if components[start : start + length] in self._runs:
                    return True
        if self._glob is not None:
            parents = (".".join(components[:end]) for end in range(len(components), 0, -1))
            if any(self._glob.match(parent) for parent in parents):
                return True
        spellings = (module, ".".join(components), "model." + ".".join(components))
        return any(e.match(name) for e in self._expressions for name in spellings)


def _canonical(name: str) -> tuple[str, ...]:
    components = [part for part in name.split(".") if part != DROPPED_COMPONENT]
    while components[:1] == ["model"]:
        components.pop(0)
    return tuple(components)


@dataclass(frozen=True)
class Declaration:
    """A `quantization_config`, read.

    Attributes:
        method: its quant_method; "" for an unquantised checkpoint.
        kinds: weight kinds it declares, "fp8_block", "fp8_tensor", "mxfp4" and "nvfp4".
        mixed: it declares kinds per layer (rule 4).
        block: rows and columns of an FP8 block.
        skipped: modules it leaves unquantised.
        targets: modules it quantises; None = every linear.
        kv_cache: type it declares for the KV cache; "" = none.
    """

    method: str = ""
    kinds: frozenset[str] = frozenset()
    mixed: bool = False
    block: tuple[int, int] = DEFAULT_BLOCK
    skipped: ModulePatterns = field(default_factory=lambda: ModulePatterns(()))
    targets: ModulePatterns | None = None
    kv_cache: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of comparing one stored tensor with the declaration; "" = nothing to say."""

    problem: str = ""
    notice: str = ""


def read_declaration(quantisation: Mapping[str, Any]) -> tuple[Declaration, tuple[str, ...]]:
    """Parse a `quantization_config`; what it declares and no format here can honour is a problem.

    Args:
        quantisation: `CheckpointIndex.quantisation`.
    """
    if not quantisation:
        return Declaration(), ()
    method = str(quantisation.get("quant_method", "")).lower()
    readers = {
        "fp8": _read_fp8,
        "modelopt": _read_modelopt,
        "modelopt_fp4": _read_modelopt,
        "compressed-tensors": _read_groups,
    }
    if method not in readers:
        return Declaration(method), (
            f"quantization_config: quant_method {method!r} is not supported; use an export with "
            f"one of {', '.join(readers)}, or an unquantised one",
        )
    skipped, problems = _skip_list(quantisation)
    declared, more = readers[method](quantisation)
    declaration = Declaration(
        method,
        declared.kinds,
        declared.mixed,
        declared.block,
        ModulePatterns(skipped),
        declared.targets,
        declared_kv_cache(quantisation),
    )
    return declaration, tuple(f"quantization_config: {text}" for text in (*problems, *more))


def _skip_list(config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    entries: list[str] = []
    problems: list[str] = []
    for key in SKIP_KEYS:
        if config.get(key) is not None:
            good, bad = _patterns(key, config[key])
            entries += good
            problems += bad
    return entries, problems


def _patterns(key: str, value: Any) -> tuple[list[str], list[str]]:
    """The usable patterns of a list, and what is wrong with the rest."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        return [], [f"{key} is {value!r}; expected a list of module names"]
    good, bad = [], []
    for entry in value:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            bad.append(f"{key} holds {entry!r}, which is no regular expression: {error}")
        else:
            good.append(entry)
    return good, bad


@dataclass(slots=True)
class _Declared:
    kinds: frozenset[str] = frozenset()
    mixed: bool = False
    block: tuple[int, int] = DEFAULT_BLOCK
    targets: ModulePatterns | None = None


def _read_fp8(config: Mapping[str, Any]) -> tuple[_Declared, list[str]]:
    block = _block(config.get("weight_block_size"))
    if block is None:
        return _Declared(), [
            f"FP8 with weight_block_size {config.get('weight_block_size')!r} is not supported; "
            "use an export with a block, [128, 128]"
        ]
    experts = config.get("expert_dtype")
    if experts not in (None, "fp8", "fp4"):
        return _Declared(), [f"expert_dtype {experts!r} is not supported; expected fp4 or fp8"]
    kinds = {"fp8_block", "mxfp4"} if experts == "fp4" else {"fp8_block"}
    return _Declared(frozenset(kinds), block=block), []


def _read_modelopt(config: Mapping[str, Any]) -> tuple[_Declared, list[str]]:
    algorithm = str(config.get("quant_algo") or "").upper()
    if not algorithm:
        return _read_groups(config)
    if algorithm != "MIXED_PRECISION":
        kind = MODELOPT_KINDS.get(algorithm)
        if kind is None:
            return _Declared(), [f"quant_algo {algorithm} is not supported"]
        return _Declared(frozenset({kind})), _group_size_problem(config, kind)
    layers: dict[str, list[str]] = {}
    for module, layer in _object(config.get("quantized_layers")).items():
        name = str(_object(layer).get("quant_algo") or "").upper()
        layers.setdefault(name, []).append(module)
    known = MODELOPT_KINDS | MIXED_KINDS
    unknown = sorted(layers.keys() - known.keys())
    problems = [
        f"quantized_layers declares {name or 'nothing'} for {len(layers[name])} modules "
        f"({layers[name][0]} ...), which is not supported"
        for name in unknown
    ]
    kinds = {known[name] for name in layers.keys() - set(unknown)}
    return _Declared(frozenset(kinds), mixed=True), problems


def _read_groups(config: Mapping[str, Any]) -> tuple[_Declared, list[str]]:
    """config_groups of compressed-tensors, which newer ModelOpt exports write as well."""
    kinds: set[str] = set()
    targets: list[str] = []
    problems: list[str] = []
    block = DEFAULT_BLOCK
    for name, group in _object(config.get("config_groups")).items():
        weights = _object(_object(group).get("weights"))
        kind = _group_kind(weights)
        if not kind:
            described = {k: weights.get(k) for k in ("num_bits", "type", "strategy", "group_size")}
            problems.append(f"{name} declares weights {described}, which is not supported")
            continue
        kinds.add(kind)
        good, bad = _patterns(f"{name}.targets", group.get("targets") or [EVERY_LINEAR])
        targets += good
        problems += bad
        block = _block(weights.get("block_structure")) or block
    if not kinds and not problems:
        problems.append("neither quant_algo nor config_groups declare a weight format")
    mixed = config.get("format") == "mixed-precision" or len(kinds) > 1
    # A target without dots names a class of modules. Which modules those are is known only for
    # linears, so any such target stands for every linear.
    every = any("." not in t and not t.startswith("re:") for t in targets)
    patterns = None if every else ModulePatterns(targets)
    return _Declared(frozenset(kinds), mixed, block, patterns), problems


def _object(value: Any) -> Mapping[str, Any]:
    """The value where it is a JSON object, else an empty one: what is missing is reported there."""
    return value if isinstance(value, dict) else {}


def _group_kind(weights: Mapping[str, Any]) -> str:
    if weights.get("type") != "float":
        return ""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if bits == 4 and weights.get("group_size") == GROUP:
        return "nvfp4"
    return "fp8_block" if bits == 8 and strategy == "block" else ""


def _group_size_problem(config: Mapping[str, Any], kind: str) -> list[str]:
    size = config.get("group_size")
    if kind == "nvfp4" and size not in (None, GROUP):
        return [f"NVFP4 with group_size {size} is not supported; expected {GROUP}"]
    return []


def _block(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list | tuple) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    return None


def compare(weight: StoredWeight, declaration: Declaration) -> Verdict:
    """Apply the rule at the top of this module to one tensor that may be quantised."""
    name, kind = weight.spec.name, weight.format.kind
    module = module_of(name)
    spellings = {module, module_of(weight.spec.alias or name)}
    skipped = any(map(declaration.skipped.matches, spellings))
    targeted = declaration.targets is None or any(map(declaration.targets.matches, spellings))
    if kind == "plain":
        if declaration.mixed or skipped or not targeted or not declaration.kinds:
            return Verdict()
        declared = " or ".join(sorted(declaration.kinds))
        stored = weight.parts["weight"].dtype
        if weight.spec.family == "drafter":
            return Verdict(notice=f"{name}: declared {declared}, stored {stored}; read as {stored}")
        return Verdict(
            f"{name}: quantization_config declares {declared}, the checkpoint stores {stored}; "
            f"add {module} to its skip list, or use a whole export"
        )
    if skipped:
        return Verdict(
            f"{name}: stored as {weight.format}, but quantization_config lists it as not "
            "quantised; use an export whose list is right"
        )
    if declaration.mixed:
        return Verdict()
    if kind not in declaration.kinds or not targeted:
        declared = " or ".join(sorted(declaration.kinds)) if targeted else ""
        return Verdict(
            f"{name}: stored as {weight.format}, but the configuration declares "
            f"{declared or 'no quantisation'} for it; use an export whose quantization_config is "
            "right"
        )
    return Verdict()


def declared_kv_cache(quantisation: Mapping[str, Any]) -> str:
    """KV-cache type that a `quantization_config` declares, "" for none ("fp8", say)."""
    algorithm = quantisation.get("kv_cache_quant_algo")
    if algorithm:
        return str(algorithm).lower()
    scheme = quantisation.get("kv_cache_scheme")
    if isinstance(scheme, str):
        return scheme.lower()
    if isinstance(scheme, dict):
        kind = {"float": "fp", "int": "int"}.get(str(scheme.get("type")), str(scheme.get("type")))
        return f"{kind}{scheme.get('num_bits')}"
    return ""


def check_kv_cache(index: CheckpointIndex, *, kv_dtype: str | None) -> str:
    """Refuse a declared KV-cache type that the deployment has not answered (contract: R5).

    Args:
        kv_dtype: type the deployment states for the KV cache; None = it states none.
    Returns:
        "" where nothing is declared, else a line for the log: the declaration and what is used.
    Raises:
        CheckpointError: the checkpoint declares a KV-cache type and `kv_dtype` is None.
    """
    declared = declared_kv_cache(index.quantisation)
    if not declared:
        return ""
    if kv_dtype is None:
        raise CheckpointError(
            f"{index.folder} declares a KV cache of type {declared}, which this engine does not "
            "keep; state the type to use instead (kv_dtype: bfloat16)"
        )
    return f"the checkpoint declares a KV cache of type {declared}; {kv_dtype} is used instead"
