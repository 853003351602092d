"""Live settings: in force from the next plan on, and only within what was prepared."""

import pytest

from flare_ray.config.live import LiveSettings
from flare_ray.contracts.messages import Failed
from flare_ray.errors import ConfigError
from tests.support.fake_channel import make_manifest


def widths(harness, since=0):
    """Widths of the rounds that were planned after the first `since` plans."""
    return {plan.shape.verify_width for plan in harness.channel.plans[since:] if plan.lanes}


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_fewer_drafts_are_offered_while_a_request_runs_and_its_text_stays(make_harness, policy):
    harness = make_harness(manifest=make_manifest(draft_tokens=3), speculation={"policy": policy})
    harness.submit("r", max_tokens=80)
    harness.run_rounds(4)
    for most in (1, 0, None):
        harness.controller.reconfigure(LiveSettings(max_draft_tokens=most))
        harness.step()
        seen = len(harness.channel.plans)
        harness.run_rounds(8)
        allowed = 3 if most is None else most
        assert widths(harness, seen) <= set(range(1, allowed + 2))
        if policy == "fixed" and most in (0, None):
            assert max(widths(harness, seen)) == allowed + 1
    harness.run_until_idle()
    assert harness.tokens("r") == harness.expected((1, 2, 3), 80)
    harness.assert_all_free()


def test_queue_bounds_follow_and_what_is_left_out_is_as_it_was(make_harness):
    harness = make_harness(admission={"max_waiting": 3})
    slots = harness.manifest.slots

    def waiting(name):
        """How many requests of `slots` + 5 got a place in the queue."""
        names = [f"{name}{number}" for number in range(slots + 5)]
        for request in names:
            harness.submit(request, max_tokens=40)
        harness.step()
        refused = [
            r for r in names if any(isinstance(item, Failed) for item in harness.output.items(r))
        ]
        harness.run_until_idle()
        return 5 - len(refused)

    assert waiting("before") == 3
    harness.controller.reconfigure(LiveSettings(max_waiting=1))
    assert waiting("fewer") == 1
    harness.controller.reconfigure(LiveSettings(max_waiting_tokens=2 * (40 + 3)))
    assert waiting("tokens") == 2
    harness.controller.reconfigure(LiveSettings())
    assert waiting("again") == 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_draft_tokens": 4}, "user_config.max_draft_tokens: .* at most 3, got 4"),
        ({"max_waiting": 65}, "user_config.max_waiting: .* at most 64, got 65"),
    ],
)
def test_more_than_was_prepared_is_refused_and_nothing_changes(make_harness, settings, told):
    harness = make_harness(manifest=make_manifest(draft_tokens=3), speculation={"policy": "fixed"})
    harness.controller.reconfigure(LiveSettings(max_draft_tokens=0))
    with pytest.raises(ConfigError, match=told):
        harness.controller.reconfigure(LiveSettings(**settings))
    harness.submit("r", max_tokens=10)
    harness.run_until_idle()
    assert widths(harness) == {1}
