"""Grammar-expanded short stories."""

from __future__ import annotations

import random
from dataclasses import dataclass

from flare_ray.workload.generators.base import Conversation, assistant, user
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.wordlists import (
    ANIMALS,
    COLORS,
    FEELINGS,
    NAMES,
    PLACES,
    THINGS,
    with_article,
)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who and what a story is about."""

    name: str
    animal: str
    color: str
    thing: str
    home: str
    place: str
    feeling: str
    friend: str
    friend_animal: str


def _cast(r: random.Random) -> Cast:
    name, friend = r.sample(NAMES, 2)
    animal, friend_animal = r.sample(ANIMALS, 2)
    return Cast(
        name=name,
        animal=animal,
        color=r.choice(COLORS),
        thing=r.choice(THINGS),
        home=r.choice(PLACES),
        place=r.choice(PLACES),
        feeling=r.choice(FEELINGS),
        friend=friend,
        friend_animal=friend_animal,
    )


def _opening(r: random.Random, c: Cast) -> list[str]:
    n, a, t = c.name, c.animal, c.thing
    return [
        r.choice(
            (
                f"Once upon a time there was {with_article(c.color)} {a} named {n}.",
                f"{n} was {with_article(c.color)} {a} who lived near the {c.home}.",
                f"In a small {c.home} lived {with_article(a)} called {n}. {n} was {c.color}.",
            )
        ),
        r.choice(
            (
                f"Every morning {n} walked to the {c.place}.",
                f"{n} loved the {c.place} very much.",
                f"One day {n} went to the {c.place} to play.",
            )
        ),
        r.choice(
            (
                f"There {n} found {with_article(t)} under a tree.",
                f"On the way {n} saw {with_article(t)} in the grass.",
                f"Near the water lay {with_article(t)}, and nobody else was there.",
            )
        ),
        r.choice(
            (
                f'"Whose {t} is this?" asked {n}.',
                f'"What a nice {t}!" said {n}.',
                f"{n} looked at the {t} and felt {c.feeling}.",
            )
        ),
    ]


def _meeting(r: random.Random, c: Cast) -> list[str]:
    n, m, t = c.name, c.friend, c.thing
    return [
        r.choice(
            (
                f"Then {with_article(c.friend_animal)} named {m} came along and began to cry.",
                f"Soon {m} the {c.friend_animal} arrived, looking for the {t}.",
                f"A friend, {m} the {c.friend_animal}, wanted to play with the {t} too.",
            )
        ),
        r.choice(
            (
                f'"That is my {t}," said {m}. "I lost it yesterday."',
                f'"Please help me," said {m}.',
                f'"Can we share the {t}?" asked {m}.',
            )
        ),
        r.choice(
            (
                f"{n} gave the {t} to {m}, and {m} smiled.",
                f"{n} was kind and shared the {t}.",
                f"Together {n} and {m} carried the {t} home.",
            )
        ),
        r.choice(
            (
                f"From that day on, {n} and {m} were friends.",
                f"{n} felt {c.feeling}, and {m} felt {r.choice(FEELINGS)}.",
                f"They played at the {c.place} until the sun went down.",
            )
        ),
    ]


def _alone(r: random.Random, c: Cast) -> list[str]:
    n, t = c.name, c.thing
    return [
        r.choice(
            (
                f"{n} took the {t} home and kept it safe.",
                f"{n} put the {t} on a shelf and slept well.",
                f"In the evening {n} went home with the {t}.",
            )
        )
    ]


def _telling(r: random.Random) -> tuple[Cast, str]:
    c = _cast(r)
    sentences = _opening(r, c)
    sentences += _meeting(r, c) if r.random() < 0.8 else _alone(r, c)
    if r.random() < 0.5:
        sentences.append(
            r.choice(
                (
                    "The end.",
                    f"And {c.name} never forgot that day.",
                    f"It was a good day in the {c.home}.",
                )
            )
        )
    return c, " ".join(sentences)


def story(r: random.Random, corpus: Corpus) -> Conversation:
    """A request for a story and the story; several in a long row."""
    messages = []
    for _ in range(r.randint(3, 8) if corpus.long_context else 1):
        c, text = _telling(r)
        animal, thing = with_article(c.animal), with_article(c.thing)
        question = r.choice(
            (
                f"Tell me a story about {animal} named {c.name}.",
                f"Write a short story about {c.name} the {c.animal}.",
                f"Tell me a story about {animal} and {thing}.",
                f"Write a tiny story set at the {c.place}.",
                "Tell me a story.",
                f"Please write a story with {animal}, {thing} and the {c.place}.",
            )
        )
        messages += [
            user(question),
            assistant(text, r.choice(("", f"A story with {animal} and {thing}."))),
        ]
    return Conversation(messages)
