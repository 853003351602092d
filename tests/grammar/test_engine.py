"""Constrained requests in a whole engine: full width equals width one, and outputs validate."""

import itertools
import json
import math
import re

import jsonschema
import pytest

from flare_ray.contracts.grammar import CallSyntax, GrammarSpec, ToolGrammar
from flare_ray.contracts.messages import Failed, Finished
from tests.support.fake_engine_client import byte_tokens
from tests.support.grammar_engine import EOS, request, run, text_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["在线", "café", "🙂"]}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["days"],
}
SYNTAX = CallSyntax(
    "<tool_call>",
    "</tool_call>",
    "arg_pairs",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
SPECS = {
    "schema": GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA)),
    "regex": GrammarSpec(kind="regex", source=r"[a-f]{3,40}(-[0-9]+)*"),
    "ebnf": GrammarSpec(kind="ebnf", source='root ::= "x" | "(" root "," root ")"'),
    "call": GrammarSpec(
        kind="none",
        calls="required",
        tools=(ToolGrammar("f", json.dumps(ARGUMENTS)), ToolGrammar("g")),
        syntax=SYNTAX,
    ),
}
WIDTH_ONE = {"speculation": {"policy": "fixed", "fixed_width": 1}}
WIDE = {
    "adaptive": {},
    "width4": {"speculation": {"policy": "fixed", "fixed_width": 4}},
    "depth2": {"queue_depth": 2, "speculation": {"policy": "fixed", "fixed_width": 6}},
    "own rounds": {"queue_depth": 2, "grammar": {"own_rounds": True}},
    "two ranks": {"tensor_parallel_size": 2, "speculation": {"policy": "fixed", "fixed_width": 6}},
    "not full width": {"queue_depth": 2, "grammar": {"full_width": False}},
}


def mixed(prefix: str, **fields):
    """Two constrained requests of each kind and two free ones."""
    constrained = [
        request(f"{prefix}{kind}{place}", spec, **fields)
        for kind, spec in SPECS.items()
        for place in range(2)
    ]
    return [*constrained, *(request(f"{prefix}free{p}", None, max_tokens=60) for p in range(2))]


@pytest.fixture(scope="module")
def narrow(engines):
    """Greedy outcomes at width one."""
    return run(engines(**WIDTH_ONE), mixed("g"))


@pytest.mark.parametrize("settings", WIDE.values(), ids=list(WIDE))
def test_greedy_tokens_equal_width_one_execution(engines, narrow, settings):
    outcomes = run(engines(**settings), mixed("g"))
    assert [o.tokens for o in outcomes] == [o.tokens for o in narrow]
    assert [o.end.reason for o in outcomes] == [o.end.reason for o in narrow]
    accepted = sum(o.end.drafts_accepted for o in outcomes[:-2])
    assert bool(accepted) == (settings is not WIDE["not full width"])


def test_copied_drafts_pass_the_masks_of_their_prefixes(engines, narrow):
    """Contract H2, K1: answers that copy each other, constrained or not, stay what they are."""
    copies = {"history_drafts": True, "request_drafts": True, "policy": "fixed", "fixed_width": 6}
    core = engines(queue_depth=2, speculation=copies)
    for _ in range(2):
        outcomes = run(core, mixed("g"))
        assert [o.tokens for o in outcomes] == [o.tokens for o in narrow]
    assert sum(o.end.copies_accepted for o in outcomes[:-2]) > 20


def test_free_neighbours_get_what_they_get_alone(engines, narrow):
    alone = run(engines(), [request("gfree0", None, max_tokens=60)])
    assert alone[0].tokens == narrow[-2].tokens


def valid(kind: str, text: str) -> bool:
    if kind == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if kind == "regex":
        return re.fullmatch(SPECS["regex"].source, text) is not None
    if kind == "ebnf":
        return re.fullmatch(r"[x(),]+", text) is not None and text.count("(") == text.count(")")
    return text.startswith(("<tool_call>f<arg_key>", "<tool_call>g<")) and text.endswith(
        "</tool_call>"
    )


@pytest.mark.parametrize("reproducible", [False, True])
def test_finished_samples_match_their_grammar(engines, codec, reproducible):
    core, finished, accepted = engines(queue_depth=2), 0, 0
    requests = [
        request(
            f"{kind}{seed}", spec, greedy=False, seed=seed, sampling={"reproducible": reproducible}
        )
        for kind, spec in SPECS.items()
        for seed in range(12)
    ]
    for r, outcome in zip(requests, run(core, requests), strict=True):
        assert isinstance(outcome.end, Finished), outcome.end
        accepted += outcome.end.drafts_accepted
        if outcome.end.reason == "stop":
            finished += 1
            kind = next(kind for kind in SPECS if r.request_id.startswith(kind))
            assert valid(kind, text_of(outcome, codec)), (r.request_id, text_of(outcome, codec))
        else:
            assert len(outcome.tokens) == r.max_tokens
    assert finished >= len(requests) // 2
    assert accepted


def test_reproducible_tokens_do_not_depend_on_width_or_neighbours(engines):
    def tokens(core, beside):
        mine = request(
            "mine", SPECS["schema"], greedy=False, seed=5, sampling={"reproducible": True}
        )
        others = [request(f"o{i}", SPECS["regex"], greedy=False, seed=i) for i in range(beside)]
        return run(core, [mine, *others])[0].tokens

    expected = tokens(engines(**WIDTH_ONE), 0)
    assert tokens(engines(), 3) == expected
    assert tokens(engines(**WIDE["width4"]), 1) == expected


def test_budget_ends_a_document_with_length(engines, codec):
    (outcome,) = run(engines(), [request("cut", SPECS["schema"], max_tokens=9)])
    assert outcome.end.reason == "length"
    assert outcome.end.completion_tokens == 9
    assert text_of(outcome, codec).startswith("{")


def test_scores_of_constrained_tokens_are_finite(engines):
    (outcome,) = run(engines(), [request("scored", SPECS["schema"], top_logprobs=3)])
    assert len(outcome.scores) == len(outcome.tokens) > 0
    assert all(math.isfinite(s.logprob) for s in outcome.scores)


def test_min_tokens_gives_way_to_the_grammars_end(engines, codec):
    spec = GrammarSpec(kind="regex", source="abc")
    (outcome,) = run(engines(), [request("short", spec, sampling={"min_tokens": 50})])
    assert isinstance(outcome.end, Finished), outcome.end
    assert (outcome.end.reason, text_of(outcome, codec)) == ("stop", "abc")


@pytest.mark.parametrize("settings", [WIDTH_ONE, WIDE["width4"]], ids=["one", "four"])
def test_bans_that_leave_no_token_end_the_request_by_name(engines, settings):
    spec = GrammarSpec(kind="regex", source="abc")
    ban = {"bad_words": ((byte_tokens("c")[0],),)}
    banned, free = run(
        engines(**settings), [request("ban", spec, sampling=ban), request("free", spec)]
    )
    assert isinstance(banned.end, Failed)
    assert (banned.end.status, banned.end.code) == (400, "invalid_request_error")
    assert "bad_words" in banned.end.message
    assert tuple(banned.tokens) == byte_tokens("ab")
    assert isinstance(free.end, Finished)


def test_draft_into_a_banned_end_does_not_end_the_request_early(engines):
    """Behind a draft the bans may leave no token though the target would never go there."""
    spec = GrammarSpec(kind="regex", source="(ab|[c-z]{5,20})")
    ban = {"bad_words": ((byte_tokens("b")[0],),)}
    outcomes = [
        run(engines(**settings), [request("t", spec, sampling=ban)])[0]
        for settings in (WIDTH_ONE, WIDE["width4"])
    ]
    assert outcomes[0].tokens == outcomes[1].tokens
    assert type(outcomes[0].end) is type(outcomes[1].end)


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": ((byte_tokens("b")[0], 5.0), (EOS, -3.0))},
    ],
    ids=["repetition", "presence", "bias"],
)
def test_penalties_and_bias_at_full_width_equal_width_one(engines, sampling):
    texts = [
        [o.tokens for o in run(engines(**settings), mixed("p", sampling=sampling)[:-2])]
        for settings in (WIDTH_ONE, WIDE["depth2"])
    ]
    assert texts[0] == texts[1]


def test_preempted_requests_go_on_in_their_grammar(engines, narrow):
    tight = engines(page_pool_tokens=1024, context_tokens=256, concurrency=4)
    requests = [request(f"long{i} " + "x" * 150, SPECS["ebnf"], max_tokens=90) for i in range(6)]
    wide = [o.tokens for o in run(tight, requests)]
    alone = [run(engines(**WIDTH_ONE), [r])[0].tokens for r in requests]
    assert wide == alone


def test_prompt_restored_whole_masks_its_first_token(engines):
    core = engines()
    prompt = "y" * 200
    first, again = (
        run(core, [request(prompt, SPECS["schema"], max_tokens=30)])[0] for _ in range(2)
    )
    assert again.end.cached_tokens > 0
    assert again.tokens == first.tokens


def test_stop_string_cuts_a_document_and_says_so(engines, codec):
    (outcome,) = run(engines(), [request("stop", SPECS["schema"], stop=(b'"age"',))])
    assert (outcome.end.reason, outcome.end.stop_reason) == ("stop", '"age"')
    assert '"age"' not in text_of(outcome, codec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec(kind="json_schema", source='{"enum": []}'), "no finite text"),
        (GrammarSpec(kind="json_schema", source="{"), "not JSON"),
        (GrammarSpec(kind="json_schema", source='{"not": {}}'), "'not' is not supported"),
        (GrammarSpec(kind="regex", source="(a"), "no regular expression"),
        (GrammarSpec(kind="regex", source=r"(?=a)b"), "look-around"),
        (GrammarSpec(kind="ebnf", source="root ::= missing"), "cannot be compiled"),
        (GrammarSpec(kind="regex", source="a" * 70_000), "at most 65536"),
    ],
    ids=itertools.count(),
)
def test_impossible_grammar_is_refused_before_anything_is_sent(engines, spec, reason):
    (outcome,) = run(engines(), [request("bad", spec)])
    assert isinstance(outcome.end, Failed)
    assert outcome.end.status == 400
    assert reason in outcome.end.message
    assert not outcome.tokens
