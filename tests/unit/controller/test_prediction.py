"""Predicted outputs: the follower alone, and rounds with its copies over a fake engine."""

import random

import msgspec
import pytest

from flare_ray.contracts.messages import Failed
from flare_ray.controller.history.prediction import LONGEST_MATCH, PredictionFollower
from flare_ray.controller.verification import ProposalSource
from flare_ray.metrics import names
from tests.support.fake_channel import accepts_up_to, listed_script, make_manifest

PROMPT = (1, 2, 3)
TEXT = list(range(50, 110))
NO_DRAFT = accepts_up_to(0)
"""The drafter is never right: whatever is accepted was copied."""


def proposals(prediction, text, most=4):
    """What is proposed in front of every token of a text."""
    follower = PredictionFollower(prediction)
    seen = []
    for token in text:
        seen.append(follower.propose(most))
        follower.advance([token])
    return seen


def test_a_text_that_equals_its_prediction_is_proposed_throughout():
    seen = proposals(TEXT, TEXT)
    assert seen == [tuple(TEXT[i : i + 4]) for i in range(len(TEXT))]


def test_nothing_is_proposed_behind_the_predictions_end():
    follower = PredictionFollower(TEXT[:3])
    follower.advance(TEXT[:3])
    assert not follower.on_track
    assert follower.propose(4) == ()


@pytest.mark.parametrize(
    ("prediction", "text", "at", "next_tokens"),
    [
        ("abcdefgh", "abXde", 5, "fgh"),
        ("abcdefgh", "abXcd", 5, "efgh"),
        ("abcdefgh", "abef", 4, "gh"),
        ("abcdefgh", "XYZcd", 5, "efgh"),
    ],
    ids=["replaced", "inserted", "deleted", "other start"],
)
def test_the_place_is_found_again_behind_an_edit(prediction, text, at, next_tokens):
    follower = PredictionFollower([ord(c) for c in prediction])
    follower.advance([ord(c) for c in text[:at]])
    assert "".join(map(chr, follower.propose(8))) == next_tokens


def test_of_equal_matches_the_nearest_one_ahead_is_taken():
    text = "pq one .. kl pq two .. pq three"
    follower = PredictionFollower([ord(c) for c in text])
    follower.advance([ord(c) for c in "pq one ..!pq"])
    assert "".join(map(chr, follower.propose(4))) == " two"


def test_a_longer_match_is_preferred_to_a_nearer_one():
    follower = PredictionFollower([ord(c) for c in "start ab1 cab2"])
    follower.advance([ord(c) for c in "start!cab"])
    assert "".join(map(chr, follower.propose(1))) == "2"


def test_places_that_turn_out_wrong_ask_for_longer_matches():
    """A pair that recurs everywhere is proposed from only a few times."""
    prediction = [7, 8, *range(100, 120)] * 3
    text = [7, 8, 1] * 40
    proposed = sum(bool(p) for p in proposals(prediction, text))
    assert proposed <= 3 * LONGEST_MATCH


def test_random_edits_never_break_the_follower_and_most_of_the_text_is_proposed():
    rng = random.Random(5)
    prediction = [rng.randrange(200) for _ in range(2000)]
    text = list(prediction)
    for _ in range(40):
        place = rng.randrange(len(text))
        text[place : place + rng.randrange(3)] = [
            rng.randrange(200) for _ in range(rng.randrange(4))
        ]
    seen = proposals(prediction, text)
    right = sum(p[:1] == (token,) for p, token in zip(seen, text, strict=True))
    assert right > 0.9 * len(text)


def predicted_harness(make_harness, text, **settings):
    return make_harness(
        manifest=settings.pop("manifest", None) or make_manifest(draft_tokens=5),
        script=listed_script({PROMPT: text}, then=9),
        accepts=NO_DRAFT,
        **settings,
    )


def test_a_right_prediction_fills_every_draft_and_leaves_the_text_alone(make_harness):
    harness = predicted_harness(
        make_harness, TEXT, speculation={"policy": "fixed", "fixed_width": 6}
    )
    harness.submit("r", PROMPT, max_tokens=len(TEXT), prediction=tuple(TEXT))
    harness.run_until_idle()
    assert harness.tokens("r") == TEXT
    end = harness.end("r")
    assert end.copies_accepted == end.copies_offered > 0
    # One token of the prompt's end, then six a round.
    assert end.rounds == 1 + -(-(len(TEXT) - 1) // 6)
    lanes = [lane for plan in harness.channel.plans for lane in plan.lanes if lane.copy_tokens]
    assert {s for lane in lanes for s in lane.copy_sources} == {int(ProposalSource.PREDICTION)}
    assert harness.channel.dead_lanes == 0, "no round is queued whose copies are unknown"


def test_the_adaptive_policy_learns_from_copies_of_their_own_source(make_harness):
    text = TEXT * 5
    harness = predicted_harness(make_harness, text)
    harness.submit("r", PROMPT, max_tokens=len(text), prediction=tuple(text))
    harness.run_until_idle()
    assert harness.tokens("r") == text
    assert harness.end("r").rounds < len(text) // 3


def test_an_edited_prediction_counts_what_was_rejected(make_harness):
    edited = [*TEXT[:20], 200, 201, *TEXT[22:]]
    harness = predicted_harness(
        make_harness, edited, speculation={"policy": "fixed", "fixed_width": 6}
    )
    harness.submit("r", PROMPT, max_tokens=len(TEXT), prediction=tuple(TEXT))
    harness.run_until_idle()
    assert harness.tokens("r") == edited
    end = harness.end("r")
    assert 0 < end.copies_offered - end.copies_accepted <= 5
    assert end.copies_accepted >= 40
    counted = [
        sum(harness.recorder.counter(series, "prediction", str(d)).value for d in range(5))
        for series in (names.SPEC_COPIED_TOKENS, names.SPEC_COPIED_ACCEPTED_TOKENS)
    ]
    assert counted == [end.copies_offered, end.copies_accepted]
    assert counted == [end.predicted_offered, end.predicted_accepted]


def test_other_requests_get_their_text_beside_a_predicted_one(make_harness):
    other = (4, 5)
    harness = make_harness(
        script=listed_script({PROMPT: TEXT, other: TEXT[::-1]}, then=9), accepts=NO_DRAFT
    )
    harness.submit("r", PROMPT, max_tokens=len(TEXT), prediction=tuple(TEXT))
    harness.submit("s", other, max_tokens=len(TEXT))
    harness.run_until_idle()
    assert harness.tokens("r") == TEXT
    assert harness.tokens("s") == TEXT[::-1]
    assert harness.end("s").copies_offered == 0
    harness.assert_all_free()


def test_a_prediction_survives_preemption(make_harness):
    """Pages for one of the two: whoever comes back goes on in its prediction."""
    long = [10 + i % 200 for i in range(300)]
    others = (4, 5)
    harness = make_harness(
        manifest=make_manifest(slots=2, context_tokens=512, num_pages=9),
        script=listed_script({PROMPT: long, others: long[::-1]}, then=9),
        accepts=NO_DRAFT,
    )
    harness.submit("r", PROMPT, max_tokens=300, prediction=tuple(long))
    harness.submit("s", others, max_tokens=300, prediction=tuple(long[::-1]))
    harness.run_until_idle()
    assert harness.tokens("r") == long
    assert harness.tokens("s") == long[::-1]
    assert sum(harness.controller._admission.preempted.values())


@pytest.mark.parametrize(
    ("settings", "prediction"),
    [
        ({"speculation": {"draft_tokens": 0}}, (5,)),
        ({"manifest": msgspec.structs.replace(make_manifest(), copy_inputs=False)}, (5,)),
        ({}, (5, 256)),
    ],
    ids=["no drafts", "no copy inputs", "outside the vocabulary"],
)
def test_a_prediction_that_cannot_be_served_is_refused_by_name(make_harness, settings, prediction):
    harness = predicted_harness(make_harness, TEXT, **settings)
    harness.submit("r", PROMPT, prediction=prediction)
    harness.run_until_idle()
    end = harness.end("r")
    assert isinstance(end, Failed)
    assert (end.param, end.status) == ("prediction", 400)
