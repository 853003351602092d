"""Random parameter sets through HTTP validation and a whole engine: no 500, no hang, nothing left
behind; what is refused names a parameter, what is served is whole and matches its grammar."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from tests.support.matrix.cells import AXES, REGEX, SCHEMA
from tests.support.matrix.model import SCRIPT, TOKENS, checkpoint
from tests.support.matrix.run import Answer, Engine

pytestmark = pytest.mark.timeout(1200)

BATCH = 50
SETTLE_S = 10.0
WARM = 2_000
"""Requests after which memory is compared."""
GROWTH_BYTES_PER_REQUEST = 4_096
V = len(TOKENS)
WRONG: tuple[Any, ...] = (
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    -(2**70),
    1e308,
    0.5,
    True,
    "1",
    "",
    [],
    {},
)
IDS = (0, 1, V - 1, V, -1, 2**40)


def number(dice: random.Random, low: float, high: float) -> float:
    """Mostly inside the range, sometimes at its ends or outside."""
    return dice.choice(
        [dice.uniform(low, high), low, high, dice.uniform(2 * low - 1, 2 * high + 1)]
    )


def sequences(dice: random.Random) -> list[list[int]]:
    return [
        [dice.choice(IDS[: 3 + (dice.random() < 0.1) * 3]) for _ in range(dice.randint(0, 3))]
        for _ in range(dice.randint(0, 3))
    ]


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "word", "schema": schema}}


FIELDS: dict[str, Any] = {
    "prompt": lambda d: d.choice(["abc", "é", [1, 2], [[3], [4, 5]], ["a", "b"], [], "", [V]]),
    "max_tokens": lambda d: d.choice([0, 1, 2, 9, 30, 252, 1000]),
    "temperature": lambda d: d.choice([0, 1e-12, 1e-3, 0.7, 1, 5, 1e30, -1]),
    "top_p": lambda d: number(d, 0.0, 1.0),
    "top_k": lambda d: d.choice([-2, -1, 0, 1, 2, V, V + 1, 2**31 - 1]),
    "min_p": lambda d: number(d, 0.0, 1.0),
    "seed": lambda d: d.choice([0, -1, d.getrandbits(63), 2**64 - 1, 2**64, -(2**63)]),
    "n": lambda d: d.choice([1, 2, 3, 0, 65]),
    "stop": lambda d: d.choice(["a", ["b", "é"], [], ["x" * 1025], ["y"] * 17, ["xa"]]),
    "include_stop_str_in_output": lambda d: d.random() < 0.5,
    "stop_token_ids": lambda d: d.sample(IDS[: 3 + (d.random() < 0.1) * 3], d.randint(0, 2)),
    "stop_token_sequences": sequences,
    "ignore_eos": lambda d: d.random() < 0.5,
    "repetition_penalty": lambda d: d.choice([0, 0.01, 0.9, 1.3, 100, 101, -1]),
    "presence_penalty": lambda d: number(d, -2.0, 2.0),
    "frequency_penalty": lambda d: number(d, -2.0, 2.0),
    "logit_bias": lambda d: {
        str(d.choice(IDS[: 3 + (d.random() < 0.1) * 3])): number(d, -100, 100) for _ in range(3)
    },
    "min_tokens": lambda d: d.choice([0, 1, 5, 30, -1]),
    "bad_words": lambda d: d.choice([["a"], ["ab", "Xy"], [""], ["a" * 9], list("abcdefgh")]),
    "reproducible": lambda d: d.random() < 0.5,
    "logprobs": lambda d: d.choice([0, 1, 5, 20, 21]),
    "prompt_logprobs": lambda d: d.choice([0, 3, 20, -1]),
    "guided_regex": lambda d: d.choice(
        [REGEX, REGEX, "[a-h]{2,5}", "(a|é)*", "abc|h", "aZa|bb?", "a", "Za", "(", "", "(?=a)b"]
    ),
    "response_format": lambda d: d.choice(
        [{"type": "text"}, {"type": "json_object"}, json_schema(SCHEMA), json_schema({"enum": []})]
    ),
    "echo": lambda d: d.random() < 0.5,
    "stream": lambda d: d.random() < 0.4,
    "stream_options": lambda d: d.choice([{}, {"include_usage": True}, {"x": 1}]),
    "user": lambda d: d.choice(["me", "x" * 600]),
    "unknown": lambda d: 1,
}
FIELDS_OF_THE_MATRIX = {name for values in AXES.values() for v in values.values() for name in v}


GRAMMARS = ("guided_regex", "response_format")


def random_body(dice: random.Random) -> dict[str, Any]:
    """A body of a few fields, half the time a grammar among them; one may be of a wrong type or
    null."""
    names = dice.sample([*FIELDS], dice.randint(1, 7))
    if dice.random() < 0.5 and not set(names) & set(GRAMMARS):
        names.append(dice.choice(GRAMMARS))
    if dice.random() < 0.9 and "unknown" in names:
        names.remove("unknown")
    body = {"prompt": "abc", "max_tokens": 12} | {name: FIELDS[name](dice) for name in names}
    if dice.random() < 0.15:
        body[dice.choice(names or ["n"])] = dice.choice([None, *WRONG])
    return body


def complaint(body: dict[str, Any], answer: Answer) -> str:
    """What is wrong with an answer; "" = nothing."""
    if answer.status == 200:
        reasons = {choice["finish_reason"] for choice in answer.choices}
        if not answer.choices or not reasons <= {"stop", "length"}:
            return f"finished by {reasons}"
        return next(filter(None, (mismatch(body, choice) for choice in answer.choices)), "")
    if answer.status != 400:
        return f"status {answer.status}"
    if not answer.error["message"] or not answer.error["param"]:
        return f"a refusal that names nothing: {answer.error}"
    return ""


def mismatch(body: dict[str, Any], choice: dict[str, Any]) -> str:
    """Why a whole text does not match its grammar; "" = it does, or is cut, or has none."""
    text = choice["text"]
    whole = choice["finish_reason"] == "stop" and choice["stop_reason"] is None
    if not whole or body.get("echo"):
        return ""
    if body.get("guided_regex"):
        fits = re.fullmatch(body["guided_regex"], text)
        return "" if fits else f"{text!r} does not match {body['guided_regex']!r}"
    form = body.get("response_format") or {"type": "text"}
    if form["type"] == "text":
        return ""
    schema = form["json_schema"]["schema"] if "json_schema" in form else {"type": "object"}
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text!r} does not validate: {error}"
    return ""


def test_a_text_against_its_grammar_is_noticed():
    ended = {"text": "b", "finish_reason": "stop", "stop_reason": None}
    assert "does not match" in mismatch({"guided_regex": "a"}, ended)
    assert "does not validate" in mismatch({"response_format": json_schema(SCHEMA)}, ended)
    assert not mismatch({"guided_regex": "b"}, ended)
    assert not mismatch({"guided_regex": "a"}, {**ended, "finish_reason": "length"})


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "ten-thousand"]
)
def test_random_parameters_give_an_answer_or_a_refusal(tmp_path, count, random_seed):
    dice = random.Random(random_seed)
    before = threads_and_children()
    engine = Engine(checkpoint(tmp_path, SCRIPT), queue_depth=2)
    statuses: Counter[int] = Counter()
    warm_bytes = 0
    try:
        for batch in range(count // BATCH):
            if batch * BATCH == WARM:
                warm_bytes = resident_bytes()
            bodies = [random_body(dice) for _ in range(BATCH)]
            answers = engine.post_all(bodies)
            found = [(b, c) for b, a in zip(bodies, answers, strict=True) if (c := complaint(b, a))]
            assert not found, found[0]
            statuses.update(answer.status for answer in answers)
        assert settled(engine), engine.core.stats()
        if count > WARM:
            grown = resident_bytes() - warm_bytes
            assert grown < GROWTH_BYTES_PER_REQUEST * (count - WARM), grown
    finally:
        engine.close()
    assert threads_and_children() == before
    assert min(statuses[200], statuses[400]) > count // 10, statuses


def threads_and_children() -> tuple[int, int]:
    """Threads and child processes, without those that live as long as this process: pools for calls
    and for tokenising, and what Python watches shared memory with."""
    kept = ("asyncio_", "ThreadPoolExecutor", "AnyIO", "flare-tokenize")
    threads = [t for t in threading.enumerate() if not t.name.startswith(kept)]
    children = [child for child in psutil.Process().children() if not _watches_memory(child)]
    return len(threads), len(children)


def _watches_memory(child: psutil.Process) -> bool:
    try:
        return "resource_tracker" in " ".join(child.cmdline())
    except psutil.ZombieProcess:
        return False  # nobody has waited for it: left behind
    except psutil.NoSuchProcess:
        return True  # it has ended meanwhile


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(engine: Engine) -> bool:
    """Everything that ran has ended; the idle engine itself stops over a page that is held."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        stats = engine.core.stats()
        if not stats.running and not stats.waiting and not stats.pending_work:
            return True
        time.sleep(0.02)
    return False


def test_every_parameter_of_the_matrix_is_fuzzed():
    assert set(FIELDS) >= FIELDS_OF_THE_MATRIX
