"""Sampling parameters: defaults, greedy mapping, and refusals that name the field."""

import math

import msgspec
import pytest

from flare_ray.contracts.manifest import SamplingDefaults
from flare_ray.contracts.plan import ALWAYS, LogitRule
from flare_ray.contracts.request import GenerationRequest, SamplingParams
from flare_ray.controller.sampling import (
    GREEDY_BELOW_TEMPERATURE,
    MAX_LOGIT_BIAS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    logit_rules,
    resolve,
)
from flare_ray.errors import InvalidRequest

DEFAULTS = SamplingDefaults(temperature=0.8, top_k=20, top_p=0.95, min_p=0.05)
VOCAB = 1000


def resolved(prompt_tokens=10, context_tokens=100, defaults=DEFAULTS, **fields):
    return resolve(
        SamplingParams(**fields),
        defaults,
        vocab_size=VOCAB,
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
    )


def test_unset_values_are_the_checkpoints():
    spec = resolved(seed=5).sampling
    assert (spec.temperature, spec.top_k, spec.top_p, spec.min_p) == (0.8, 20, 0.95, 0.05)


def test_explicit_values_override_the_checkpoints():
    spec = resolved(temperature=1.3, top_k=3, top_p=0.5, min_p=0.0).sampling
    assert (spec.temperature, spec.top_k, spec.top_p, spec.min_p) == (1.3, 3, 0.5, 0.0)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-300, GREEDY_BELOW_TEMPERATURE / 2])
def test_zero_and_vanishing_temperature_run_as_top_k_one(temperature):
    spec = resolved(temperature=temperature).sampling
    assert (spec.temperature, spec.top_k, spec.top_p, spec.min_p) == (1.0, 1, 1.0, 0.0)


@pytest.mark.parametrize("temperature", [1e-8, 1e-3, 1.0, 1e6])
def test_positive_temperature_is_kept(temperature):
    assert resolved(temperature=temperature).sampling.temperature == temperature


def test_smallest_kept_temperature_cannot_overflow_float32():
    largest_logit = 1e4
    assert largest_logit / GREEDY_BELOW_TEMPERATURE < 3e38


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 2**31 - 1])
def test_top_k_beyond_the_vocabulary_or_off_is_off(top_k):
    assert resolved(top_k=top_k).sampling.top_k == 0


@pytest.mark.parametrize("top_k", [1, 7, VOCAB - 1])
def test_top_k_inside_the_vocabulary_is_kept(top_k):
    assert resolved(top_k=top_k).sampling.top_k == top_k


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(0, 0), (7, 7), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)],
)
def test_seed_of_either_sign_becomes_unsigned(seed, expected):
    assert resolved(seed=seed).sampling.seed == expected


def test_missing_seed_is_fresh_each_time():
    seeds = {resolved().sampling.seed for _ in range(50)}
    assert len(seeds) == 50 and all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("\ud800",)}, "stop"),
        ({"stop": ("x",) * (MAX_STOP_STRINGS + 1)}, "stop"),
        ({"stop": ("é" * MAX_STOP_BYTES,)}, "stop"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS + 1))}, "stop_token_ids"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e9}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((3, 100.5),)}, "logit_bias"),
        ({"logit_bias": ((3, math.nan),)}, "logit_bias"),
        ({"logit_bias": tuple((t, 1.0) for t in range(MAX_LOGIT_BIAS + 1))}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 11, "max_tokens": 10}, "min_tokens"),
        ({"bad_words": ((1, VOCAB),)}, "bad_words"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": (tuple(range(9)),)}, "bad_words"),
        ({"bad_words": ((1,),) * 129}, "bad_words"),
    ],
)
def test_value_out_of_range_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as refusal:
        resolved(**fields)
    assert refusal.value.param == param
    assert refusal.value.status == 400


def test_unset_budget_is_all_that_the_context_leaves():
    assert resolved(prompt_tokens=30, context_tokens=100).max_tokens == 70


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [(30, 71, ("71", "30", "100", "70")), (100, None, ("100",)), (101, 1, ("101", "100"))],
)
def test_budget_beyond_the_context_is_refused_with_its_numbers(prompt, max_tokens, words):
    with pytest.raises(InvalidRequest) as refusal:
        resolved(prompt_tokens=prompt, context_tokens=100, max_tokens=max_tokens)
    assert refusal.value.code == "context_length_exceeded"
    for word in words:
        assert word in str(refusal.value)


def test_stops_become_bytes():
    result = resolved(stop=("€", "ab"), stop_token_ids=(3,), include_stop_str_in_output=True)
    assert result.stop == ("€".encode(), b"ab")
    assert (result.stop_token_ids, result.include_stop) == ((3,), True)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_penalties_and_bias_reach_greedy_and_sampled_requests_alike(temperature):
    spec = resolved(
        temperature=temperature,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((0, -100.0), (VOCAB - 1, 100.0)),
        min_tokens=10,
        max_tokens=10,
        bad_words=((5,), (1, 2, 3, 4, 5, 6, 7, 8)),
    ).sampling
    assert (spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty) == (1.1, -2, 2)
    assert spec.logit_bias == ((0, -100.0), (VOCAB - 1, 100.0))
    assert (spec.min_tokens, spec.bad_words) == (10, ((5,), (1, 2, 3, 4, 5, 6, 7, 8)))


def test_min_tokens_bans_every_ender_in_the_rows_that_draw_the_first_tokens():
    """Rows P - 1 .. P + 1 of a prompt of P tokens draw output tokens 1 .. 3."""
    result = resolved(logit_bias=((4, 2.0),), min_tokens=3, stop_token_ids=(8, 2))
    request = GenerationRequest(
        request_id="r",
        prompt_tokens=(1,) * 10,
        sampling=result.sampling,
        max_tokens=9,
        stop_token_ids=result.stop_token_ids,
    )
    bans = [LogitRule(token, -math.inf, 12) for token in (2, 7, 8)]
    assert logit_rules(request, (7, 2)) == (LogitRule(4, 2.0, ALWAYS), *bans)
    eos_free = msgspec.structs.replace(request, ignore_eos=True, stop_token_ids=())
    assert logit_rules(eos_free, (7, 2)) == (LogitRule(4, 2.0, ALWAYS),)


@pytest.mark.parametrize(
    ("mode", "fields", "reproducible"),
    [
        ("on_request", {"seed": 1}, False),
        ("on_request", {"reproducible": True}, True),
        ("seeded", {}, False),
        ("seeded", {"seed": 0}, True),
        ("seeded", {"seed": 1, "reproducible": False}, False),
        ("seeded", {"reproducible": True}, True),
        ("always", {}, True),
        ("always", {"reproducible": False}, False),
    ],
)
def test_reproducible_mode_is_the_requests_choice_then_the_deployments(mode, fields, reproducible):
    """contract: S4: by default a given seed asks for it."""
    defaults = msgspec.structs.replace(DEFAULTS, reproducible=mode)
    assert resolved(defaults=defaults, **fields).sampling.reproducible is reproducible


@pytest.mark.parametrize(
    "sequences",
    [((1,),) * 17, ((),), ((1,) * 65,), ((VOCAB,),), ((-1,),)],
)
def test_wrong_stop_sequences_are_refused_by_name(sequences):
    with pytest.raises(InvalidRequest) as refusal:
        resolved(stop_token_sequences=sequences)
    assert refusal.value.param == "stop_token_sequences"


@pytest.mark.parametrize("param", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21])
def test_wrong_number_of_alternatives_is_refused_by_name(param, value):
    with pytest.raises(InvalidRequest) as refusal:
        resolved(**{param: value})
    assert refusal.value.param == param
