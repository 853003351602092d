"""Drafts against a grammar: cut before verification, one mask per position (contract: K1)."""

import numpy as np
import pytest

from flare_ray.controller.grammar.masks import walk_drafts

END = 9


class Sequence:
    """Admits one text of tokens, then END; forced text is known."""

    def __init__(self, *tokens: int, forces: bool = False) -> None:
        self.text = (*tokens, END)
        self.at = 0
        self.forces = forces

    def fill_mask(self, rows, row) -> None:
        rows[row] = 1 << self.text[self.at]

    def try_token(self, token) -> bool:
        if self.at == len(self.text) or token != self.text[self.at]:
            return False
        self.at += 1
        return True

    def undo(self, tokens) -> None:
        self.at -= tokens

    def commit(self, token) -> None:
        assert self.try_token(token)

    def forced_tokens(self):
        return self.text[self.at : -1] if self.forces else ()

    @property
    def has_ended(self) -> bool:
        return self.at == len(self.text)

    @property
    def can_end(self) -> bool:
        return self.at == len(self.text) - 1


def walk(matcher, drafts):
    rows = np.zeros((10, 1), np.int32)
    result = walk_drafts(matcher, drafts, rows, 2)
    assert matcher.at == 0
    return result, rows[2:, 0].tolist()


def test_every_position_has_its_own_mask_and_the_bonus_too():
    result, rows = walk(Sequence(1, 2, 3, 4), (1, 2, 3))
    assert (result.limit, result.copies) == (3, ())
    assert rows[:4] == [1 << 1, 1 << 2, 1 << 3, 1 << 4]


@pytest.mark.parametrize("place", range(4))
def test_drafts_are_cut_at_the_first_forbidden_one(place):
    drafts = [1, 2, 3, 4]
    drafts[place] = 7
    result, rows = walk(Sequence(1, 2, 3, 4), drafts)
    assert (result.kept, result.limit) == (place, place)
    assert rows[place] == 1 << (place + 1)
    assert not any(rows[place + 1 :])


def test_forced_text_takes_the_places_of_forbidden_drafts():
    result, rows = walk(Sequence(1, 2, 3, 4, forces=True), (1, 7, 7, 7))
    assert (result.kept, result.limit, result.copies) == (1, 4, (-1, 2, 3, 4))
    assert rows[:5] == [1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << END]


def test_nothing_is_verified_behind_a_terminal_token():
    result, rows = walk(Sequence(1), (1, END, 5, 5))
    assert result.limit == 2
    assert rows[:3] == [1 << 1, 1 << END, -1]


def test_no_drafts_still_fill_the_first_row():
    result, rows = walk(Sequence(1), ())
    assert (result.limit, rows[0]) == (0, 1 << 1)
