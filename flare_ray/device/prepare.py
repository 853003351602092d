"""From an engine's configuration to its plan, and to one rank that is ready to serve (contract: M6,
G4, G5, R6).

    plan_engine    config.json and shapes only: catalog, slots, pages, bytes; nothing is allocated
    prepare_rank   plan, checkpoint check, capacity check, weights, state, warm-up of every program

Every setting is either honoured or refused here by name, before a weight is read.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import ByteBudget, PreparedManifest, SamplingDefaults
from flare_ray.contracts.plan import MAX_EOS_IDS
from flare_ray.contracts.shapes import PAGE_TOKENS
from flare_ray.device.capacity import check_capacity, free_bytes, sum_text
from flare_ray.device.core import check_device, read_core, selected, use_kernels
from flare_ray.device.executor import ModelParts, RankExecutor
from flare_ray.device.graphs.catalog import CatalogOptions, catalog_shapes, scratch_sizes
from flare_ray.device.graphs.pool import PoolSizes, pool_bytes
from flare_ray.device.graphs.variants import count_graphs
from flare_ray.device.keeping import keeping_of, weights_held
from flare_ray.device.parts import EnginePlan, build_parts
from flare_ray.device.state.layout import (
    StateLimits,
    pages_for,
    snapshot_row_bytes,
    state_bytes,
)
from flare_ray.device.state.snapshot_layout import layout_digest
from flare_ray.device.state.store import TORCH_DTYPE
from flare_ray.device.weights.arithmetic import check_arithmetic
from flare_ray.device.weights.index import CheckpointIndex
from flare_ray.device.weights.loader import RankWeights
from flare_ray.device.weights.manifest import open_validated
from flare_ray.errors import CapacityError, CheckpointError, ConfigError
from flare_ray.recipes.declaration import (
    Communicator,
    Family,
    Recipe,
    StateSpec,
    TensorSpec,
    resolve,
)
from flare_ray.recipes.registry import find_recipe

logger = logging.getLogger(__name__)
SNAPSHOTS_PER_SLOT = 8
"""Prefix snapshots unless the settings give bytes; a guess, a request keeps two or three."""
PROVEN_ARCHITECTURES = ((9, 0),)
"""Compute capabilities on which `tests/gpu` has passed."""
GENERATION_FILE = "generation_config.json"


def plan_engine(config: EngineConfig) -> PreparedManifest:
    """What `prepare_rank` would build, from config.json and shapes alone.

    Raises:
        ConfigError: a setting asks for what the recipe, the checkpoint or this release lacks.
        CheckpointError: config.json is missing, damaged or of another family.
    """
    return make_plan(config).manifest


def prepare_rank(config: EngineConfig, comm: Communicator) -> RankExecutor:
    """Load, allocate, warm and, on CUDA, capture one rank.

    Args:
        comm: this rank's group; its size is the configured TP degree.
    Raises:
        ConfigError, CheckpointError: as `plan_engine`; a tensor of the checkpoint does not match.
        CapacityError: weights, pages, state, graphs and scratch do not fit the free memory.
    """
    if comm.size != config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, the group has {comm.size} "
            "ranks; start as many ranks as configured"
        )
    plan = make_plan(config)
    if config.device == "cuda":
        _check_cuda(comm.rank)
    if config.core is not None:
        check_device(plan.manifest, read_core(config.core))
        use_kernels(config.core)
    if config.device == "cpu":
        torch.set_num_threads(config.threads_per_rank)
    try:
        with torch.inference_mode():
            executor = RankExecutor(
                plan.manifest,
                _build(plan, config, comm),
                rank=comm.rank,
                debug_checks=config.debug_checks,
            )
        executor.warm()
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the device's memory ended while the engine was prepared: {error}; "
            f"{sum_text(plan.manifest)}"
        ) from error
    if config.speculation.policy == "adaptive" and not plan.manifest.prices:
        executor.price(masked=config.device == "cuda" or config.grammar.preload)
    return executor


def _check_cuda(rank: int) -> None:
    """Name the chip, and whether results for its architecture exist here (contract: G6).

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "device: cuda, but torch sees no CUDA device here; set device: cpu or start where a "
            "driver and a GPU are visible"
        )
    major, minor = torch.cuda.get_device_capability()
    known = (major, minor) in PROVEN_ARCHITECTURES
    logger.log(
        logging.INFO if known else logging.WARNING,
        "rank %d: %s, SM%d%d: %s",
        rank,
        torch.cuda.get_device_name(),
        major,
        minor,
        "tested" if known else "no test of this release has run on this architecture",
    )


def check_checkpoint(config: EngineConfig) -> None:
    """Refuse what `prepare_rank` would refuse of a checkpoint on this host, from headers alone.

    Reads config.json and the headers of the weight files; settings that concern neither are not
    judged.

    Raises:
        ConfigError: no recipe serves it.
        CheckpointError: config.json is missing, damaged or of another geometry; `problems` names
            each missing, extra, misshapen, mistyped or truncated tensor; or the checkpoint declares
            arithmetic that `config` does not answer.
    """
    config_json = _read_object(Path(config.checkpoint) / "config.json", required=True)
    recipe = find_recipe(config_json, name=config.recipe)
    specs = resolve(recipe.manifest)(resolve(recipe.geometry)(config_json))
    if specs:  # a recipe without tensors has no files to check
        _open(config, recipe, specs)


def make_plan(config: EngineConfig) -> EnginePlan:
    """`plan_engine` with the parts it was made from."""
    folder = Path(config.checkpoint)
    recipe, geometry = _model_of(config)
    options = _catalog_options(config, recipe, geometry.num_drafter_layers)
    shapes = catalog_shapes(options)
    captured = config.device == "cuda" and not config.eager
    spec = resolve(recipe.state)(geometry, config.tensor_parallel_size)
    limits, row_bytes = _state_limits(config, spec, options, vocab_size=geometry.vocab_size)
    page_bytes, rest_bytes = state_bytes(spec, limits)
    held = weights_held(config, recipe, resolve(recipe.manifest)(geometry), _families(config))
    sizes = PoolSizes(geometry.vocab_size, spec.sampling_width, limits.table_columns)
    generation = _read_object(folder / GENERATION_FILE, required=False)
    manifest = PreparedManifest(
        recipe=recipe.name,
        checkpoint_name=folder.resolve().name,
        world_size=config.tensor_parallel_size,
        device=config.device,
        dtype=config.dtype,
        vocab_size=geometry.vocab_size,
        context_tokens=config.context_tokens,
        page_tokens=PAGE_TOKENS,
        num_pages=limits.num_pages,
        slots=config.concurrency,
        prefill_tokens=config.prefill_tokens,
        draft_tokens=options.widths[-1] - 1 if options.speculative else 0,
        speculation=options.speculative,
        copy_inputs=options.speculative and recipe.speculation.copy_inputs,
        eos_ids=_eos_ids(geometry.eos_ids, generation),
        sampling_defaults=_sampling_defaults(recipe.sampling_defaults, generation, config),
        processed_logprobs=config.sampling.logprobs == "processed",
        shapes=shapes,
        budget=ByteBudget(
            weights_bytes=held.device,
            table_bytes=held.elsewhere,
            page_bytes=page_bytes,
            state_bytes=rest_bytes,
            graph_pool_bytes=pool_bytes(shapes, sizes) if captured else 0,
            scratch_bytes=scratch_sizes(shapes, geometry.vocab_size).num_bytes,
        ),
        expert_weights=config.expert_weights,
        tables=config.tables,
        threads=config.threads_per_rank if config.device == "cpu" else 0,
        snapshot_rows=limits.snapshot_rows,
        snapshot_row_bytes=row_bytes,
        host_cache_bytes=config.prefix_cache.host_bytes if config.prefix_cache.enabled else 0,
        state_layout=layout_digest(spec, limits),
        # what a row group held before a round's last row is gone
        snapshots_inside_rounds=all(group.kind != "row" for group in spec.groups),
        captured=captured,
        graphs=count_graphs(shapes) if captured else 0,
    )
    if config.core is not None:
        manifest = selected(manifest, read_core(config.core))
    return EnginePlan(manifest, recipe, geometry, _families(config))


def _model_of(config: EngineConfig) -> tuple[Recipe, Any]:
    """The checkpoint's recipe and geometry, held against the settings that concern them."""
    config_json = _read_object(Path(config.checkpoint) / "config.json", required=True)
    recipe = find_recipe(config_json, name=config.recipe)
    _check_device(config, recipe)
    geometry = resolve(recipe.geometry)(config_json)
    if config.context_tokens > geometry.max_context_tokens:
        raise ConfigError(
            f"context_tokens is {config.context_tokens}, the model holds "
            f"{geometry.max_context_tokens}; lower context_tokens"
        )
    return recipe, geometry


def _check_device(config: EngineConfig, recipe: Recipe) -> None:
    degrees = recipe.tensor_parallel
    if config.tensor_parallel_size not in degrees:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, {recipe.name} splits over "
            f"{', '.join(map(str, degrees))}; choose one of these"
        )
    if config.device == "cpu" and config.dtype != "float32":
        raise ConfigError(f"dtype is {config.dtype}; CPU ranks run float32, set dtype: float32")


def _catalog_options(config: EngineConfig, recipe: Recipe, drafter_layers: int) -> CatalogOptions:
    settings = config.speculation
    speculative = settings.families != "ordinary"
    if settings.copies and not (speculative and recipe.speculation.copy_inputs):
        raise ConfigError(
            f"speculation.{settings.copies[0]}: no round of {recipe.name} with families: "
            f"{settings.families} takes copied drafts; leave it out, or prepare drafts"
        )
    if not speculative:
        _refuse_drafts(config)
    elif drafter_layers < 1 and settings.learned_drafts:
        raise ConfigError(
            f"speculation.families is {settings.families}, the checkpoint holds no drafter; set "
            "families: ordinary, or learned_drafts: false with copied drafts"
        )
    return CatalogOptions(
        concurrency=config.concurrency,
        prefill_tokens=config.prefill_tokens,
        ordinary=settings.families != "speculative",
        speculative=speculative,
        widths=_widths(config, recipe) if speculative else (1,),
        token_capacity=settings.token_capacity,
        resume=config.prefix_cache.enabled,
        block=recipe.speculation.block,
        masked=config.grammar.enabled,
        packed=_packed(config, recipe) if speculative else (),
    )


def _packed(config: EngineConfig, recipe: Recipe) -> tuple[int, ...]:
    """Rows a lane of packed rounds; refused where nobody forecasts, or beyond the widest round."""
    rows = config.speculation.packed_rows
    if rows and not recipe.speculation.forecasts:
        raise ConfigError(
            f"speculation.packed_rows: the drafter of {recipe.name} forecasts nothing that rows "
            "could be assigned by; leave it out"
        )
    widest = _widths(config, recipe)[-1]
    if rows and rows[-1] >= widest:
        raise ConfigError(
            f"speculation.packed_rows: {rows[-1]} rows a lane are no fewer than those of the "
            f"widest round, {widest}; give smaller ones"
        )
    return rows


def _refuse_drafts(config: EngineConfig) -> None:
    settings = config.speculation
    asked = {
        "draft_tokens": settings.draft_tokens or 0,
        "widths": (settings.widths or (1,))[-1] - 1,
        "fixed_width": (settings.fixed_width or 1) - 1,
        "packed_rows": len(settings.packed_rows),
    }
    for name, drafts in asked.items():
        if drafts:
            raise ConfigError(
                f"speculation.{name} asks for {drafts} drafts, speculation.families: ordinary "
                "prepares no drafter; drop one of the two"
            )


def _widths(config: EngineConfig, recipe: Recipe) -> tuple[int, ...]:
    settings = config.speculation
    most = recipe.speculation.max_draft_tokens
    drafts = settings.draft_tokens
    if drafts is None:
        default = recipe.speculation.default_draft_tokens
        drafts = default if settings.widths is None else settings.widths[-1] - 1
    if drafts > most:
        raise ConfigError(
            f"speculation asks for {drafts} drafts, {recipe.name} drafts at most {most}; lower "
            "draft_tokens or widths"
        )
    every = (1, drafts + 1) if recipe.speculation.block and drafts else tuple(range(1, drafts + 2))
    widths = settings.widths or every
    if settings.fixed_width is not None and settings.fixed_width not in widths:
        raise ConfigError(
            f"speculation.fixed_width is {settings.fixed_width}, prepared widths are "
            f"{list(widths)}; prepare it or choose another"
        )
    return widths


def _state_limits(
    config: EngineConfig, spec: StateSpec, options: CatalogOptions, *, vocab_size: int
) -> tuple[StateLimits, int]:
    """Sizes of all state, and the bytes of one prefix snapshot (0 = the cache is off)."""
    limits = StateLimits(
        slots=config.concurrency,
        num_pages=_pool_pages(config) + 1,
        context_tokens=config.context_tokens,
        dtype=config.dtype,
        device=config.device,
        vocab_size=vocab_size,
        speculation=options.speculative,
    )
    row_bytes = snapshot_row_bytes(spec, limits) if config.prefix_cache.enabled else 0
    return replace(limits, snapshot_rows=_snapshot_rows(config, row_bytes)), row_bytes


def _snapshot_rows(config: EngineConfig, row_bytes: int) -> int:
    """Rows that the prefix cache's bytes hold; 0 = it is off."""
    settings = config.prefix_cache
    if not settings.enabled:
        return 0
    if settings.device_bytes is None:
        return SNAPSHOTS_PER_SLOT * config.concurrency
    if settings.device_bytes < row_bytes:
        raise ConfigError(
            f"prefix_cache.device_bytes is {settings.device_bytes}, one snapshot takes "
            f"{row_bytes}; raise it or set prefix_cache.enabled: false"
        )
    return settings.device_bytes // row_bytes


def _pool_pages(config: EngineConfig) -> int:
    if config.page_pool_tokens is not None:
        return pages_for(config.page_pool_tokens)
    return config.concurrency * pages_for(config.context_tokens)


def _families(config: EngineConfig) -> tuple[Family, ...]:
    """Tensor families that are loaded."""
    return ("target",) if config.speculation.families == "ordinary" else ("target", "drafter")


def _open(
    config: EngineConfig, recipe: Recipe, specs: Sequence[TensorSpec]
) -> tuple[CheckpointIndex, tuple[str, ...]]:
    """The checkpoint's index, its headers checked against `specs`, and notices; reads no tensor."""
    index, validated = open_validated(
        config.checkpoint,
        specs,
        families=_families(config),
        tolerated_prefixes=recipe.tolerated_prefixes,
    )
    notices = check_arithmetic(
        index,
        validated,
        kv_dtype=config.kv_dtype,
        quantised_activations=config.quantised_activations,
    )
    return index, notices


def _build(plan: EnginePlan, config: EngineConfig, comm: Communicator) -> ModelParts:
    """Check the checkpoint, check the sum, load target and drafter."""
    manifest = plan.manifest
    specs = resolve(plan.recipe.manifest)(plan.geometry)
    index, notices = _open(config, plan.recipe, specs) if specs else (None, ())
    for notice in notices if comm.rank == 0 else ():
        logger.warning("%s", notice)
    check_capacity(manifest, free_bytes(manifest.device, comm.size))
    if index is None:  # a recipe without tensors has no files either
        return build_parts(plan, None, comm)
    weights = RankWeights(
        index,
        specs,
        device=manifest.device,
        dtype=TORCH_DTYPE[manifest.dtype],
        families=plan.families,
        keeping=keeping_of(config),
    )
    with weights:
        return build_parts(plan, weights, comm)


def _read_object(path: Path, *, required: bool) -> Mapping[str, Any]:
    if not path.is_file():
        if required:
            raise CheckpointError(
                f"{path} does not exist; `checkpoint` must name a folder with config.json"
            )
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, expected an object")
    return content


def _eos_ids(recipe_ids: Iterable[int], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS set: what the generation defaults say, else what the model's configuration says."""
    declared = generation.get("eos_token_id")
    ids = [declared] if isinstance(declared, int) else list(declared or recipe_ids)
    unique = tuple(dict.fromkeys(ids))
    if len(unique) > MAX_EOS_IDS:
        raise ConfigError(f"{len(unique)} EOS ids, a slot holds {MAX_EOS_IDS}")
    return unique


def _sampling_defaults(
    recipe: SamplingDefaults, generation: Mapping[str, Any], config: EngineConfig
) -> SamplingDefaults:
    """The recipe's defaults with what generation_config.json states in their place (contract: S3),
    and the deployment's own.

    Raises:
        CheckpointError: a stated value cannot be sampled with.
    """
    values = {
        name: getattr(recipe, name) if generation.get(name) is None else generation[name]
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    fits: dict[str, Callable[[float], bool]] = {
        "temperature": lambda x: 0 < x < math.inf,
        "top_k": lambda x: x >= 0 and x == int(x),
        "top_p": lambda x: 0 < x <= 1,
        "min_p": lambda x: 0 <= x < 1,
    }
    for name, fit in fits.items():
        value = values[name]
        if not isinstance(value, int | float) or not math.isfinite(value) or not fit(value):
            raise CheckpointError(f"{GENERATION_FILE}: {name} is {value!r}; mend the file")
    return SamplingDefaults(
        temperature=float(values["temperature"]),
        top_k=int(values["top_k"]),
        top_p=float(values["top_p"]),
        min_p=float(values["min_p"]),
        reproducible=config.sampling.reproducible,
    )
