"""Reads typed settings from a config.json and collects every problem before anyone raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from flare_ray.errors import CheckpointError, ConfigError

Number = TypeVar("Number", int, float)


class Fields:
    """Settings of one JSON object.

    Every reader returns a value of its type even where the setting is wrong, and notes the problem;
    `raise_problems` ends the reading.

    Args:
        values: the parsed object.
        path: of the object inside config.json, "" for the text settings themselves.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._problems: list[str] = []

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self._values.get(key) is not None

    def nested(self, key: str) -> Fields:
        """The object at `key`, an empty one where absent."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self._note(key, "an object")
            value = None
        return Fields(value or {}, f"{self._path}{key}.")

    def hand_problems_to(self, other: Fields) -> None:
        """Let `other` raise what was noted here."""
        other._problems += self._problems
        self._problems = []

    def raise_problems(self) -> None:
        """End the reading.

        Raises:
            CheckpointError: one line per noted problem.
        """
        if self._problems:
            raise CheckpointError(
                "config.json does not describe a model this recipe serves; correct it or use "
                "another checkpoint:",
                tuple(dict.fromkeys(self._problems)),
            )

    def integer(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; `default` where absent, None = required."""
        if not self.has(key) and default is not None:
            return default
        return self._number(key, int, least)

    def real(self, key: str) -> float:
        """A number above zero."""
        value = self._number(key, float, None)
        self.require(value > 0, key, "above 0")
        return value

    def either(self, flat: str, nested: Fields, inner: str, *, kind: type[Number]) -> Number:
        """A number under its flat name, or under `inner` of a nested object; equal if both."""
        if not self.has(flat) and not nested.has(inner):
            self.missing(flat, f"a number here or at {nested._path}{inner}")
            return kind(1)
        least = 1 if kind is int else None
        values = [
            fields._number(key, kind, least)
            for fields, key in ((self, flat), (nested, inner))
            if fields.has(key)
        ]
        if len(set(values)) > 1:
            self.conflict(flat, f"{nested._path}{inner}")
        return values[0]

    def token_ids(self, key: str, *, fallback: object) -> tuple[int, ...]:
        """One id or a list of ids; `fallback` is the same setting of the outer object."""
        value = self._values.get(key)
        value = fallback if value is None else value
        ids = value if isinstance(value, list) else [value]
        valid = [token for token in ids if isinstance(token, int) and _is_integer(token)]
        if not ids or len(valid) != len(ids) or min(valid) < 0:
            self._note(key, "a token id or a list of token ids", value)
            return ()
        return tuple(valid)

    def layer_kinds(
        self, key: str, layers: int, kinds: Mapping[str, bool]
    ) -> tuple[bool, ...] | None:
        """One word per layer, translated; None where absent."""
        if not self.has(key):
            return None
        words = self._values[key]
        if not isinstance(words, Sequence) or isinstance(words, str) or len(words) != layers:
            self._note(key, f"a list of num_hidden_layers = {layers} words", words)
            return None
        unknown = sorted({str(word) for word in words if word not in kinds})
        if unknown:
            self._note(key, f"words out of {sorted(kinds)}", unknown)
            return None
        return tuple(kinds[word] for word in words)

    def integers(self, key: str, *, count: int | None = None) -> tuple[int, ...]:
        """A list of whole numbers, of `count` entries where given; () where absent or wrong."""
        value = self._values.get(key)
        right = isinstance(value, list) and all(_is_integer(entry) for entry in value)
        if not isinstance(value, list) or not right or count not in (None, len(value)):
            wanted = "a list of whole numbers" + ("" if count is None else f", {count} of them")
            self._note(key, wanted)
            return ()
        return tuple(value)

    def switch(self, key: str, *, default: bool) -> bool:
        """True or false; `default` where absent."""
        value = self._values.get(key)
        self.require(value is None or isinstance(value, bool), key, "true or false")
        return default if value is None else bool(value)

    def layer_numbers(self, yes: str, no: str, layers: int) -> tuple[bool, ...] | None:
        """Two lists of layer numbers that together name every layer once; None where absent."""
        if not self.has(yes) or not self.has(no):
            return None
        lists = self._values[yes], self._values[no]
        named = [number for numbers in lists if isinstance(numbers, list) for number in numbers]
        if not all(isinstance(numbers, list) for numbers in lists) or sorted(
            named, key=str
        ) != sorted(range(layers), key=str):
            self._note(yes, f"with {no}, every layer of 0..{layers - 1} exactly once", named)
            return None
        return tuple(layer in lists[0] for layer in range(layers))

    def layer_list(self, key: str, *, first: int, last: int) -> tuple[int, ...]:
        """Distinct layer numbers from `first` to `last`, ascending; none where absent."""
        numbers = self._values.get(key)
        if numbers is None:
            return ()
        valid = isinstance(numbers, list) and all(
            isinstance(number, int) and _is_integer(number) and first <= number <= last
            for number in numbers
        )
        if not valid or len(set(numbers)) != len(numbers):
            self._note(key, f"distinct layer numbers from {first} to {last}", numbers)
            return ()
        return tuple(sorted(numbers))

    def equals(self, key: str, value: object) -> bool:
        """Whether a setting has this value."""
        return self._values.get(key) == value

    def fixed(self, key: str, value: object) -> None:
        """A setting with a single value that is served."""
        if self.has(key):
            self.require(self._values[key] == value, key, f"{value!r}, the only one served")

    def require(self, holds: bool, key: str, expected: str) -> None:
        """Note that `key` breaks a rule."""
        if not holds:
            self._note(key, expected)

    def missing(self, key: str, expected: str) -> None:
        """Note an absent setting."""
        self._problems.append(f"{self._path}{key}: missing, expected {expected}")

    def conflict(self, key: str, other: str) -> None:
        """Note two spellings that disagree."""
        self._problems.append(f"{self._path}{key}: disagrees with {other}")

    def _number(self, key: str, kind: type[Number], least: int | None) -> Number:
        value = self._values.get(key)
        wanted = "a whole number" if kind is int else "a number"
        if least is not None:
            wanted += f" of at least {least}"
        if value is None:
            self.missing(key, wanted)
            return kind(1)
        right_type = _is_integer(value) or (kind is float and isinstance(value, float))
        if not right_type or (least is not None and value < least):
            self._note(key, wanted)
            return kind(1)
        return kind(value)

    def _note(self, key: str, expected: str, got: object = None) -> None:
        got = self._values.get(key) if got is None else got
        text = repr(got)
        shown = text if len(text) <= 120 else f"{text[:117]}..."
        self._problems.append(f"{self._path}{key}: got {shown}, expected {expected}")


def check_shared(sizes: Mapping[str, int], world_size: int, *, also: Sequence[str] = ()) -> None:
    """Refuse a TP degree that some divided size does not admit.

    Args:
        sizes: by name.
        also: further names with sizes, found wrong by other rules.
    Raises:
        ConfigError: names every such size.
    """
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % world_size]
    wrong += also
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} cannot be shared by {world_size} ranks; choose another "
            "tensor_parallel_size"
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
