"""Known faults about what is drawn (contract: S1-S5, S8, K3)."""

from __future__ import annotations

import pytest

from tests.faults.conftest import prompt
from tests.support.fault_model import IDS, WIDTHS, chain_checkpoint, chain_script, fixed
from tests.support.matrix.cells import MAX_TOKENS, PROMPT
from tests.support.matrix.judge import ALPHA, Asked, p_values, problem
from tests.support.matrix.model import SCRIPT, checkpoint
from tests.support.matrix.run import Engine
from tests.support.scripted.geometry import Script

V = 50
UNIFORM = Script(vocab_size=V, spread=0.0, draft_noise=0.3, seed=2)
SPELLED = tuple(chr(0x100 + i) for i in range(V))
FREE = {"top_p": 1.0, "max_tokens": 16}


@pytest.fixture(scope="module", params=WIDTHS)
def uniform(request, tmp_path_factory):
    path = checkpoint(tmp_path_factory.mktemp("uniform"), UNIFORM, SPELLED, special=())
    engine = Engine(path, **fixed(request.param))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    engine = Engine(checkpoint(tmp_path_factory.mktemp("micro"), SCRIPT), **fixed(6))
    yield engine
    engine.close()


@pytest.mark.parametrize("fields", [{}, {"reproducible": False}])
def test_h09_vllm_13196_a_seed_repeats_its_text_alone_and_in_company(uniform, fields):
    body = {"prompt": [1], "seed": 7, **FREE, **fields}
    alone = uniform.post(**body)
    others = [{"prompt": [i], "seed": 100 + i, **FREE} for i in range(7)]
    accompanied = uniform.post_all([*others, body])[-1]
    assert uniform.post(**body).text == alone.text
    if not fields:  # in the plain mode the width of a round may change a text
        assert accompanied.text == alone.text
    assert uniform.post(**{**body, "seed": 8}).text != alone.text
    unseeded = [uniform.post(prompt=[1], **FREE).text for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_probe11_four_choices_of_a_seed_differ_and_repeat(uniform):
    answers = [uniform.post(prompt=[1], seed=3, n=4, **FREE) for _ in range(2)]
    texts = [[choice["text"] for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4


@pytest.mark.parametrize("top_k", [-1, 0, 1, V, V + 1, 2**31 - 1])
def test_h17_top_k_beyond_the_vocabulary_is_off(uniform, top_k):
    body = {"prompt": [1], "seed": 3, "top_k": top_k, **FREE}
    greedy = {"prompt": [1], "temperature": 0, **FREE}
    two = {"prompt": [2], "top_k": 2, "seed": 1, **FREE}
    found, *rest = uniform.post_all([body, greedy, two])
    assert [answer.status for answer in (found, *rest)] == [200] * 3
    off = uniform.post(prompt=[1], seed=3, **FREE)
    assert found.text == (uniform.post(**greedy).text if top_k == 1 else off.text)
    assert uniform.post(prompt=[1], top_k=-2).error["param"] == "top_k"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-3, 5e-324])
def test_probe07_and_tgi_440_tiny_temperatures_give_the_greedy_text(chains, width, temperature):
    answer = chains(width).post(prompt=prompt("letters"), temperature=temperature)
    assert (answer.status, answer.text) == (200, "ABCDE")


def test_probe08_top_p_of_nothing_is_refused(chains):
    assert chains(4).post(prompt=prompt("letters"), top_p=0).error["param"] == "top_p"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("value", [-100, 100])
def test_probe10_logit_bias_holds_in_every_verified_row(uniform, width, value):
    answer = uniform.post(prompt=[1], logit_bias={"9": value}, seed=width, **FREE)
    count = answer.text.count(SPELLED[9])
    assert count == (0 if value < 0 else 16)
    refused = uniform.post(prompt=[1], logit_bias={str(V): 1})
    assert (refused.status, refused.error["param"]) == (400, "logit_bias")


PENALTIES = (
    {"repetition_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
)


def asked(count: int, **fields: object) -> list[Asked]:
    """Sampled requests of one law, with seeds of their own."""
    base = {"prompt": list(PROMPT), "max_tokens": MAX_TOKENS, "temperature": 0.9, "top_p": 0.95}
    return [Asked({**base, "seed": seed, **fields}) for seed in range(count)]


def assert_lawful(engine: Engine, requests: list[Asked]) -> None:
    found = engine.post_all([request.body() for request in requests])
    answers = dict(zip(requests, found, strict=True))
    assert not [p for request, answer in answers.items() if (p := problem(request, answer))]
    [(p_value, tokens)] = p_values(answers, lambda request: "all").values()
    assert p_value > ALPHA and tokens > 500


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("fields", PENALTIES, ids=lambda fields: next(iter(fields)))
def test_h08_penalties_hold_in_every_verified_row(micro, fields, plain):
    """Rows of a round see the drafts in front of them; the exact law, token for token."""
    assert_lawful(micro, asked(80, reproducible=not plain, **fields))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("fields", [{"min_p": 0.15}, {"logit_bias": {"2": 2.0, "7": -100}}])
def test_vllm_42744_and_42802_min_p_and_logit_bias_hold_with_drafts(micro, fields, plain):
    assert_lawful(micro, asked(80, reproducible=not plain, **fields))


def test_sglang_28180_a_repetition_penalty_ends_a_loop(tmp_path):
    """Greedy text of the loop repeats three tokens; the penalty must leave it."""
    script = chain_script(next_tokens=(), spread=1.5, seed=5, drafter="table")
    engine = Engine(chain_checkpoint(tmp_path, script), **fixed(8))
    try:
        body = {"prompt": prompt("loop"), "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        looping, penalised = engine.post_all([body, {**body, "repetition_penalty": 1.8}])
    finally:
        engine.close()
    assert looping.text != penalised.text
    assert distinct(penalised) > distinct(looping)


def distinct(answer) -> int:
    text = answer.text
    return len({text[i : i + 6] for i in range(len(text) - 5)})


def test_sglang_21258_a_repetition_penalty_of_zero_is_refused(chains):
    refused = chains(4).post(prompt=prompt("letters"), repetition_penalty=0)
    assert (refused.status, refused.error["param"]) == (400, "repetition_penalty")


def test_vllm_22987_a_repetition_penalty_with_drafts_is_that_without(tmp_path):
    path = checkpoint(tmp_path, SCRIPT)
    texts = []
    for settings in ({"speculation": {"families": "ordinary"}}, fixed(8)):
        engine = Engine(path, **settings)
        try:
            bodies = [
                {"prompt": [3, i], "seed": i, "repetition_penalty": 1.4, "max_tokens": 24}
                for i in range(14)
            ]
            texts.append([answer.text for answer in engine.post_all(bodies)])
        finally:
            engine.close()
    assert texts[0] == texts[1] and len(set(texts[0])) > 8


def test_probe09_a_row_of_nan_ends_its_request_alone(tmp_path):
    script = chain_script(nan_tokens=(IDS["foo;bar"],))
    engine = Engine(chain_checkpoint(tmp_path, script), **fixed(4))
    try:
        broken, whole = engine.post_all(
            [{"prompt": [IDS["foo;bar"]]}, {"prompt": prompt("letters")}]
        )
        assert (broken.status, whole.text) == (500, "ABCDE")
        assert engine.post(prompt=prompt("letters")).text == "ABCDE"
    finally:
        engine.close()


def test_colibri_1589_a_lone_surrogate_is_no_500(chains):
    """As an escape it is no text; the body is refused before anything reads it."""
    for field in (b"stop", b"user", b"prompt"):
        body = b'{"model": "micro", "prompt": "a", "' + field + b'": "\\ud800"}'
        assert chains(4).post_raw(body).status == 400
