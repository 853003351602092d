"""Whole engines over their tiers, in every recipe: restarts, damage, a full disk, several ranks
(contract: M7). Texts are greedy and compared with an engine without a prefix cache."""

from __future__ import annotations

import errno
import json
import random
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from flare_ray.actors import inprocess
from flare_ray.actors.core import EngineCore
from flare_ray.actors.grammar import service
from flare_ray.config import EngineConfig
from flare_ray.contracts.manifest import PreparedManifest
from flare_ray.contracts.messages import Finished
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.contracts.tiers import Tier
from flare_ray.device.state import snapshot_host
from tests.actors.test_core import Consumer
from tests.recipes.test_prefix_reuse import RECIPES

GREEDY = SamplingSpec(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=0)
LOWER = frozenset({Tier.DEVICE, Tier.HOST})
REST_S = 30.0
ROOM_FOR_ALL = 2048
"""Tokens of a page pool."""


ALWAYS = "glm-5.3-flash"
"""The others are slow: `test_tiers.py` runs every recipe's exactness always."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name == ALWAYS else [pytest.mark.slow]) for name in RECIPES
    ],
)
def folder(request, tmp_path_factory) -> Path:
    return RECIPES[request.param](tmp_path_factory.mktemp("checkpoint"))


def settings(folder: Path, cache: dict, **fields) -> EngineConfig:
    return EngineConfig(
        checkpoint=str(folder),
        device="cpu",
        dtype="float32",
        concurrency=2,
        context_tokens=320,
        prefill_tokens=128,
        speculation={"families": "speculative", "draft_tokens": 3},
        prefix_cache=cache,
        **fields,
    )


def spelled(_config: EngineConfig, manifest: PreparedManifest) -> list[bytes]:
    return [b"%d " % token for token in range(manifest.vocab_size)]


class Served:
    """An engine and what it says."""

    def __init__(self, config: EngineConfig) -> None:
        # Tokens in, tokens out: what they spell does not matter here.
        with (
            mock.patch.object(inprocess, "engine_token_bytes", spelled),
            mock.patch.object(service, "grammar_token_bytes", spelled),
        ):
            self.core: EngineCore = inprocess.start_inprocess(config)
        self._number = 0

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.shutdown(0.0)

    def submit(self, prompt, max_tokens=12) -> tuple[str, Consumer]:
        """Ask and do not wait: the request's id, and who hears the answer."""
        self._number += 1
        consumer = Consumer()
        request = GenerationRequest(
            request_id=f"r{self._number}",
            prompt_tokens=tuple(prompt),
            sampling=GREEDY,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        self.core.submit(request, consumer)
        return request.request_id, consumer

    def say(self, prompt, max_tokens=12) -> tuple[list[int], int]:
        """(text, cached tokens)."""
        _, consumer = self.submit(prompt, max_tokens)
        end = consumer.end()
        assert isinstance(end, Finished), end
        return consumer.tokens, end.cached_tokens

    def rest(self) -> None:
        """Wait until nothing moves between tiers."""
        deadline = time.monotonic() + REST_S
        while self.core._controller.cache.is_moving:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def tier(self, name: str):
        return next(t for t in self.core.cache_stats().tiers if t.tier == name)


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 50, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def cold(folder):
    with Served(settings(folder, {"enabled": False})) as engine:
        yield engine


def disk_cache(path: Path, **fields) -> dict:
    return {"host_bytes": 8 << 20, "disk_path": str(path), "disk_bytes": 64 << 20, **fields}


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_restarted_engine_goes_on_from_what_it_stored(folder, cold, tmp_path, queue_depth):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((63, 64, 65, 130, 200))]
    # Pages for all prefixes: one that is evicted before its copy begins would be lost.
    config = settings(
        folder, disk_cache(tmp_path), queue_depth=queue_depth, page_pool_tokens=ROOM_FOR_ALL
    )
    with Served(config) as engine:
        for prompt in prompts:
            engine.say(prompt, 3)
        if queue_depth == 1:
            engine.rest()
        else:
            engine.core.shutdown(REST_S)  # a drain that writes what is not written yet
    restored = 0
    with Served(config) as engine:
        for prompt in prompts:
            text, cached = engine.say([*prompt, 7, 9])
            assert text == cold.say([*prompt, 7, 9])[0]
            assert cached == (len(prompt) if len(prompt) >= 64 else 0)
            restored += cached
        assert engine.tier("disk").restored_tokens == restored
        assert engine.tier("disk").corrupt_files == 0


def test_turns_after_a_restart_start_from_the_end_of_the_answer(folder, cold, tmp_path):
    config = settings(folder, disk_cache(tmp_path))
    prompt = prompt_of(100, 3)
    with Served(config) as engine:
        text, _ = engine.say(prompt, 30)
        engine.rest()
    turn = [*prompt, *text, 5, 6]
    with Served(config) as engine:
        assert engine.say(turn) == (cold.say(turn)[0], 129)


def test_two_ranks_store_and_restore_their_own_parts(folder, cold, tmp_path):
    prompt = prompt_of(150, 4)
    config = settings(folder, disk_cache(tmp_path), tensor_parallel_size=2)
    with Served(config) as engine:
        engine.say(prompt, 2)
        engine.rest()
    names = {path.suffixes[0] for path in tmp_path.glob("engine-0/*.part")}
    assert names == {".r0", ".r1"}
    with Served(config) as engine:
        assert engine.say([*prompt, 8])[1] == 150
        engine.core.reset_cache(LOWER)
        for part in tmp_path.glob("engine-0/*.r1.part"):
            part.write_bytes(part.read_bytes()[:-1] + b"\x01")
        text, cached = engine.say([*prompt, 8, 9])
        assert cached == 0 and text == cold.say([*prompt, 8, 9])[0]
        assert engine.tier("disk").corrupt_files >= 1


def test_one_lacking_part_makes_a_snapshot_unusable(folder, tmp_path):
    config = settings(folder, disk_cache(tmp_path), tensor_parallel_size=2)
    with Served(config) as engine:
        engine.say(prompt_of(150, 4), 2)
        engine.rest()
    for part in tmp_path.glob("engine-0/*.r1.part"):
        part.unlink()
    with Served(config) as engine:
        assert engine.say(prompt_of(150, 4), 2)[1] == 0
        assert engine.tier("disk").corrupt_files >= 1
        engine.rest()
        assert len(list(tmp_path.glob("engine-0/*.r0.part"))) == engine.tier("disk").snapshots


@pytest.mark.parametrize("change", ["touched", "layout", "family"])
def test_files_of_another_engine_are_removed_unread(folder, tmp_path, change):
    cache = disk_cache(tmp_path)
    with Served(settings(folder, cache)) as engine:
        engine.say(prompt_of(150, 4), 2)
        engine.rest()
    config = settings(folder, cache)
    if change == "family":
        config = config.model_copy(
            update={
                "speculation": config.speculation.model_copy(
                    update={"families": "ordinary", "draft_tokens": None}
                )
            }
        )
    elif change == "touched":
        (folder / "model.safetensors").touch()
    else:
        for file in tmp_path.glob("engine-0/*.json"):
            outer = json.loads(file.read_text())
            outer["manifest"]["label"] = "0" * 64
            file.write_text(json.dumps(outer))
    with Served(config) as engine:
        assert engine.say(prompt_of(150, 4), 2)[1] == 0
        assert engine.tier("disk").corrupt_files >= 1


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_damage_of_any_kind_never_changes_a_text(folder, cold, tmp_path, random_seed, rounds):
    """Bit flips, truncation, exchanged and foreign files, before a start and while it runs."""
    rng = random.Random(random_seed)
    config = settings(folder, disk_cache(tmp_path))
    prompts = [prompt_of(length, 20 + length) for length in (64, 100, 129, 190)]
    expected = [cold.say([*prompt, 7])[0] for prompt in prompts]
    for _ in range(rounds):
        with Served(config) as engine:
            for prompt, text in zip(prompts, expected, strict=True):
                assert engine.say([*prompt, 7])[0] == text
            engine.rest()
            engine.core.reset_cache(LOWER)
            for file in damaged(rng, sorted(tmp_path.glob("engine-0/*.*"))):
                assert file.parent.name == "engine-0"
            for prompt, text in zip(prompts, expected, strict=True):
                assert engine.say([*prompt, 7])[0] == text
            engine.rest()
        damaged(rng, sorted(tmp_path.glob("engine-0/*.*")))


def damaged(rng: random.Random, files: list[Path]) -> list[Path]:
    """Spoil about half of the files; those that were touched."""
    touched = [file for file in files if rng.random() < 0.5]
    for file in touched:
        data = bytearray(file.read_bytes())
        kind = rng.choice(["flip", "cut", "longer", "exchange", "empty"])
        if kind == "flip" and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            data = data[: rng.randrange(len(data) + 1)]
        elif kind == "longer":
            data += bytes(rng.randrange(1, 100))
        elif kind == "exchange":
            data = bytearray(rng.choice(files).read_bytes())
        else:
            data = bytearray()
        file.write_bytes(data)
    return touched


def test_full_disk_leaves_no_file_behind_and_serving_goes_on(folder, cold, tmp_path, monkeypatch):
    def no_space(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Served(settings(folder, disk_cache(tmp_path))) as engine:
        monkeypatch.setattr(snapshot_host.os, "fsync", no_space)
        for seed in range(3):
            prompt = prompt_of(100, 30 + seed)
            assert engine.say(prompt)[0] == cold.say(prompt)[0]
        engine.rest()
        assert "No space left" in engine.tier("disk").stopped
        assert [path.name for path in tmp_path.glob("engine-0/*")] == ["lock"]
        assert engine.say(prompt_of(100, 30), 3)[1] == 100
        text = engine.core.snapshot()
        assert text is not None


def test_second_engine_on_one_path_takes_a_directory_of_its_own(folder, tmp_path):
    config = settings(folder, disk_cache(tmp_path))
    with Served(config) as first, Served(config) as second:
        for engine in (first, second):
            engine.say(prompt_of(100, 4), 2)
            engine.rest()
            assert engine.tier("disk").snapshots
    assert {path.name for path in tmp_path.iterdir()} == {"engine-0", "engine-1"}


def test_size_cap_holds_at_every_moment(folder, tmp_path):
    cap = 3 << 20
    with Served(settings(folder, disk_cache(tmp_path, disk_bytes=cap))) as engine:
        for seed in range(12):
            engine.say(prompt_of(128, 40 + seed), 2)
            engine.rest()
            found = engine.tier("disk")
            assert found.used_bytes == bytes_below(tmp_path) <= cap
        assert found.snapshots > 1
    with Served(settings(folder, disk_cache(tmp_path, disk_bytes=cap // 2))) as engine:
        engine.say(prompt_of(70, 1), 1)
        engine.rest()
        assert engine.tier("disk").used_bytes == bytes_below(tmp_path) <= cap // 2


def bytes_below(path: Path) -> int:
    """Of everything that an engine of one rank keeps on disk."""
    return sum(file.stat().st_size for file in path.glob("engine-0/*"))


STORMS = [2, pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.parametrize("rounds", STORMS)
def test_stop_at_any_moment_of_a_move_leaves_nothing_to_repair(
    folder, cold, tmp_path, random_seed, rounds
):
    """Stops without a drain while prefixes are read, copied and written; none hangs."""
    rng = random.Random(random_seed)
    config = settings(folder, disk_cache(tmp_path), queue_depth=2)
    prompts = [prompt_of(length, 50 + length) for length in (64, 100, 129, 190)]
    expected = [cold.say([*prompt, 7])[0] for prompt in prompts]
    for _ in range(rounds):
        with Served(config) as engine:
            assert engine.tier("disk").corrupt_files == 0
            engine.core.reset_cache(LOWER)
            for number in range(8):
                engine.submit([*rng.choice(prompts), number])
            time.sleep(rng.uniform(0.0, 0.05))
            started = time.monotonic()
            engine.core.shutdown(0.0)
            assert time.monotonic() - started < REST_S
        names = [path.name for path in tmp_path.glob("engine-0/*")]
        assert not [name for name in names if name.endswith(".new")]
    with Served(config) as engine:
        for prompt, text in zip(prompts, expected, strict=True):
            assert engine.say([*prompt, 7])[0] == text
        assert engine.tier("disk").corrupt_files == 0


@pytest.mark.parametrize("rounds", STORMS)
def test_vllm_46289_resets_and_cancels_during_restores_change_no_text(
    folder, cold, tmp_path, random_seed, rounds
):
    rng = random.Random(random_seed)
    config = settings(folder, disk_cache(tmp_path), queue_depth=2, debug_checks=True)
    prompts = [prompt_of(length, 70 + length) for length in (64, 100, 129, 190)]
    expected = [cold.say([*prompt, 7])[0] for prompt in prompts]
    with Served(config) as engine:
        for _ in range(rounds):
            asked = []
            for _ in range(12):
                place = rng.randrange(len(prompts))
                name, consumer = engine.submit([*prompts[place], 7])
                asked.append((place, consumer))
                time.sleep(rng.choice([0.0, 0.0, 0.002, 0.01]))
                if rng.random() < 0.2:
                    engine.core.cancel(name)
                if rng.random() < 0.4:
                    tiers = frozenset(tier for tier in Tier if rng.random() < 0.6)
                    engine.core.reset_cache(tiers)
            for place, consumer in asked:
                end = consumer.end()
                if isinstance(end, Finished):
                    assert consumer.tokens == expected[place]
                else:
                    assert end.code == "cancelled"
        engine.rest()
        assert engine.tier("disk").corrupt_files == 0 and not engine.core.fatal
