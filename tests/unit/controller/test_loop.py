"""The loop over a fake engine: text, counts, ends, resources, failures; at both queue depths."""

import itertools
import threading

import msgspec
import pytest

from flare_ray.contracts.messages import Admitted, Delta, Finished, Heartbeat
from flare_ray.contracts.plan import MAX_BAD_WORDS
from flare_ray.contracts.shapes import GraphKind
from flare_ray.controller.loop import Controller
from flare_ray.controller.sampling import MAX_LOGIT_BIAS
from flare_ray.errors import ConfigError, Overloaded
from flare_ray.metrics.recorder import Recorder
from tests.support.fake_channel import (
    CollectingOutput,
    FakeChannel,
    accepts_up_to,
    hashed_accepts,
    hashed_script,
    listed_script,
    make_manifest,
)
from tests.unit.controller.conftest import FIRST_TEXT_TOKEN, GREEDY, TOKEN_BYTES, first_item

EOS = 0


def test_one_request_gets_exactly_its_text(make_harness):
    harness = make_harness()
    harness.submit("r", max_tokens=30)
    harness.run_until_idle()
    assert isinstance(first_item(harness, "r"), Admitted)
    assert harness.tokens("r") == harness.expected((1, 2, 3), 30)
    end = harness.end("r")
    assert (end.reason, end.prompt_tokens, end.completion_tokens) == ("length", 3, 30)
    harness.assert_all_free()


@pytest.mark.parametrize("max_tokens", range(1, 10))
@pytest.mark.parametrize("accepted", [0, 3, 7])
def test_output_has_exactly_max_tokens_for_every_accepted_count(make_harness, max_tokens, accepted):
    harness = make_harness(
        manifest=make_manifest(draft_tokens=7),
        accepts=accepts_up_to(accepted),
        speculation={"policy": "fixed"},
    )
    harness.submit("r", max_tokens=max_tokens)
    harness.run_until_idle()
    assert harness.tokens("r") == harness.expected((1, 2, 3), max_tokens)
    assert harness.end("r").completion_tokens == max_tokens


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_eos_inside_an_accepted_prefix_ends_the_request_for_every_width(make_harness, width):
    prompt = (1, 2, 3)
    harness = make_harness(
        manifest=make_manifest(draft_tokens=7, eos_ids=(EOS,)),
        script=listed_script({prompt: [20, 21, 22, EOS, 23, 24, 25, 26]}, then=30),
        accepts=accepts_up_to(7),
        speculation={"policy": "fixed", "fixed_width": width},
    )
    harness.submit("r", prompt, max_tokens=20)
    harness.run_until_idle()
    assert harness.tokens("r") == [20, 21, 22]
    end = harness.end("r")
    assert (end.reason, end.completion_tokens, end.stop_reason) == ("stop", 4, None)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_stop_string_ends_the_request_with_equal_counts_for_every_width(make_harness, width):
    prompt = (1, 2, 3)
    harness = make_harness(
        manifest=make_manifest(draft_tokens=7),
        script=listed_script({prompt: list(b"one two three four five six")}, then=33),
        accepts=accepts_up_to(7),
        speculation={"policy": "fixed", "fixed_width": width},
    )
    harness.submit("r", prompt, max_tokens=100, stop=(b"ree f",))
    harness.run_until_idle()
    assert bytes(harness.tokens("r")) == b"one two th"
    end = harness.end("r")
    assert (end.reason, end.completion_tokens, end.stop_reason) == ("stop", 15, "ree f")
    harness.assert_all_free()


def test_ignore_eos_continues_through_eos(make_harness):
    prompt = (1, 2, 3)
    harness = make_harness(
        manifest=make_manifest(eos_ids=(EOS,)),
        script=listed_script({prompt: [20, EOS, 21]}, then=30),
    )
    harness.submit("r", prompt, max_tokens=5, ignore_eos=True)
    harness.run_until_idle()
    assert harness.tokens("r") == [20, EOS, 21, 30, 30]


def test_first_token_may_end_the_request(make_harness):
    prompt = (1, 2, 3)
    harness = make_harness(
        manifest=make_manifest(eos_ids=(EOS,)), script=listed_script({prompt: [EOS]})
    )
    harness.submit("r", prompt, max_tokens=5)
    harness.run_until_idle()
    assert harness.tokens("r") == []
    assert harness.end("r").completion_tokens == 1
    harness.assert_all_free()


def test_long_prompt_is_prefilled_in_chunks_without_stalling_others(make_harness):
    harness = make_harness()
    harness.submit("short", (5,), max_tokens=100)
    harness.run_rounds(3)
    harness.submit("long", tuple(range(10, 200)) * 4, max_tokens=4)
    harness.run_until_idle()
    kinds = [plan.shape.kind for plan in harness.channel.plans]
    chunks = [place for place, kind in enumerate(kinds) if kind is GraphKind.PREFILL]
    assert len(chunks) >= 1 + 760 // 64
    beside = [after - before for before, after in itertools.pairwise(chunks[1:])]
    assert set(beside[:-1]) == {2}, "one round between two chunks, and no more"
    assert harness.tokens("long") == harness.expected(tuple(range(10, 200)) * 4, 4)


def test_short_prompt_waits_one_chunk_of_a_long_one(make_harness):
    harness = make_harness()
    harness.submit("long", tuple(range(200)) * 4, max_tokens=4)
    harness.step()
    harness.submit("short", (7, 8), max_tokens=2)
    harness.run_until_idle()
    plans = harness.channel.plans
    place = next(i for i, p in enumerate(plans) for lane in p.prefill if lane.tokens == (7, 8))
    assert place <= 1 + harness.config.queue_depth


def test_several_short_prompts_share_one_prefill_program(make_harness):
    harness = make_harness()
    for name in "abcd":
        harness.submit(name, (ord(name),), max_tokens=3)
    harness.run_until_idle()
    assert len(harness.channel.plans[0].prefill) == 4
    for name in "abcd":
        assert harness.tokens(name) == harness.expected((ord(name),), 3)


def test_requests_beyond_the_slots_wait_and_all_finish(make_harness):
    harness = make_harness()
    for number in range(11):
        harness.submit(f"r{number}", (number, 1), max_tokens=5 + number)
    harness.step()
    stats = harness.controller.stats()
    assert (stats.running, stats.waiting) == (4, 7)
    harness.run_until_idle()
    for number in range(11):
        assert harness.tokens(f"r{number}") == harness.expected((number, 1), 5 + number)
    harness.assert_all_free()


# Pages.


@pytest.mark.parametrize(("preemption", "running"), [(False, 2), (True, 4)])
def test_requests_wait_for_pages_and_none_runs_out(make_harness, preemption, running):
    harness = make_harness(
        manifest=make_manifest(num_pages=17, context_tokens=1024),
        admission={"preemption": preemption},
    )
    for number in range(6):
        harness.submit(f"r{number}", (number,) * 100, max_tokens=300)
    harness.step()
    assert harness.controller.stats().running == running
    harness.run_until_idle()
    for number in range(6):
        assert harness.tokens(f"r{number}") == harness.expected((number,) * 100, 300)
    harness.assert_all_free()


def test_request_at_the_context_limit_gets_its_last_token(make_harness):
    harness = make_harness(manifest=make_manifest(context_tokens=192), accepts=accepts_up_to(7))
    harness.submit("r", (4,) * 100, max_tokens=92)
    harness.run_until_idle()
    assert harness.tokens("r") == harness.expected((4,) * 100, 92)


def test_second_queued_round_still_drafts_beyond_the_last_committed_page(make_harness):
    """Prompt and budget fill one page exactly; two rounds ahead positions may reach a second."""
    harness = make_harness(accepts=accepts_up_to(7), speculation={"policy": "fixed"})
    harness.submit("r", (4,) * 55, max_tokens=10)
    harness.run_until_idle()
    ceilings = [plan.lanes[0].ceiling for plan in harness.channel.plans if plan.lanes][:2]
    assert ceilings == ([5, 2] if harness.config.queue_depth == 1 else [5, 5])


def test_head_of_the_queue_is_not_overtaken_while_it_waits_for_pages(make_harness):
    harness = make_harness(
        manifest=make_manifest(num_pages=17, context_tokens=1024),
        admission={"preemption": False},
    )
    harness.submit("first", (1,), max_tokens=500)
    harness.submit("large", (2,), max_tokens=1000)
    harness.submit("small", (3,), max_tokens=5)
    harness.run_until_idle()
    order = [
        item.request_id
        for _, items in harness.output.batches
        for item in items
        if isinstance(item, Finished)
    ]
    assert order == ["first", "large", "small"]


# Publication.


def test_items_of_a_round_go_out_in_one_call_per_address(make_harness):
    harness = make_harness()
    for number in range(4):
        harness.submit(f"r{number}", (number,), max_tokens=20, reply_to=f"ingress{number % 2}")
    harness.run_until_idle()
    deltas = [
        (address, sum(isinstance(item, Delta) for item in items))
        for address, items in harness.output.batches
    ]
    assert max(count for _, count in deltas) == 2
    assert {address for address, _ in deltas} == {"ingress0", "ingress1"}


def test_heartbeats_reach_addresses_with_open_requests_every_two_seconds(make_harness):
    harness = make_harness()
    harness.channel.latency_s = lambda plan: 0.1
    harness.submit("r", max_tokens=120, reply_to="remote")
    harness.submit("local", (9,), max_tokens=40, reply_to="")
    harness.run_until_idle()
    elapsed_s = harness.clock() / 1e9
    beats = {
        address: sum(
            isinstance(item, Heartbeat)
            for a, i in harness.output.batches
            if a == address
            for item in i
        )
        for address in ("remote", "")
    }
    assert elapsed_s > 4
    assert elapsed_s / 2 - 2 <= beats["remote"] <= elapsed_s / 2 + 1
    assert beats[""] == 0
    harness.step(10)
    assert isinstance(harness.output.batches[-1][1][-1], Finished | Delta | Heartbeat)


def test_idle_controller_sends_nothing(make_harness):
    harness = make_harness()
    harness.step(20)
    assert harness.output.batches == []


def test_heartbeat_comes_while_a_round_is_slow(make_harness):
    harness = make_harness()
    harness.channel.latency_s = lambda plan: 9.0
    harness.submit("r", max_tokens=2)
    harness.step(12)
    beats = [i for _, items in harness.output.batches for i in items if isinstance(i, Heartbeat)]
    assert len(beats) >= 3


# Stopping, threads.


def test_drain_finishes_what_is_live_and_refuses_the_rest(make_harness):
    harness = make_harness()
    harness.submit("r", max_tokens=30)
    harness.step()
    harness.controller.stop(drain=True)
    with pytest.raises(Overloaded) as refusal:
        harness.submit("late")
    assert refusal.value.status == 503
    harness.controller.run()
    assert harness.tokens("r") == harness.expected((1, 2, 3), 30)
    assert harness.end("r").reason == "length"


def test_stop_without_drain_fails_what_is_live(make_harness):
    harness = make_harness()
    harness.submit("r", max_tokens=300)
    harness.run_rounds(3)
    harness.controller.stop(drain=False)
    harness.controller.run()
    assert (harness.end("r").code, harness.end("r").status) == ("cancelled", 503)


def test_run_serves_submits_from_other_threads_and_stops(queue_depth):
    manifest = make_manifest()
    script = hashed_script(256, FIRST_TEXT_TOKEN)
    channel = FakeChannel(manifest, script, hashed_accepts(0.6), latency_s=lambda plan: 0.0005)
    output = CollectingOutput()
    from flare_ray.config import EngineConfig
    from flare_ray.contracts.request import GenerationRequest
    from tests.unit.controller.conftest import GREEDY

    config = EngineConfig(
        checkpoint="scripted", context_tokens=1024, queue_depth=queue_depth, device="cpu"
    )
    controller = Controller(
        manifest,
        config,
        channel=channel,
        output=output,
        token_bytes=TOKEN_BYTES,
        recorder=Recorder("engine", "e1"),
    )
    loop = threading.Thread(target=controller.run)
    loop.start()

    def client(number):
        for turn in range(5):
            controller.submit(
                GenerationRequest(
                    request_id=f"{number}-{turn}",
                    prompt_tokens=(number, turn),
                    sampling=GREEDY,
                    max_tokens=20,
                )
            )

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    controller.stop(drain=True)
    loop.join(timeout=30)
    assert not loop.is_alive()
    for number in range(8):
        for turn in range(5):
            deltas = [i for i in output.items(f"{number}-{turn}") if isinstance(i, Delta)]
            tokens = [token for delta in deltas for token in delta.tokens]
            assert tokens == [script((number, turn), index) for index in range(20)]


# Start-up.


@pytest.mark.parametrize(
    ("speculation", "word"),
    [
        ({"history_drafts": True, "draft_tokens": 0}, "history_drafts"),
        ({"request_drafts": True, "draft_tokens": 0}, "request_drafts"),
        ({"policy": "fixed", "fixed_width": 8}, "fixed_width"),
        ({"draft_tokens": 7}, "draft_tokens"),
        ({"widths": (1, 8)}, "widths"),
    ],
)
def test_settings_beyond_what_was_prepared_are_refused_by_name(make_harness, speculation, word):
    with pytest.raises(ConfigError, match=word):
        make_harness(speculation=speculation)


def test_ordinary_family_is_served_without_drafts(make_harness):
    harness = make_harness(speculation={"draft_tokens": 0})
    harness.submit("r", max_tokens=12)
    harness.run_until_idle()
    kinds = {(plan.shape.kind, plan.shape.speculation) for plan in harness.channel.plans}
    assert kinds == {(GraphKind.PREFILL, False), (GraphKind.DECODE, False)}
    assert harness.tokens("r") == harness.expected((1, 2, 3), 12)


def test_counters_agree_with_the_devices_own_account(make_harness):
    harness = make_harness()
    for number in range(9):
        harness.submit(f"r{number}", (number,), max_tokens=40)
    harness.run_until_idle()
    lanes = [lane for plan in harness.channel.plans for lane in plan.lanes]
    values = {
        (sample.name, *sample.labels): sample.value
        for sample in harness.recorder.snapshot().samples
    }
    ends = [harness.end(f"r{number}") for number in range(9)]
    rounds = sum(
        value for key, value in values.items() if key[0] == "flare_spec_decode_lane_rounds"
    )
    assert values["flare_spec_decode_dead_lanes",] == harness.channel.dead_lanes
    assert rounds == len(lanes) - harness.channel.dead_lanes
    assert values["flare_spec_decode_emitted_tokens",] == 9 * (40 - 1), "the first is prefill's"
    assert values["flare_generation_tokens",] == 9 * 40
    accepted = values["flare_spec_decode_num_accepted_tokens",]
    by_position = [
        value
        for key, value in values.items()
        if key[0] == "flare_spec_decode_num_accepted_tokens_per_pos"
    ]
    assert accepted == sum(by_position) == sum(end.drafts_accepted for end in ends)
    offered = values["flare_spec_decode_num_draft_tokens",]
    assert offered == sum(end.drafts_offered for end in ends) > 0


def test_gauges_return_to_zero_when_idle(make_harness):
    harness = make_harness()
    harness.submit("r", max_tokens=12)
    harness.run_until_idle()
    values = {sample.name: sample.value for sample in harness.recorder.snapshot().samples}
    assert values["flare_num_requests_running"] == 0
    assert values["flare_pages_free"] == values["flare_pages"]
    assert values["flare_generation_tokens"] == 12
    assert values["flare_prompt_tokens"] == 3


def test_gauges_return_to_zero_when_the_last_request_is_cancelled_while_its_round_runs(
    make_harness,
):
    harness = make_harness()
    harness.submit("r", max_tokens=100)
    harness.run_rounds(2)
    harness.controller.cancel("r")
    harness.run_until_idle()
    values = {sample.name: sample.value for sample in harness.recorder.snapshot().samples}
    assert values["flare_num_requests_running"] == 0
    assert values["flare_pages_free"] == values["flare_pages"]


def test_requests_with_the_most_rules_share_no_plan_and_all_finish(make_harness):
    """The channel refuses a plan above 64 KiB."""
    heavy = msgspec.structs.replace(
        GREEDY,
        logit_bias=tuple((token, 0.5) for token in range(MAX_LOGIT_BIAS)),
        bad_words=((1, 2, 3, 4, 5, 6, 7, 8),) * MAX_BAD_WORDS,
        min_tokens=2,
        presence_penalty=0.5,
    )
    harness = make_harness(manifest=make_manifest(slots=8))
    names = [f"r{i}" for i in range(8)]
    for place, name in enumerate(names):
        harness.submit(name, (1, place), max_tokens=4, sampling=GREEDY if place % 4 else heavy)
    harness.run_until_idle()
    inits = [init for plan in harness.channel.plans for init in plan.inits]
    assert sum(len(init.bad_words) == MAX_BAD_WORDS for init in inits) == 2
    assert sum(init.penalised for init in inits) == 2
    for plan in harness.channel.plans:
        assert sum(bool(init.rules) for init in plan.inits) <= 1
    for place, name in enumerate(names):
        assert harness.tokens(name) == harness.expected((1, place), 4)
    harness.assert_all_free()


@pytest.mark.parametrize("top", [-1, 0, 3])
@pytest.mark.parametrize("stop", [(), (b"never",), (TOKEN_BYTES[31] + TOKEN_BYTES[32],)])
def test_every_visible_token_comes_with_its_own_score(make_harness, top, stop):
    """Also where a stop string holds tokens back over rounds, and where it hides the last ones."""
    harness = make_harness(
        manifest=make_manifest(draft_tokens=7),
        script=lambda _, index: 20 + index,
        accepts=hashed_accepts(0.6),
    )
    harness.submit("r", max_tokens=30, stop=stop, top_logprobs=top)
    harness.run_until_idle()
    deltas = [item for item in harness.output.items("r") if isinstance(item, Delta)]
    tokens = [token for delta in deltas for token in delta.tokens]
    assert tokens == list(range(20, 31 if stop and stop != (b"never",) else 50))
    for delta in deltas:
        if top < 0:
            assert delta.scores == ()
            continue
        assert [score.logprob for score in delta.scores] == [-t / 8 for t in delta.tokens]
        for token, score in zip(delta.tokens, delta.scores, strict=True):
            assert score.top_ids == tuple(token + place for place in range(1, top + 1))


@pytest.mark.parametrize("top", [-1, 1])
@pytest.mark.parametrize("ender", ["eos", "stop token", "stop string"])
def test_token_that_ends_a_request_is_told_with_its_own_score(make_harness, ender, top):
    """With drafts behind it, and where a stop string holds tokens back."""
    harness = make_harness(
        manifest=make_manifest(draft_tokens=7, eos_ids=(25,) if ender == "eos" else ()),
        script=lambda _, index: 20 + index,
        accepts=hashed_accepts(0.6),
    )
    stop = (TOKEN_BYTES[24] + TOKEN_BYTES[25] if ender == "stop string" else b"never",)
    stop_token_ids = (25,) if ender == "stop token" else ()
    harness.submit("r", max_tokens=30, stop=stop, stop_token_ids=stop_token_ids, top_logprobs=top)
    harness.run_until_idle()
    finished = harness.output.items("r")[-1]
    assert finished.completion_tokens == 6
    assert finished.ender == (-1 if ender == "stop string" else 25)
    if top < 0 or ender == "stop string":
        assert finished.ender_score is None
    else:
        assert finished.ender_score.logprob == -25 / 8


@pytest.mark.parametrize("mode", [False, True])
def test_reproducible_requests_are_handed_over_as_such(make_harness, mode):
    harness = make_harness()
    sampling = msgspec.structs.replace(GREEDY, reproducible=mode)
    harness.submit("r", max_tokens=3, sampling=sampling)
    harness.run_until_idle()
    assert [init.coupled for plan in harness.channel.plans for init in plan.inits] == [mode]
