"""What the engine tells of each visible token's source, at both queue depths."""

import msgspec
import pytest

from flare_ray.contracts.messages import Delta, TokenSource
from flare_ray.contracts.plan import LanePlan
from flare_ray.contracts.record import Field, LaneRecord
from flare_ray.controller.harvest import token_sources
from flare_ray.controller.verification import ProposalSource
from tests.support.fake_channel import accepts_up_to, listed_script, make_manifest

PROMPT, OTHER = (1, 2, 3), (4, 5, 6)
TEXT = list(range(50, 110))
WIDE = {"policy": "fixed", "fixed_width": 6}


def harness_of(make_harness, accepted, **speculation):
    return make_harness(
        manifest=make_manifest(draft_tokens=5, slots=2),
        script=listed_script({PROMPT: TEXT, OTHER: TEXT}, then=9),
        accepts=accepts_up_to(accepted),
        speculation={**WIDE, **speculation},
    )


def lane_record(tokens, accepted, copy_bits=0):
    fields = dict.fromkeys(Field, 0)
    fields |= {Field.ACCEPTED: accepted, Field.COPY_BITS: copy_bits}
    return msgspec.convert((*fields.values(), tokens), LaneRecord)


def told(harness, name, prompt=PROMPT, **fields):
    """Sources of the tokens of one request, one per token of every delta."""
    harness.submit(name, prompt, max_tokens=len(TEXT), token_sources=True, **fields)
    harness.run_until_idle()
    deltas = [item for item in harness.output.items(name) if isinstance(item, Delta)]
    assert all(len(delta.sources) == len(delta.tokens) for delta in deltas)
    return [TokenSource(source) for delta in deltas for source in delta.sources]


def test_accepted_drafts_are_the_drafters_and_the_others_the_targets(make_harness):
    harness = harness_of(make_harness, 2)
    sources = told(harness, "r")
    end = harness.end("r")
    assert sources.count(TokenSource.DRAFTER) == end.drafts_accepted > 30
    assert sources[0] is TokenSource.TARGET
    assert set(sources) == {TokenSource.DRAFTER, TokenSource.TARGET}


def test_copies_have_the_name_of_their_text(make_harness):
    harness = harness_of(make_harness, 0, history_drafts=True)
    predicted = told(harness, "a", prediction=tuple(TEXT))
    assert predicted.count(TokenSource.PREDICTION) == harness.end("a").copies_accepted > 40
    copied = told(harness, "b", OTHER)
    assert copied.count(TokenSource.HISTORY) == harness.end("b").copies_accepted > 40


@pytest.mark.parametrize(
    ("stops", "visible"), [((b"23\0", b"?@A\0"), 60), ((b"23\0", bytes(TEXT[40:44])), 40)]
)
def test_sources_wait_with_tokens_that_a_stop_holds_back(make_harness, stops, visible):
    sources = told(harness_of(make_harness, 2), "r", stop=stops)
    assert sources == told(harness_of(make_harness, 2), "r")[:visible]
    assert len(sources) == visible


def test_unasked_nothing_is_told(make_harness):
    harness = harness_of(make_harness, 2)
    harness.submit("r", PROMPT, max_tokens=20)
    harness.run_until_idle()
    assert all(not i.sources for i in harness.output.items("r") if isinstance(i, Delta))


def test_a_draft_that_the_plan_does_not_know_is_the_grammars():
    lane = LanePlan(0, 1, 4, (7, 8), (ProposalSource.REQUEST, ProposalSource.REQUEST))
    record = lane_record(tokens=(7, 5, 6, 9), accepted=3, copy_bits=0b011)
    assert token_sources(lane, record) == [
        TokenSource.OWN_TEXT,
        TokenSource.GRAMMAR,
        TokenSource.DRAFTER,
        TokenSource.TARGET,
    ]


def test_a_prompts_first_token_is_the_targets():
    assert token_sources(None, lane_record(tokens=(7,), accepted=0)) == [TokenSource.TARGET]
