"""Checkers: right answers pass, each kind of wrong answer does not."""

import json

import pytest

from flare_ray.errors import ConfigError
from flare_ray.workload.checks import check
from flare_ray.workload.items import Answer, Call, Expectation
from flare_ray.workload.source import load_workload

CODE = "def f(a):\n    return a + 1"


def right_answer(expected: Expectation) -> Answer:
    """The answer that an item expects."""
    value = expected.value
    match expected.check:
        case "calls":
            calls = tuple(Call(call["name"], call["arguments"]) for call in value)
            return Answer(calls=calls)
        case "json":
            return Answer(content=json.dumps(value))
        case "code":
            return Answer(content=f"```python\n{value}\n```")
        case _:
            return Answer(content=str(value))


def verdict(kind, value, answer):
    return check(Expectation(check=kind, value=value), answer).right


def test_every_frozen_item_accepts_its_own_answer_and_no_other():
    checked = [item for item in load_workload().items if item.expected.check != "none"]
    assert len(checked) > 200
    for item in checked:
        assert check(item.expected, right_answer(item.expected)).right, item.item_id
        wrong = check(item.expected, Answer(content="I cannot help with that."))
        assert wrong.right is False and wrong.reason, item.item_id


def test_nothing_expected_gives_no_verdict():
    assert check(Expectation(), Answer(content="anything")).right is None


@pytest.mark.parametrize(
    ("kind", "value", "answer", "right"),
    [
        ("exact", "a b", Answer(content=" a\n b "), True),
        ("exact", "a b", Answer(content="a c"), False),
        ("contains", ["Oslo", "12"], Answer(content="In oslo it is 12 degrees."), True),
        ("contains", ["Oslo", "12"], Answer(content="In Oslo it is 13 degrees."), False),
        ("json", {"a": 1, "b": [True]}, Answer(content='```json\n{"b":[true],"a":1.0}\n```'), True),
        ("json", {"a": 1}, Answer(content='{"a": "1"}'), False),
        ("json", {"a": 1}, Answer(content='{"a": true}'), False),
        ("json", {"a": 1}, Answer(content='{"a": 1, "b": 2}'), False),
        ("json", {"a": 1}, Answer(content='{"a": 1'), False),
        ("number", 1234, Answer(content="First 7, so it is 1,234."), True),
        ("number", 1234, Answer(content="1234, then 5."), False),
        ("number", 5, Answer(content="five"), False),
        ("code", CODE, Answer(content=f"Here:\n```python\n{CODE}  # note\n```"), True),
        ("code", CODE, Answer(content="```python\ndef f(a):\n    return a + 2\n```"), False),
        ("code", CODE, Answer(content=f"```python\n# extra\n{CODE}\n```"), False),
        ("code", CODE, Answer(content=CODE), False),
        ("code", CODE, Answer(content="```python\ndef f(a:\n```"), False),
    ],
)
def test_answer_is_judged(kind, value, answer, right):
    assert verdict(kind, value, answer) is right


CALLS = [{"name": "get", "arguments": {"city": "Oslo", "days": 2}}]


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ((Call("get", {"days": 2.0, "city": "Oslo"}),), True),
        ((Call("get", {"city": "Oslo", "days": 3}),), False),
        ((Call("put", {"city": "Oslo", "days": 2}),), False),
        ((), False),
        ((Call("get", {"city": "Oslo", "days": 2}),) * 2, False),
        ((Call("get", '{"city": '),), False),
    ],
)
def test_calls_are_compared_by_name_and_arguments(calls, right):
    assert verdict("calls", CALLS, Answer(calls=calls)) is right


def test_a_broken_expectation_is_no_wrong_answer():
    with pytest.raises(ConfigError, match="needs a number"):
        check(Expectation(check="number", value="7"), Answer(content="7"))
