"""A grammar whose masks come to take too long ends its own request, and delays nobody's rounds."""

import threading
import time

import pytest

from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.contracts.messages import Failed, Finished
from flare_ray.controller.grammar import gate
from tests.support.fake_engine_client import byte_tokens
from tests.support.grammar_engine import AMBIGUOUS_EBNF, grammar_engine, request, run

LIMIT_S = 0.01
SETTLE_S = 30.0
CLEAR_EBNF = 'root ::= [a-z0-9 ]* "!"\n'
"""The same language with one reading of each text."""
NEIGHBOURS = (
    ("free", None),
    ("regex", GrammarSpec(kind="regex", source="[a-f]{60,90}")),
    ("ebnf", GrammarSpec(kind="ebnf", source='root ::= "x" | "(" root "," root ")"')),
)
WIDTHS = (1, 6)


@pytest.fixture(params=WIDTHS)
def engine(checkpoint, request):
    speculation = {"policy": "fixed", "fixed_width": request.param}
    core = grammar_engine(checkpoint, speculation=speculation)
    core._controller._masks._thread.limit_s = LIMIT_S
    yield core
    core.shutdown(0.0)


def endless(name: str, source: str):
    """A request that may end with "!" only, which it never says."""
    never = {"logit_bias": ((byte_tokens("!")[0], -100.0),)}
    spec = GrammarSpec(kind="ebnf", source=source)
    return request(name, spec, max_tokens=400, sampling=never)


def neighbours():
    return [request(name, spec, max_tokens=120) for name, spec in NEIGHBOURS]


def settled(core) -> bool:
    """Given-up matchers have come to their end, and nothing is held."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        stats = core.stats()
        busy = core._controller._masks.num_stuck or stats.running or stats.pending_work
        if not busy and stats.free_pages == stats.total_pages:
            return True
        time.sleep(0.02)
    return False


def test_masks_that_grow_slow_end_their_request_by_name_and_cost_no_neighbour_a_round(engine):
    clear, *expected = run(engine, [endless("t", CLEAR_EBNF), *neighbours()])
    slow, *others = run(engine, [endless("t", AMBIGUOUS_EBNF), *neighbours()])

    assert isinstance(clear.end, Finished) and clear.end.reason == "length"
    assert isinstance(slow.end, Failed)
    assert (slow.end.status, slow.end.code) == (400, "grammar_too_slow")
    assert "too many ways" in slow.end.message
    assert 0 < len(slow.tokens) < len(clear.tokens)
    assert slow.tokens == clear.tokens[: len(slow.tokens)]
    for other, control in zip(others, expected, strict=True):
        assert other.tokens == control.tokens
        assert other.end.reason == control.end.reason
        assert other.end.rounds == control.end.rounds
    assert settled(engine)


def test_a_grammar_that_was_too_slow_is_refused_when_it_comes_again(engine):
    first, again = (run(engine, [endless(n, AMBIGUOUS_EBNF)])[0] for n in ("first", "again"))
    assert [o.end.code for o in (first, again)] == ["grammar_too_slow"] * 2
    assert first.tokens and not again.tokens


def test_grammars_wait_while_given_up_ones_hold_processors(engine, monkeypatch):
    monkeypatch.setattr(gate, "MAX_STUCK", 0)
    (outcome,) = run(engine, [neighbours()[1]])
    assert (outcome.end.status, outcome.end.code) == (503, "overloaded")
    (free,) = run(engine, [neighbours()[0]])
    assert isinstance(free.end, Finished)


def test_the_thread_of_masks_ends_with_its_engine(checkpoint):
    core = grammar_engine(checkpoint)
    run(core, neighbours())
    assert [t for t in threading.enumerate() if t.name == "flare-masks"]
    before = sum(t.name == "flare-masks" for t in threading.enumerate())
    core.shutdown(0.0)
    assert sum(t.name == "flare-masks" for t in threading.enumerate()) == before - 1
