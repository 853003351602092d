"""From configuration to a plan and a serving rank, and every setting that is refused by name
(contract: G1, G5, M6, R6)."""

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import agreed_manifest, manifest_digest, manifest_json
from flare_ray.contracts.shapes import GraphKind, batch_capacities
from flare_ray.device.capacity import check_capacity
from flare_ray.device.executor import ModelParts, RankExecutor
from flare_ray.device.graphs.variants import count_graphs
from flare_ray.device.parallel.groups import SingleGroup, run_ranks
from flare_ray.device.prepare import plan_engine, prepare_rank
from flare_ray.errors import CapacityError, CheckpointError, ConfigError, ContractViolation
from tests.round.test_acceptance import plain_text
from tests.support.scripted import recipe
from tests.support.scripted.geometry import Script, write_checkpoint
from tests.support.scripted.harness import Driver, Setup, scripted_rank
from tests.support.scripted.state import state

SCRIPT = Script(vocab_size=16, order=2, seed=3, eos_ids=(15,), max_context_tokens=512)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "scripted", SCRIPT)


def config_of(checkpoint: Path, **fields) -> EngineConfig:
    defaults = {
        "checkpoint": str(checkpoint),
        "recipe": recipe.DOTTED,
        "device": "cpu",
        "dtype": "float32",
        "context_tokens": 256,
        "prefill_tokens": 32,
    }
    return EngineConfig(**{**defaults, **fields})


def rounds(manifest) -> list:
    return [s for s in manifest.shapes if s.kind == GraphKind.SPECULATIVE]


def test_default_catalog_has_eighteen_speculative_rounds_and_as_many_masked(checkpoint):
    manifest = plan_engine(config_of(checkpoint, concurrency=4))
    assert len(rounds(manifest)) == 36
    assert sum(shape.masked for shape in rounds(manifest)) == 18
    decodes = [shape for shape in manifest.shapes if shape.kind == GraphKind.DECODE]
    assert len(decodes) == 6 and sum(shape.masked for shape in decodes) == 3
    for speculation in (True, False):
        prefills = [
            (s.batch_capacity, s.token_capacity)
            for s in manifest.shapes
            if s.kind == GraphKind.PREFILL and s.speculation == speculation
        ]
        assert prefills == [(1, 32), (2, 16), (4, 8)]


@pytest.mark.parametrize("concurrency", range(1, 10))
def test_rank_prepared_from_a_folder_serves_every_capacity(checkpoint, concurrency):
    rank = prepare_rank(config_of(checkpoint, concurrency=concurrency), SingleGroup())
    driver = Driver(rank)
    requests = driver.prefill(
        [driver.open((1, 2, slot), slot, budget=12, eos=()) for slot in range(concurrency)]
    )
    while alive := [r for r in requests if not r.ended]:
        driver.round(alive, 4)
    for request in requests:
        assert request.tokens == plain_text(SCRIPT, request.prompt, 12)
    assert max(batch_capacities(concurrency)) >= concurrency


@pytest.mark.parametrize("families", ["both", "ordinary", "speculative"])
def test_planned_bytes_are_those_allocated(checkpoint, families):
    config = config_of(checkpoint, concurrency=3, speculation={"families": families})
    rank = prepare_rank(config, SingleGroup())
    budget = rank.manifest.budget
    assert rank.store.page_bytes == budget.page_bytes
    assert rank.store.state_bytes == budget.state_bytes
    arena = rank.backend.arena
    allocated = sum(
        t.nbytes
        for t in (
            arena.lanes.tensor,
            arena.masks.tensor,
            arena.q,
            arena.record,
            arena.positions,
            arena.scores,
            arena.prompt_scores,
        )
    )
    frames = rank._frames.num_bytes
    assert allocated + frames == budget.scratch_bytes


@pytest.mark.parametrize(("publication", "snapshots"), [(False, 0), (True, 0), (True, 5)])
def test_planned_state_bytes_are_every_tensor_of_the_store(publication, snapshots):
    rank = scripted_rank(SCRIPT, Setup(publication=publication, snapshot_rows=snapshots))
    store, budget = rank.store, rank.manifest.budget
    request = store.request
    tensors = [*store.groups.values(), request.core, request.sampling, request.page_table]
    tensors.append(request.tail)
    tensors += [getattr(request.logits, name) for name in request.logits.__slots__]
    if publication:
        rows = store.publication
        tensors += [*rows.rows.values(), rows.published, rows.tail, rows.sampling_vector]
        tensors.append(request.sampling_vector)
    if snapshots:
        kept = store.snapshots
        tensors += [*kept.rows.values(), kept.tail, kept.sampling_vector]
    assert sum(t.nbytes for t in tensors) == budget.page_bytes + budget.state_bytes


def test_ordinary_family_allocates_no_drafter_state(checkpoint):
    config = config_of(checkpoint, speculation={"families": "ordinary"})
    rank = prepare_rank(config, SingleGroup())
    assert not any(name.startswith("pair") for name in rank.store.groups)
    assert rank.store.request.tail is None
    assert not rounds(rank.manifest)
    assert rank.manifest.draft_tokens == 0
    driver = Driver(rank)
    request = driver.generate((1, 2), width=1, budget=9, speculation=False)
    assert request.tokens == plain_text(SCRIPT, (1, 2), 9)


def test_speculative_family_alone_prepares_no_ordinary_program(checkpoint):
    manifest = plan_engine(config_of(checkpoint, speculation={"families": "speculative"}))
    assert all(shape.speculation for shape in manifest.shapes)


def test_no_drafts_prepares_width_one_rounds_that_still_absorb(checkpoint):
    rank = prepare_rank(config_of(checkpoint, speculation={"draft_tokens": 0}), SingleGroup())
    assert {shape.verify_width for shape in rounds(rank.manifest)} == {1}
    request = Driver(rank).generate((1, 2), width=1, budget=9)
    assert request.records[-1].draft_position == request.records[-1].consumed - 1


def test_widths_need_not_be_contiguous(checkpoint):
    manifest = plan_engine(config_of(checkpoint, speculation={"widths": (1, 4, 8)}))
    assert {shape.verify_width for shape in rounds(manifest)} == {1, 4, 8}
    assert manifest.draft_tokens == 7


def test_wide_rounds_stop_at_the_token_capacity(checkpoint):
    config = config_of(checkpoint, concurrency=8, speculation={"token_capacity": 16})
    shapes = rounds(plan_engine(config))
    assert all(s.verify_width == 1 or s.batch_capacity * s.verify_width <= 16 for s in shapes)
    assert any(s.batch_capacity == 8 and s.verify_width == 2 for s in shapes)
    assert any(s.batch_capacity == 8 and s.verify_width == 1 for s in shapes)


REFUSED = {
    "drafts": ({"speculation": {"draft_tokens": 7}, "recipe": "short"}, "drafts at most 3"),
    "degree": ({"tensor_parallel_size": 8}, "splits over 1, 2, 4"),
    "dtype": ({"dtype": "bfloat16"}, "float32"),
    "context": ({"context_tokens": 1024}, "the model holds 512"),
    "history": (
        {"speculation": {"history_drafts": True, "families": "ordinary"}},
        "history_drafts: no round",
    ),
    "ordinary drafts": (
        {"speculation": {"families": "ordinary", "draft_tokens": 3}},
        "draft_tokens asks for 3",
    ),
    "ordinary widths": (
        {"speculation": {"families": "ordinary", "widths": (1, 2)}},
        "widths asks for 1",
    ),
    "fixed width": (
        {"speculation": {"widths": (1, 4), "policy": "fixed", "fixed_width": 3}},
        "fixed_width is 3",
    ),
    "unknown recipe": ({"recipe": "nothing-of-the-kind"}, "nothing-of-the-kind"),
    "recipe path": ({"recipe": "tests.support.scripted.recipe:ABSENT"}, "ABSENT"),
    "no recipe": ({"recipe": None}, "scripted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_setting_that_cannot_be_honoured_is_refused_by_name(checkpoint, name, monkeypatch):
    fields, message = REFUSED[name]
    if fields.get("recipe") == "short":
        short = dataclasses.replace(recipe.RECIPE.speculation, max_draft_tokens=3)
        changed = dataclasses.replace(recipe.RECIPE, speculation=short)
        monkeypatch.setattr(recipe, "RECIPE", changed)
        fields = {k: v for k, v in fields.items() if k != "recipe"}
    with pytest.raises(ConfigError, match=message):
        plan_engine(config_of(checkpoint, **fields))


@pytest.mark.parametrize("eager", [False, True])
def test_cuda_without_a_device_is_refused_before_a_weight_is_read(checkpoint, eager, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = config_of(checkpoint, device="cuda", dtype="bfloat16", eager=eager)
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        prepare_rank(config, SingleGroup())


@pytest.mark.parametrize("eager", [False, True])
def test_cuda_engine_can_be_planned_anywhere(checkpoint, eager):
    config = config_of(checkpoint, device="cuda", dtype="bfloat16", eager=eager)
    manifest = plan_engine(config)
    assert (manifest.device, manifest.dtype, manifest.threads) == ("cuda", "bfloat16", 0)
    on_cpu = plan_engine(config_of(checkpoint, concurrency=config.concurrency))
    assert manifest.shapes == on_cpu.shapes


def test_checkpoint_without_a_drafter_serves_only_the_ordinary_family(tmp_path):
    folder = write_checkpoint(tmp_path / "s", Script(vocab_size=16, num_drafter_layers=0))
    with pytest.raises(ConfigError, match="no drafter"):
        plan_engine(config_of(folder))
    assert plan_engine(config_of(folder, speculation={"families": "ordinary"})).shapes


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_damaged_config_json_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan_engine(config_of(tmp_path))


def test_generation_defaults_of_the_checkpoint_win_over_the_recipe(checkpoint):
    generation = {"temperature": 0.6, "top_k": 20, "eos_token_id": [3, 4]}
    (checkpoint / "generation_config.json").write_text(json.dumps(generation))
    manifest = plan_engine(config_of(checkpoint))
    defaults = manifest.sampling_defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, 0.95)
    assert manifest.eos_ids == (3, 4)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0), ("top_p", 1.5), ("top_k", "many"), ("min_p", -1)]
)
def test_generation_default_that_cannot_be_sampled_with_is_named(checkpoint, name, value):
    (checkpoint / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(CheckpointError, match=name):
        plan_engine(config_of(checkpoint))


def test_group_of_another_size_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="the group has 1"):
        prepare_rank(config_of(checkpoint, tensor_parallel_size=2), SingleGroup())


def test_all_ranks_prepare_the_same_manifest(checkpoint):
    config = config_of(checkpoint, tensor_parallel_size=2)
    digests = run_ranks(2, lambda comm: manifest_digest(prepare_rank(config, comm).manifest))
    assert digests == [manifest_digest(plan_engine(config))] * 2


def test_sum_that_does_not_fit_is_refused_with_its_parts(checkpoint):
    manifest = plan_engine(config_of(checkpoint))
    needed = manifest.budget.page_bytes + manifest.budget.state_bytes
    needed += manifest.budget.scratch_bytes
    check_capacity(manifest, needed * 2)
    with pytest.raises(CapacityError, match=r"pages .* \+ state .*scratch .* usable.*change"):
        check_capacity(manifest, needed // 2)


def test_rank_that_does_not_fit_the_free_memory_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr("flare_ray.device.prepare.free_bytes", lambda *_: 1000)
    with pytest.raises(CapacityError, match="one rank needs"):
        prepare_rank(config_of(checkpoint), SingleGroup())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packed_capacity": 4}, "packed capacity 4"),
        ({"kind": GraphKind.MIXED}, "mixed"),
        ({"verify_width": 9}, "nothing to verify"),
    ],
)
def test_shape_that_no_backend_builds_is_refused_by_name(checkpoint, fields, message):
    rank = prepare_rank(config_of(checkpoint), SingleGroup())
    first = rounds(rank.manifest)[0]
    shapes = (msgspec.structs.replace(first, **fields),)
    manifest = msgspec.structs.replace(rank.manifest, shapes=shapes)
    model = rank.backend.model
    parts = ModelParts(state(SCRIPT, 1), model.target, model.drafter)
    with pytest.raises(ContractViolation, match=message):
        RankExecutor(manifest, parts)


@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
def test_rounds_are_priced_where_a_policy_reads_it(checkpoint, policy):
    config = config_of(checkpoint, speculation={"policy": policy})
    rank = prepare_rank(config, SingleGroup())
    assert bool(rank.manifest.prices) == (policy == "adaptive")


def test_digest_of_a_manifest_leaves_its_prices_out(checkpoint):
    manifest = plan_engine(config_of(checkpoint))
    first, second = (
        msgspec.structs.replace(manifest, prices=((manifest.shapes[0], cost),)) for cost in (5, 9)
    )
    assert manifest_digest(first) == manifest_digest(second) == manifest_digest(manifest)
    assert manifest_json(first) != manifest_json(manifest)
    assert agreed_manifest([first, second]).prices == ((manifest.shapes[0], 9),)


def test_captured_programs_are_planned_with_their_graphs_and_pool(checkpoint):
    fields = {"device": "cuda", "dtype": "bfloat16"}
    captured = plan_engine(config_of(checkpoint, **fields))
    eager = plan_engine(config_of(checkpoint, eager=True, **fields))
    assert captured.captured
    assert captured.graphs == count_graphs(captured.shapes)
    assert captured.budget.graph_pool_bytes > 0
    assert not eager.captured
    assert (eager.graphs, eager.budget.graph_pool_bytes) == (0, 0)
    assert captured.shapes == eager.shapes


def test_start_that_does_not_fit_tells_the_sum_and_the_setting(checkpoint):
    manifest = plan_engine(config_of(checkpoint, device="cuda", dtype="bfloat16"))
    with pytest.raises(CapacityError, match=r"graph pool 0\.\d+ .*change .*"):
        check_capacity(manifest, 1 << 20)


@pytest.mark.parametrize("preload", [False, True])
def test_rounds_with_masks_are_timed_where_grammars_are_expected(checkpoint, preload):
    rank = prepare_rank(config_of(checkpoint, grammar={"preload": preload}), SingleGroup())
    costs = dict(rank.manifest.prices)
    masked = [shape for shape in costs if shape.masked]
    assert masked
    twins = [costs[msgspec.structs.replace(shape, masked=False)] for shape in masked]
    assert ([costs[shape] for shape in masked] != twins) == preload
