"""Patterns whose texts could be read in many ways have one reading, and match what they matched."""

import itertools
import random
import re
import time

import numpy as np
import pytest

from flare_ray.controller.grammar.automaton import MAX_STATES, Automaton, automaton_of
from flare_ray.controller.grammar.language import Chars, Repeat, repeat
from flare_ray.controller.grammar.regex import MAX_PATTERN_CHARACTERS, _expression
from flare_ray.errors import InvalidRequest
from tests.support.grammar_engine import EOS, VOCAB_SIZE
from tests.support.grammar_fuzz import random_regex

AMBIGUOUS = (
    "(((.|.)?)+x)*",
    "(.*.*)*x",
    "(.*.*.*){0,9}!",
    r"((\w|\d)+)+!",
    "((a?)+)*b",
    "((.|.)?){0,40}x",
    "((.|..)*x)*",
    "(([^x]| |.)?)*",
    "(a|ab|b)*(ba|b)*c",
)
"""Trees of these took up to seconds a token."""
TOKENS = 60
LIMIT_S = 0.005
"""Processor time a token; ten times what it takes."""
DIVIDED_LIMIT_S = 2.0
"""Processor time of a division; squares of the characters would take minutes."""
PATTERNS = 400
LETTERS = "abx1 \\n.é在"


def automaton(pattern: str) -> Automaton:
    found = automaton_of(_expression(pattern, search=False))
    assert found is not None
    return found


def accepts(machine: Automaton, text: str) -> bool:
    state = 0
    for letter in text:
        for ranges, target in machine.edges[state]:
            if any(low <= ord(letter) <= high for low, high in ranges):
                state = target
                break
        else:
            return False
    return machine.accepts[state]


def test_automata_accept_what_their_patterns_match():
    dice, compared, matched = random.Random(5), 0, 0
    texts = ["".join(t) for n in range(4) for t in itertools.product(LETTERS, repeat=n)]
    for _ in range(PATTERNS):
        pattern = random_regex(dice)
        try:
            machine = automaton_of(_expression(pattern, search=False))
        except InvalidRequest:
            continue
        if machine is None:
            continue
        for text in dice.sample(texts, 40):
            # The accepted classes are those of ASCII, in which ECMA and Python agree.
            expected = re.fullmatch(pattern, text, re.ASCII) is not None
            assert accepts(machine, text) == expected, (pattern, text)
            matched += expected
            compared += 1
    assert compared > PATTERNS * 20
    assert matched > compared // 20


@pytest.mark.parametrize("pattern", AMBIGUOUS)
def test_edges_of_a_state_never_share_a_character(pattern):
    for edges in automaton(pattern).edges:
        pairs = sorted(pair for ranges, _ in edges for pair in ranges)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(pairs))


@pytest.mark.parametrize("pattern", AMBIGUOUS)
def test_ambiguous_patterns_cost_as_little_as_others(pattern, compile_):
    matcher = compile_("regex", pattern).matcher()
    rows, dice = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32), random.Random(1)
    times = []
    for _ in range(TOKENS):
        started = time.thread_time()
        matcher.fill_mask(rows, 0)
        bits = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
        going_on = [token for token in bits.tolist() if token != EOS]
        if not going_on:
            break
        matcher.commit(dice.choice(going_on))
        times.append(time.thread_time() - started)
    assert sorted(times)[len(times) // 2] < LIMIT_S


def test_states_are_joined_where_the_same_may_follow():
    assert len(automaton("(a|b|c)*").edges) == 1
    assert len(automaton("(ax|bx|cx)*").edges) == 2


def test_an_automaton_of_too_many_states_is_given_up():
    assert automaton_of(_expression(f"(a|b)*a(a|b){{{MAX_STATES.bit_length()}}}", False)) is None
    assert automaton_of(_expression(f"a{{{MAX_STATES}}}", search=False)) is None


def test_a_pattern_of_the_most_different_characters_takes_no_time():
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 2 * MAX_PATTERN_CHARACTERS, 2)))
    expr = _expression(letters, search=False)
    started = time.thread_time()
    assert automaton_of(expr) is None
    assert time.thread_time() - started < DIVIDED_LIMIT_S


def test_repeated_repetitions_become_one():
    letter = Chars(((97, 97),))
    assert repeat(repeat(letter, 0, None), 1, None) == Repeat(letter, 0, None)
    assert repeat(repeat(letter, 1, 3), 2, 4) == Repeat(letter, 2, 12)
    assert repeat(repeat(letter, 2, 3), 1, 2) == Repeat(Repeat(letter, 2, 3), 1, 2)
    assert repeat(repeat(letter, 0, 1), 0, 40) == Repeat(letter, 0, 40)
