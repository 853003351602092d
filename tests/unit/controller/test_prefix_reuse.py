"""Reuse of prefixes by the controller: what is kept, found, shared, pinned, evicted (contract: M4).

The fake ranks keep the tokens of every page and snapshot row, and refuse a plan that would restore
other tokens than its request's, write into a shared page, or save what is not there.
"""

import random

import msgspec
import pytest

from flare_ray.contracts.messages import Finished
from flare_ray.contracts.shapes import GraphKind
from tests.support.fake_channel import accepts_up_to, hashed_accepts, listed_script, make_manifest
from tests.unit.controller.conftest import GREEDY

EOS = 0


def prompt_of(length, seed=0):
    return tuple(10 + (7 * i * i + i + seed) % 240 for i in range(length))


def with_rows(manifest, rows):
    return msgspec.structs.replace(manifest, snapshot_rows=rows)


def run(harness, request_id, prompt, **fields):
    harness.submit(request_id, prompt, **fields)
    harness.run_until_idle()
    end = harness.end(request_id)
    assert isinstance(end, Finished), end
    return end


@pytest.mark.parametrize(
    ("length", "kept"),
    [(1, 0), (2, 0), (63, 0), (64, 0), (65, 64), (127, 64), (128, 0), (129, 128), (200, 192)],
)
def test_without_resume_a_repeated_prompt_keeps_a_token_to_consume(make_harness, length, kept):
    manifest = make_manifest(prefill_tokens=256)
    shapes = tuple(s for s in manifest.shapes if s.kind is not GraphKind.RESUME)
    harness = make_harness(manifest=msgspec.structs.replace(manifest, shapes=shapes))
    prompt = prompt_of(length)
    first = run(harness, "first", prompt, max_tokens=3)
    second = run(harness, "second", prompt, max_tokens=3)
    assert first.cached_tokens == 0
    assert second.cached_tokens == kept
    assert harness.tokens("second") == harness.expected(prompt, 3)
    harness.assert_all_free()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_vllm_54360_and_52244_repeated_prompt_of_any_length_is_restored_whole(make_harness, length):
    harness = make_harness(manifest=make_manifest(prefill_tokens=256))
    prompt = prompt_of(length)
    run(harness, "first", prompt, max_tokens=3)
    for name in ("second", "third"):
        assert run(harness, name, prompt, max_tokens=90).cached_tokens == length
        assert harness.tokens(name) == harness.expected(prompt, 90)
    kinds = [plan.shape.kind for plan in harness.channel.plans]
    assert kinds.count(GraphKind.RESUME) == 2
    harness.assert_all_free()


def test_several_whole_prompts_share_one_resume(make_harness):
    harness = make_harness()
    prompt = prompt_of(100)
    run(harness, "root", prompt, max_tokens=1)
    for name in "abcd":
        harness.submit(name, prompt, max_tokens=5)
    harness.run_until_idle()
    assert all(harness.end(name).cached_tokens == 100 for name in "abcd")
    kinds = [plan.shape.kind for plan in harness.channel.plans]
    assert kinds.count(GraphKind.RESUME) < 4


@pytest.mark.parametrize("length", [1, 5, 64, 100, 128])
def test_longer_prompt_is_restored_from_the_end_of_a_shorter_one(make_harness, length):
    harness = make_harness()
    prompt = prompt_of(length)
    run(harness, "first", prompt, max_tokens=1)
    longer = (*prompt, 33, 44, 55)
    assert run(harness, "second", longer, max_tokens=9).cached_tokens == length
    assert harness.tokens("second") == harness.expected(longer, 9)


def test_next_turn_is_restored_from_the_end_of_the_answer(make_harness):
    harness = make_harness()
    prompt = prompt_of(70)
    run(harness, "first", prompt, max_tokens=50)
    turn = (*prompt, *harness.tokens("first"), 99, 98)
    # the last token of the answer stayed pending
    assert run(harness, "second", turn, max_tokens=5).cached_tokens == 70 + 49


def test_answer_is_kept_at_doubling_distances(make_harness):
    harness = make_harness(accepts=hashed_accepts(0.7))
    prompt = prompt_of(10)
    run(harness, "first", prompt, max_tokens=400)
    answer = harness.tokens("first")
    found = []
    for boundary in range(64, 400, 64):
        branch = (*prompt, *answer)[:boundary]
        end = run(harness, f"b{boundary}", (*branch, 9), max_tokens=1)
        found.append(end.cached_tokens)
    # 64, 128, 256 were kept while decoding; 320 and 384 only by the branches themselves
    assert found[:2] == [64, 128] and found[3] == 256
    assert found[2] in (128, 10 + 10) and found[4] == 256


@pytest.mark.parametrize("width", [1, 3, 6])
def test_nothing_behind_a_stop_string_is_kept(make_harness, width):
    prompt = prompt_of(60)
    text = list(b"one two three four five six seven eight nine ten eleven")
    harness = make_harness(
        script=listed_script({prompt: text}, then=33),
        accepts=accepts_up_to(7),
        speculation={"policy": "fixed", "fixed_width": width},
    )
    run(harness, "first", prompt, max_tokens=100, stop=(b"thr",))
    kept = len(b"one two thr")
    for snapshot in harness.controller._snapshots.index:
        assert snapshot.tokens <= 60 + kept


def test_eos_end_is_kept_without_the_eos(make_harness):
    prompt = prompt_of(5)
    harness = make_harness(
        manifest=make_manifest(eos_ids=(EOS,)),
        script=listed_script({prompt: [20, 21, EOS]}, then=30),
    )
    run(harness, "first", prompt, max_tokens=50)
    lengths = sorted(s.tokens for s in harness.controller._snapshots.index)
    assert lengths == [5, 7]


def test_branches_share_pages_while_they_run(make_harness):
    harness = make_harness(manifest=make_manifest(slots=4, num_pages=14))
    prompt = prompt_of(320)
    run(harness, "root", (*prompt, 1), max_tokens=1)
    for number in range(4):
        harness.submit(f"b{number}", (*prompt, 2, number), max_tokens=30)
    harness.step()
    # alone each needs six pages; four shared ones, and two of its own, fit together
    assert harness.controller.stats().running == 4
    harness.run_until_idle()
    for number in range(4):
        expected = harness.expected((*prompt, 2, number), 30)
        assert harness.tokens(f"b{number}") == expected
        assert harness.end(f"b{number}").cached_tokens == 320
    harness.assert_all_free()


@pytest.mark.parametrize("length", [64, 100, 128, 300])
def test_equal_prompts_that_arrive_together_are_consumed_once(make_harness, length):
    harness = make_harness(manifest=make_manifest(prefill_tokens=96))
    prompt = prompt_of(length)
    for name in "abcd":
        harness.submit(name, prompt, max_tokens=20)
    harness.run_until_idle()
    assert harness.end("a").cached_tokens == 0
    # they do not wait for less than a page more than the last boundary saves
    assert all(harness.end(name).cached_tokens >= length // 64 * 64 for name in "bcd")
    for name in "abcd":
        assert harness.tokens(name) == harness.expected(prompt, 20)
    harness.assert_all_free()


def test_branches_that_arrive_together_consume_their_prefix_once(make_harness):
    harness = make_harness(manifest=make_manifest(prefill_tokens=96))
    root = prompt_of(192)
    for number in range(4):
        harness.submit(f"b{number}", (*root, number), max_tokens=5)
    harness.run_until_idle()
    assert [harness.end(f"b{n}").cached_tokens for n in range(4)] == [0, 192, 192, 192]


def test_wait_for_a_prefix_ends_when_its_request_is_cancelled(make_harness):
    harness = make_harness()
    prompt = prompt_of(900)
    harness.submit("leader", prompt, max_tokens=5)
    harness.step(2)
    harness.submit("follower", prompt, max_tokens=5)
    harness.step(2)
    assert harness.controller.stats().waiting == 1
    harness.controller.cancel("leader")
    harness.run_until_idle()
    assert harness.tokens("follower") == harness.expected(prompt, 5)
    harness.assert_all_free()


def test_another_salt_shares_nothing(make_harness):
    harness = make_harness()
    prompt = prompt_of(130)
    run(harness, "a", prompt, max_tokens=2, cache_salt="tenant a")
    assert run(harness, "b", prompt, max_tokens=2, cache_salt="tenant b").cached_tokens == 0
    assert run(harness, "c", prompt, max_tokens=2, cache_salt="tenant a").cached_tokens == 130


def test_disabled_cache_keeps_nothing(make_harness):
    harness = make_harness(prefix_cache={"enabled": False})
    prompt = prompt_of(130)
    run(harness, "a", prompt, max_tokens=2)
    assert run(harness, "b", prompt, max_tokens=2).cached_tokens == 0
    assert all(not (p.saves or p.captures or p.restores) for p in harness.channel.plans)


def test_snapshots_give_their_pages_back_when_requests_need_them(make_harness):
    harness = make_harness(manifest=make_manifest(slots=2, context_tokens=320, num_pages=7))
    for number in range(12):
        prompt = prompt_of(150, seed=number)
        run(harness, f"r{number}", prompt, max_tokens=20)
        assert harness.tokens(f"r{number}") == harness.expected(prompt, 20)
    run(harness, "large", prompt_of(250, seed=99), max_tokens=60)
    harness.assert_all_free()
    assert harness.controller._snapshots.index.evicted_tokens > 0


def test_recently_used_prefix_outlives_others(make_harness):
    harness = make_harness(manifest=with_rows(make_manifest(), 4))
    shared = prompt_of(128)
    run(harness, "root", (*shared, 1), max_tokens=1)
    for number in range(8):
        end = run(harness, f"hit{number}", (*shared, 2, number), max_tokens=1)
        assert end.cached_tokens >= 128


def test_cancelled_request_lets_go_of_its_prefix(make_harness):
    harness = make_harness(manifest=make_manifest(slots=1))
    prompt = prompt_of(100)
    run(harness, "root", prompt, max_tokens=2)
    harness.submit("gone", prompt, max_tokens=50)
    harness.controller.cancel("gone")
    harness.run_until_idle()
    harness.submit("later", prompt, max_tokens=50)
    harness.step()
    harness.controller.cancel("later")
    harness.run_until_idle()
    assert run(harness, "last", prompt, max_tokens=3).cached_tokens == 100
    harness.assert_all_free()


def test_capture_of_a_prompt_that_met_nonfinite_logits_is_dropped(make_harness):
    harness = make_harness()
    harness.submit("bad", prompt_of(100), max_tokens=20)
    harness.step()
    harness.channel.poison(1, 1)
    harness.run_until_idle()
    harness.assert_all_free()


@pytest.mark.parametrize("snapshot_rows", [1, 8, 40])
def test_sglang_36552_random_branches_and_cancels_leave_every_text_as_if_cold(
    make_harness, random_seed, snapshot_rows
):
    rng = random.Random(random_seed)
    manifest = make_manifest(slots=4, context_tokens=512, num_pages=33, prefill_tokens=96)
    manifest = with_rows(manifest, snapshot_rows)
    harness = make_harness(manifest=manifest, accepts=hashed_accepts(0.8))
    roots = [prompt_of(rng.choice([1, 63, 64, 65, 127, 128, 129, 190]), s) for s in range(4)]
    prompts, cancelled = {}, set()
    for number in range(80):
        root = rng.choice(roots)
        base = root[: rng.randint(1, len(root))] if rng.random() < 0.3 else root
        prompt = (*base, *prompt_of(rng.choice([0, 1, 5, 70]), rng.randint(0, 2)))
        prompts[f"r{number}"] = (prompt, rng.randint(1, 150))
        harness.submit(f"r{number}", prompt, max_tokens=prompts[f"r{number}"][1])
        harness.step(rng.randint(0, 6))
        if rng.random() < 0.15:
            cancelled.add(f"r{number}")
            harness.controller.cancel(f"r{number}")
        harness.controller.check_integrity()
    harness.run_until_idle()
    for name, (prompt, budget) in prompts.items():
        if isinstance(harness.end(name), Finished):
            assert harness.tokens(name) == harness.expected(prompt, budget), name
        else:
            assert name in cancelled
    assert harness.channel.restores or snapshot_rows < 8
    harness.assert_all_free()


@pytest.mark.parametrize("repetition", [1.0, 1.3])
def test_restored_request_tells_the_ranks_which_tokens_its_penalty_must_know(
    make_harness, repetition
):
    harness = make_harness()
    prompt = prompt_of(100)
    sampling = msgspec.structs.replace(GREEDY, repetition_penalty=repetition)
    run(harness, "first", prompt, max_tokens=1, sampling=sampling)
    longer = (*prompt, 33)
    assert run(harness, "second", longer, max_tokens=2, sampling=sampling).cached_tokens == 100
    first, second = (init for plan in harness.channel.plans for init in plan.inits)
    assert first.seen == b""
    told = {t for t in range(len(second.seen) * 8) if second.seen[t >> 3] >> (t & 7) & 1}
    assert told == (set(prompt) if repetition != 1.0 else set())
