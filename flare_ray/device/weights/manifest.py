"""Every tensor a recipe lists, against everything a checkpoint stores, before anything is
allocated (contract: R5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flare_ray.device.weights.formats import WeightFormat
from flare_ray.device.weights.index import CheckpointIndex, open_checkpoint, scan_checkpoint
from flare_ray.device.weights.quantisation import Declaration, compare, read_declaration
from flare_ray.device.weights.stored import StoredWeight, distinct_parts, related_names, resolve
from flare_ray.errors import CheckpointError, ContractViolation
from flare_ray.recipes.declaration import Family, TensorSpec

BOTH_FAMILIES: tuple[Family, ...] = ("target", "drafter")
# Scales of a quantised KV cache: they belong to the declaration, not to a weight.
KV_SCALE_SUFFIXES = (".k_scale", ".v_scale", ".kv_scale")


@dataclass(frozen=True, slots=True)
class ValidatedWeights:
    """The listed tensors that are present, each with its format and parts.

    Attributes:
        weights: by spec name, of the families asked for.
        notices: accepted oddities, worth a log line each.
    """

    weights: Mapping[str, StoredWeight]
    notices: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Stored bytes of these tensors, scales included. Each tensor's bytes were compared with
        its type and shape, and those with its spec."""
        return sum(part.num_bytes for part in distinct_parts(self.weights.values()))

    def formats(self) -> Mapping[WeightFormat, int]:
        """Number of listed tensors stored in each format."""
        return Counter(weight.format for weight in self.weights.values())


def open_validated(
    folder: str | Path,
    specs: Sequence[TensorSpec],
    *,
    families: Iterable[Family] = BOTH_FAMILIES,
    tolerated_prefixes: tuple[str, ...] = (),
) -> tuple[CheckpointIndex, ValidatedWeights]:
    """`open_checkpoint` and `validate` in one: damaged files do not hide what else is wrong.

    Raises:
        CheckpointError: `problems` has the lines of both.
    """
    index, damages = scan_checkpoint(folder)
    if not index.tensors:
        # Without any weights every listed tensor is missing; the reason is what counts.
        index = open_checkpoint(folder)
    validated, problems = check_manifest(
        index, specs, families=families, tolerated_prefixes=tolerated_prefixes
    )
    _refuse(index, (*damages, *problems))
    return index, validated


def validate(
    index: CheckpointIndex,
    specs: Sequence[TensorSpec],
    *,
    families: Iterable[Family] = BOTH_FAMILIES,
    tolerated_prefixes: tuple[str, ...] = (),
) -> ValidatedWeights:
    """Check that a checkpoint holds what a recipe lists, and nothing unknown (contract: R5).

    Args:
        index: an opened checkpoint.
        specs: the whole list of the recipe, both families: tensors of a family not asked for are
            left alone, but are known.
        families: families to be loaded.
        tolerated_prefixes: beginnings of names that may be stored and are not loaded.
    Raises:
        CheckpointError: `problems` names each missing, extra, misshapen, mistyped, wrongly
            quantised or wrongly declared tensor.
    """
    validated, problems = check_manifest(
        index, specs, families=families, tolerated_prefixes=tolerated_prefixes
    )
    _refuse(index, problems)
    return validated


def check_manifest(
    index: CheckpointIndex,
    specs: Sequence[TensorSpec],
    *,
    families: Iterable[Family] = BOTH_FAMILIES,
    tolerated_prefixes: tuple[str, ...] = (),
) -> tuple[ValidatedWeights, tuple[str, ...]]:
    """As `validate`, but hands the problems back beside whatever matched."""
    match = _match(index, specs, frozenset(families))
    extras = _extras(index, match.known, match.declaration, tolerated_prefixes)
    return match.validated, (*match.problems, *extras)


def validate_listed(
    index: CheckpointIndex,
    specs: Sequence[TensorSpec],
    *,
    families: Iterable[Family] = BOTH_FAMILIES,
) -> ValidatedWeights:
    """As `validate`, but judges listed tensors only: what else is stored does not matter."""
    match = _match(index, specs, frozenset(families))
    _refuse(index, match.problems)
    return match.validated


def _refuse(index: CheckpointIndex, problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{index.folder} does not match the recipe's manifest ({len(problems)} problems); use "
            "a checkpoint of this model in a supported format:",
            tuple(problems),
        )


@dataclass(frozen=True, slots=True)
class _Match:
    """Outcome for the listed tensors; `known` are the stored names that belong to any of them."""

    validated: ValidatedWeights
    problems: tuple[str, ...]
    known: frozenset[str]
    declaration: Declaration


def _match(
    index: CheckpointIndex, specs: Sequence[TensorSpec], families: frozenset[Family]
) -> _Match:
    _refuse_repeated(specs)
    declaration, declared_problems = read_declaration(index.quantisation)
    weights, problems, notices = {}, list(declared_problems), []
    known: set[str] = set()
    for spec in specs:
        if spec.family not in families:
            known.update((*related_names(spec.name), spec.shared_scale))
            continue
        found = resolve(spec, index.tensors, declaration.block)
        problems += found.problems
        replaced = bool(spec.instead) and spec.instead in index.tensors
        if replaced and found.names:
            problems.append(f"{spec.name}: stored, and {spec.instead} too; keep one of the two")
        if found.weight is None:
            known.update(found.names)
            if spec.required and not found.names and not replaced:
                problems.append(f"{spec.name}: missing; expected {list(spec.shape)}")
            continue
        known.update(part.name for part in found.weight.parts.values())
        weights[spec.name] = found.weight
        if spec.quantisable:
            verdict = compare(found.weight, declaration)
            problems += [verdict.problem] if verdict.problem else []
            notices += [verdict.notice] if verdict.notice else []
    validated = ValidatedWeights(weights, tuple(notices))
    return _Match(validated, tuple(problems), frozenset(known), declaration)


def _refuse_repeated(specs: Sequence[TensorSpec]) -> None:
    repeated = [name for name, count in Counter(s.name for s in specs).items() if count > 1]
    if repeated:
        raise ContractViolation(
            f"the recipe's manifest lists {', '.join(sorted(repeated))} more than once; list each "
            "tensor once, under the family that owns it"
        )


def _extras(
    index: CheckpointIndex,
    known: frozenset[str],
    declaration: Declaration,
    tolerated_prefixes: tuple[str, ...],
) -> list[str]:
    """Names nobody listed. Scales of a declared KV cache belong to that declaration."""
    kv_scales = KV_SCALE_SUFFIXES if declaration.kv_cache else ()
    return [
        f"{name}: not in the manifest ({tensor.dtype} {list(tensor.shape)} in {tensor.file.name})"
        for name, tensor in index.tensors.items()
        if name not in known
        and not (tolerated_prefixes and name.startswith(tolerated_prefixes))
        and not (kv_scales and name.endswith(kv_scales))
    ]
