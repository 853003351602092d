"""Structured extraction: a sentence in, JSON out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from flare_ray.workload.generators.base import (
    Conversation,
    assistant,
    noun,
    to_json,
    turn_count,
    user,
)
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.wordlists import (
    COLORS,
    ITEMS,
    THINGS,
    city_name,
    date_text,
    first_name,
    invented_name,
    last_name,
    mail_address,
    time_text,
)

Record = dict[str, Any]


def json_type(value: object) -> dict[str, str]:
    """JSON schema type of a scalar."""
    if isinstance(value, bool):
        return {"type": "boolean"}
    names = {int: "integer", float: "number", str: "string"}
    return {"type": names[type(value)]}


def _person(r: random.Random) -> tuple[Record, str]:
    first, last, city = first_name(r), last_name(r), city_name(r)
    record = {
        "name": f"{first} {last}",
        "age": r.randint(18, 90),
        "city": city,
        "email": mail_address(first, last),
    }
    text = (
        f"{first} {last} is {record['age']} years old and lives in {city}. "
        f"The address for mail is {record['email']}."
    )
    return record, text


def _order(r: random.Random) -> tuple[Record, str]:
    customer = f"{first_name(r)} {last_name(r)}"
    price = r.randint(1, 99) + r.choice((0.5, 0.25, 0.99, 0.0))
    record = {
        "item": r.choice(ITEMS),
        "quantity": r.randint(1, 60),
        "price": price,
        "customer": customer,
    }
    return (
        record,
        f"{customer} ordered {record['quantity']} of the {record['item']} at {price} dollars each.",
    )


def _event(r: random.Random) -> tuple[Record, str]:
    title = r.choice(("Team meeting", "Dentist", "Lunch", "Yoga class", "Book club", "Code review"))
    record = {"title": title, "date": date_text(r), "time": time_text(r), "place": city_name(r)}
    return record, f"{title} on {record['date']} at {record['time']} in {record['place']}."


def _ticket(r: random.Random) -> tuple[Record, str]:
    name = first_name(r)
    record = {
        "id": r.randint(100, 99999),
        "status": r.choice(("open", "closed", "pending")),
        "priority": r.choice(("low", "medium", "high")),
        "assignee": name,
    }
    return (
        record,
        f"Ticket {record['id']} is {record['status']} with {record['priority']} priority "
        f"and belongs to {name}.",
    )


def _book(r: random.Random) -> tuple[Record, str]:
    author = f"{first_name(r)} {last_name(r)}"
    title = f"The {r.choice(COLORS).capitalize()} {r.choice(THINGS).capitalize()}"
    record = {
        "author": author,
        "title": title,
        "year": r.randint(1900, 2026),
        "pages": r.randint(60, 900),
    }
    return (
        record,
        f"The book {title} by {author} came out in {record['year']} "
        f"and has {record['pages']} pages.",
    )


def _weather(r: random.Random) -> tuple[Record, str]:
    city, sunny = city_name(r), r.random() < 0.5
    record = {
        "city": city,
        "temperature": r.randint(-15, 40),
        "wind": r.randint(0, 90),
        "sunny": sunny,
    }
    sky = "clear" if sunny else "grey"
    text = (
        f"In {city} it is {record['temperature']} degrees with wind at {record['wind']} km/h, "
        f"and the sky is {sky}."
    )
    return record, text


RECORDS: tuple[Callable[[random.Random], tuple[Record, str]], ...] = (
    _person,
    _order,
    _event,
    _ticket,
    _book,
    _weather,
)


def _free(r: random.Random, corpus: Corpus) -> tuple[Record, str]:
    """A record of dictionary nouns: nothing but copying solves it."""
    keys = list(dict.fromkeys(noun(r, corpus) for _ in range(r.randint(2, 5))))
    record: Record = {}
    for key in keys:
        kind = r.randrange(3)
        record[key] = (
            r.randint(0, 5000) if kind == 0 else invented_name(r) if kind == 1 else r.choice(COLORS)
        )
    text = ", ".join(f"the {k} is {v}" for k, v in record.items())
    return record, text[0].upper() + text[1:] + "."


def _question(r: random.Random, text: str, keys: list[str], schema: Record) -> str:
    listed = ", ".join(keys)
    return r.choice(
        (
            f"Extract {listed} as JSON: {text}",
            f"{text}\nReturn JSON with the keys {listed}.",
            f"Schema: {to_json(schema)}\nText: {text}\nAnswer with JSON only.",
            f"Turn this into JSON ({listed}): {text}",
        )
    )


def _turn(r: random.Random, corpus: Corpus) -> tuple[str, str, list[str]]:
    if r.random() < 0.15:
        record, text = _free(r, corpus)
        found = [(record, text)]
    else:
        kind = r.choice(RECORDS)
        found = [kind(r) for _ in range(2 if r.random() < 0.1 else 1)]
    keys = list(found[0][0])
    if r.random() < 0.5 and len(keys) > 2:
        keys = sorted(r.sample(keys, r.randint(2, len(keys))), key=keys.index)
    bodies = [{k: record[k] for k in keys} for record, _ in found]
    schema: Record = {
        "type": "object",
        "properties": {k: json_type(bodies[0][k]) for k in keys},
        "required": keys,
    }
    if len(bodies) > 1:
        schema = {"type": "array", "items": schema}
    question = _question(r, " ".join(text for _, text in found), keys, schema)
    return question, to_json(bodies if len(bodies) > 1 else bodies[0]), keys


def json_records(r: random.Random, corpus: Corpus) -> Conversation:
    """One or more extraction requests."""
    messages = []
    for _ in range(turn_count(r, corpus) if corpus.long_context else r.choice((1, 1, 2))):
        question, answer, keys = _turn(r, corpus)
        messages += [user(question), assistant(answer, r.choice(("", f"Keys: {', '.join(keys)}.")))]
    return Conversation(messages)
