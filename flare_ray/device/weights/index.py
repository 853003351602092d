"""What a checkpoint folder stores: names, types, shapes and places, from headers alone.

A safetensors file is `u64 header length | JSON header | data`; each header entry gives a tensor's
type, shape and byte range inside the data. Everything checked here is checked without reading the
data or allocating a tensor, so that a damaged download is refused in a second rather than after
minutes of loading (contract: R5). Every problem found is reported, not only the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from flare_ray.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"

MAX_HEADER_BYTES = 100_000_000
"""Bound of the safetensors format itself; a larger value means the file is something else."""

DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Type codes of the safetensors format and the bits of one element."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as its file's header describes it; `num_bytes` is the length of its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: Path


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """Everything a checkpoint folder stores.

    Attributes:
        folder: where it lies.
        tensors: every stored tensor by name.
        config: config.json.
        quantisation: the `quantization_config` of config.json, or what hf_quant_config.json holds
            where config.json has none; empty for an unquantised checkpoint.
        notices: oddities that change nothing, worth a log line.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]
    quantisation: Mapping[str, Any]
    notices: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensor data."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def open_checkpoint(folder: str | Path) -> CheckpointIndex:
    """Read every header of a checkpoint folder (contract: R5).

    Args:
        folder: holds config.json and either model.safetensors or model.safetensors.index.json
            with the shards it names.
    Raises:
        CheckpointError: the folder is no whole checkpoint; `problems` has one line per missing
            file, truncated file, damaged header, repeated name and name that a shard lacks.
    """
    index, problems = scan_checkpoint(folder)
    if problems:
        raise CheckpointError(
            f"{folder} is no whole checkpoint ({len(problems)} problems); download it again or "
            "mend what is listed:",
            problems,
        )
    return index


def scan_checkpoint(folder: str | Path) -> tuple[CheckpointIndex, tuple[str, ...]]:
    """As `open_checkpoint`, but hands the problems back beside whatever could be read."""
    return _Scan(Path(folder)).run()


class _Scan:
    """Collects tensors, problems and notices of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.problems: list[str] = []
        self.notices: list[str] = []

    def run(self) -> tuple[CheckpointIndex, tuple[str, ...]]:
        config: dict[str, Any] = {}
        quantisation: dict[str, Any] = {}
        if not self.folder.is_dir():
            self.problems.append(f"{self.folder}: no such folder")
        else:
            config = self._object(CONFIG_FILE) or {}
            quantisation = self._quantisation(config)
            self._weights()
        index = CheckpointIndex(
            self.folder, self.tensors, config, quantisation, tuple(self.notices)
        )
        return index, tuple(self.problems)

    def _weights(self) -> None:
        single, sharded = self.folder / SINGLE_FILE, self.folder / INDEX_FILE
        if sharded.is_file():
            weight_map, total_size = self._weight_map()
            if single.is_file() and SINGLE_FILE not in weight_map.values():
                self.problems.append(
                    f"{SINGLE_FILE}: stands beside {INDEX_FILE}, which does not name it; which of "
                    "the two holds the weights is not decidable, remove one"
                )
            self._shards(weight_map)
            self._note_strangers(set(weight_map.values()) | {SINGLE_FILE})
            self._note_total(total_size)
        elif single.is_file():
            self._add(self._read_file(single))
            self._note_strangers({SINGLE_FILE})
        else:
            self.problems.append(
                f"{self.folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; weights in another "
                "format must be converted to safetensors first"
            )

    def _weight_map(self) -> tuple[dict[str, str], Any]:
        content = self._object(INDEX_FILE)
        if content is None:
            return {}, None
        raw = content.get("weight_map")
        if not isinstance(raw, dict) or not raw:
            self.problems.append(f"{INDEX_FILE}: weight_map is missing or empty")
            return {}, None
        weight_map = {}
        for name, file in raw.items():
            if not isinstance(file, str) or Path(file).name != file:
                self.problems.append(
                    f"{INDEX_FILE}: {name} is mapped to {file!r}; expected the name of a file in "
                    "this folder"
                )
            else:
                weight_map[name] = file
        metadata = content.get("metadata")
        return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None

    def _shards(self, weight_map: Mapping[str, str]) -> None:
        for file in sorted(set(weight_map.values())):
            path = self.folder / file
            named = {name for name, where in weight_map.items() if where == file}
            if not path.is_file():
                self.problems.append(
                    f"{file}: named by {INDEX_FILE} for {len(named)} tensors, but there is no "
                    "such file"
                )
                continue
            stored = self._read_file(path)
            if stored is None:
                continue
            self.problems += [
                f"{name}: {INDEX_FILE} places it in {file}, which does not hold it"
                for name in sorted(named - stored.keys())
            ]
            for name in stored.keys() - named:
                other = weight_map.get(name)
                elsewhere = f"which places it in {other}" if other else "which does not name it"
                self.problems.append(f"{name}: stored in {file} against {INDEX_FILE}, {elsewhere}")
            self._add({name: stored[name] for name in stored if name in named})

    def _add(self, stored: Mapping[str, StoredTensor] | None) -> None:
        self.tensors.update(stored or {})

    def _note_strangers(self, known: set[str]) -> None:
        strangers = sorted(p.name for p in self.folder.glob("*.safetensors") if p.name not in known)
        self.notices += [f"{name}: not part of this checkpoint, not read" for name in strangers]

    def _note_total(self, declared: Any) -> None:
        # Tools that add or requantise shards often leave the sum as it was, so a wrong sum alone
        # is no fault: each tensor's own bytes are checked against its shape and its file.
        actual = sum(tensor.num_bytes for tensor in self.tensors.values())
        if declared is not None and declared != actual and not self.problems:
            self.notices.append(
                f"{INDEX_FILE}: metadata.total_size is {declared}, the tensors hold {actual} bytes"
            )

    def _quantisation(self, config: Mapping[str, Any]) -> dict[str, Any]:
        # Vision-language configurations may carry the section inside text_config.
        for place in (config, config.get("text_config")):
            if isinstance(place, dict) and place.get("quantization_config") is not None:
                declared = place["quantization_config"]
                if isinstance(declared, dict):
                    return declared
                self.problems.append(f"{CONFIG_FILE}: quantization_config is no object")
                return {}
        if (self.folder / MODELOPT_FILE).is_file():
            declared = (self._object(MODELOPT_FILE) or {}).get("quantization")
            if isinstance(declared, dict):
                return {"quant_method": "modelopt", **declared}
            self.problems.append(f"{MODELOPT_FILE}: quantization is missing or no object")
        return {}

    def _object(self, file: str) -> dict[str, Any] | None:
        """A JSON file that must hold an object; None after a problem."""
        path = self.folder / file
        if not path.is_file():
            self.problems.append(f"{file}: missing from {self.folder}")
            return None
        try:
            content, repeated = _parse_json(path.read_bytes())
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{file}: no valid JSON: {error}")
            return None
        self.problems += [f"{file}: {key} is given twice" for key in repeated]
        if not isinstance(content, dict):
            self.problems.append(f"{file}: holds no JSON object")
            return None
        return content

    def _read_file(self, path: Path) -> dict[str, StoredTensor] | None:
        """Tensors of one safetensors file; None where its header cannot be read at all."""
        header, problems = _read_header(path)
        self.problems += problems
        if header is None:
            return None
        tensors, problems = _parse_entries(header, path)
        self.problems += problems
        return tensors


@dataclass(frozen=True, slots=True)
class _Header:
    entries: dict[str, Any]
    data_bytes: int


def _read_header(path: Path) -> tuple[_Header | None, list[str]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return None, [f"{path.name}: truncated: {size} bytes, no safetensors header"]
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            return None, [
                f"{path.name}: header length {length} exceeds {MAX_HEADER_BYTES}; this is no "
                "safetensors file"
            ]
        if 8 + length > size:
            return None, [
                f"{path.name}: truncated inside its header: {size} bytes, the header alone needs "
                f"{8 + length}"
            ]
        raw = file.read(length)
    try:
        entries, repeated = _parse_json(raw)
    except (ValueError, RecursionError) as error:
        return None, [f"{path.name}: header is no valid JSON: {error}"]
    problems = [f"{path.name}: {key} is stored twice" for key in repeated]
    if not isinstance(entries, dict):
        return None, [*problems, f"{path.name}: header holds no JSON object"]
    entries.pop("__metadata__", None)
    return _Header(entries, size - 8 - length), problems


def _parse_entries(header: _Header, path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.entries.items():
        place = f"{name} in {path.name}"
        parsed = _parse_entry(entry)
        if isinstance(parsed, str):
            problems.append(f"{place}: {parsed}")
            continue
        dtype, shape, begin, end = parsed
        needed = -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)
        if end > header.data_bytes:
            problems.append(
                f"{place}: truncated: its data ends at byte {end}, the file holds "
                f"{header.data_bytes}"
            )
        elif end - begin != needed:
            problems.append(
                f"{place}: {end - begin} bytes stored, {dtype} {list(shape)} needs {needed}"
            )
        ranges.append((begin, end, name))
        tensors[name] = StoredTensor(name, dtype, shape, end - begin, path)
    return tensors, problems + _check_ranges(ranges, header.data_bytes, path)


def _parse_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int] | str:
    """Type, shape, begin and end of one header entry, or what is wrong with it."""
    if not isinstance(entry, dict):
        return "header entry is no object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown type {dtype!r}"
    if not _are_sizes(shape):
        return f"shape {shape!r} is no list of sizes"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {offsets!r} are no [begin, end]"
    begin, end = offsets
    return dtype, tuple(shape), begin, end


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_ranges(ranges: list[tuple[int, int, str]], data_bytes: int, path: Path) -> list[str]:
    """The data must be covered once, without holes: anything else is a damaged header."""
    problems = []
    position, previous = 0, "the start of the data"
    for begin, end, name in sorted(ranges):
        if begin != position:
            kind = "overlaps" if begin < position else "leaves a hole after"
            problems.append(f"{name} in {path.name}: {kind} {previous}")
        position, previous = max(position, end), name
    if position < data_bytes:
        problems.append(
            f"{path.name}: {data_bytes - position} bytes after its last tensor; the file is not "
            "what its header says"
        )
    return problems


def _parse_json(raw: bytes) -> tuple[Any, list[str]]:
    """Parsed JSON and the keys that any of its objects gives twice (json keeps the last)."""
    repeated: list[str] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    repeated.append(key)
                seen.add(key)
        return result

    return json.loads(raw, object_pairs_hook=build), repeated
