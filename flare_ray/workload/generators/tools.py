"""Tool use: fixed and invented functions, parallel calls, results quoted in the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flare_ray.workload.generators.base import (
    Conversation,
    Message,
    assistant,
    noun,
    to_json,
    turn_count,
    user,
    verb,
)
from flare_ray.workload.generators.chat import small_talk
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.records import json_type
from flare_ray.workload.generators.wordlists import (
    COLORS,
    ITEMS,
    NAMES,
    SYSTEM_PROMPTS,
    THINGS,
    city_name,
    date_text,
    first_name,
    invented_name,
    last_name,
    mail_address,
    plural,
    time_text,
    with_article,
    words,
)

Signature = dict[str, Any]
UNITS = ("celsius", "fahrenheit")
STEMS = words("report notes main config index data budget plan todo readme")


class Call(NamedTuple):
    """One call: the signature it belongs to and its arguments."""

    tool: Signature
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the called function."""
        return str(self.tool["function"]["name"])


class Case(NamedTuple):
    """One tool round: the question, the calls, their results (text or JSON), the answer."""

    question: str
    calls: list[Call]
    results: list[Any]
    answer: str


def signature(
    name: str,
    description: str,
    properties: dict[str, str | Sequence[str]],
    required: list[str] | None = None,
) -> Signature:
    """An OpenAI function signature; a property is a JSON type or the values of a string enum."""
    fields = {
        k: {"type": v} if isinstance(v, str) else {"type": "string", "enum": list(v)}
        for k, v in properties.items()
    }
    parameters = {
        "type": "object",
        "properties": fields,
        "required": list(properties) if required is None else required,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _known(*signatures: Signature) -> dict[str, Signature]:
    return {s["function"]["name"]: s for s in signatures}


TOOLS = _known(
    signature(
        "get_weather", "Current weather of a city", {"city": "string", "unit": UNITS}, ["city"]
    ),
    signature(
        "search_files", "Find files by name pattern", {"pattern": "string", "path": "string"}
    ),
    signature("read_file", "Read a text file", {"path": "string"}),
    signature(
        "add_event", "Add a calendar event", {"title": "string", "date": "string", "time": "string"}
    ),
    signature("list_events", "Events of one day", {"date": "string"}),
    signature(
        "send_email", "Send an email", {"to": "string", "subject": "string", "body": "string"}
    ),
    signature(
        "convert_currency",
        "Convert an amount of money",
        {"amount": "number", "source": "string", "target": "string"},
    ),
    signature("get_stock", "Price of a stock", {"symbol": "string"}),
    signature("set_timer", "Start a timer", {"minutes": "integer", "label": "string"}),
    signature("lookup_user", "Find a user by id", {"user_id": "integer"}),
    signature("query_table", "Read rows of a table", {"table": "string", "limit": "integer"}),
    signature("calculate", "Evaluate an arithmetic expression", {"expression": "string"}),
)


def _call(name: str, arguments: dict[str, Any]) -> Call:
    return Call(TOOLS[name], arguments)


def _folder(r: random.Random) -> str:
    return r.choice(("/home/" + r.choice(NAMES).lower(), "/srv/data", "docs", "src", "/tmp/work"))


def _weather(r: random.Random, corpus: Corpus) -> Case:
    cities = [city_name(r) for _ in range(2 if r.random() < 0.3 else 1)]
    unit = r.choice(UNITS) if r.random() < 0.5 else None
    calls = [_call("get_weather", {"city": c} | ({"unit": unit} if unit else {})) for c in cities]
    skies = ("sunny", "cloudy", "rainy", "windy", "snowy")
    results = [
        {"city": c, "temperature": r.randint(-10, 38), "condition": r.choice(skies)} for c in cities
    ]
    ask = r.choice(
        ("What is the weather in {}", "How is the weather in {} today", "Tell me the weather in {}")
    )
    question = ask.format(" and ".join(cities)) + (f" in {unit}" if unit else "") + r.choice("?.")
    answer = " ".join(
        f"In {x['city']} it is {x['temperature']} degrees and {x['condition']}." for x in results
    )
    return Case(question, calls, results, answer)


def _search(r: random.Random, corpus: Corpus) -> Case:
    folder, ending = _folder(r), r.choice(("txt", "py", "csv", "md"))
    files = [f"{folder}/{s}.{ending}" for s in r.sample(STEMS, r.randint(1, 4))]
    call = _call("search_files", {"pattern": f"*.{ending}", "path": folder})
    answer = f"I found {len(files)} file{'s' * (len(files) > 1)}: {', '.join(files)}."
    return Case(f"Find all {ending} files in {folder}.", [call], [{"files": files}], answer)


def _read(r: random.Random, corpus: Corpus) -> Case:
    path = f"{_folder(r)}/{r.choice(STEMS)}.txt"
    act = r.choice(("owes", "sent", "needs", "sold"))
    text = f"{first_name(r)} {act} {r.randint(2, 90)} {plural(r.choice(ITEMS))}."
    question = r.choice((f"What is in {path}?", f"Read {path} for me.", f"Open the file {path}."))
    return Case(question, [_call("read_file", {"path": path})], [text], f"The file says: {text}")


def _add_event(r: random.Random, corpus: Corpus) -> Case:
    date, time, name = date_text(r, 2024, 2028), time_text(r), first_name(r)
    title = r.choice(
        (
            "Team meeting",
            "Dentist",
            f"Lunch with {name}",
            "Yoga class",
            "Book club",
            "Code review",
            f"Call {name}",
        )
    )
    question = r.choice(
        (f"Add {title} on {date} at {time}.", f"Put {title} into my calendar for {date}, {time}.")
    )
    call = _call("add_event", {"title": title, "date": date, "time": time})
    return Case(
        question,
        [call],
        [{"ok": True, "id": r.randint(100, 9999)}],
        f"Done. {title} is planned for {date} at {time}.",
    )


def _list_events(r: random.Random, corpus: Corpus) -> Case:
    date, titles = date_text(r, 2024, 2028), ("Standup", "Lunch", "Review", "Dentist", "Planning")
    hours = sorted(r.sample(range(8, 20), r.randint(1, 3)))
    events = [{"time": f"{h:02d}:00", "title": r.choice(titles)} for h in hours]
    question = r.choice((f"What do I have on {date}?", f"List my events for {date}."))
    listed = ", ".join(f"{e['title']} at {e['time']}" for e in events)
    return Case(
        question, [_call("list_events", {"date": date})], [events], f"On {date} you have: {listed}."
    )


def _mail(r: random.Random, corpus: Corpus) -> Case:
    to, subject = (
        mail_address(first_name(r), last_name(r)),
        r.choice(("Hello", "Meeting notes", "Invoice", "Question", "Weekend")),
    )
    body = r.choice(
        (
            "See you soon.",
            f"Please call {first_name(r)}.",
            f"The total is {r.randint(5, 900)} dollars.",
            "Thanks for your help.",
        )
    )
    question = f'Send an email to {to} with subject "{subject}" and text "{body}"'
    call = _call("send_email", {"to": to, "subject": subject, "body": body})
    return Case(question, [call], [{"sent": True}], f"I sent the email to {to}.")


def _currency(r: random.Random, corpus: Corpus) -> Case:
    amount, (source, target) = (
        r.randint(1, 900),
        r.sample(("USD", "EUR", "GBP", "JPY", "CHF", "SEK"), 2),
    )
    value = round(amount * r.uniform(0.5, 2), 2)
    call = _call("convert_currency", {"amount": amount, "source": source, "target": target})
    question = f"Convert {amount} {source} to {target}."
    return Case(
        question,
        [call],
        [{"amount": value, "currency": target}],
        f"{amount} {source} are {value} {target}.",
    )


def _stock(r: random.Random, corpus: Corpus) -> Case:
    symbol = "".join(r.choice("ABCDEFGHIKLMNOPRSTVWX") for _ in range(r.randint(3, 4)))
    price = round(r.uniform(2, 900), 2)
    question = r.choice((f"What is the price of {symbol}?", f"How much is {symbol} stock?"))
    call = _call("get_stock", {"symbol": symbol})
    return Case(
        question, [call], [{"symbol": symbol, "price": price}], f"{symbol} is at {price} dollars."
    )


def _timer(r: random.Random, corpus: Corpus) -> Case:
    minutes, label = (
        r.randint(1, 90),
        r.choice(("tea", "pasta", "laundry", "break", "eggs", "cake", "run")),
    )
    call = _call("set_timer", {"minutes": minutes, "label": label})
    question = f"Set a {label} timer for {minutes} minutes."
    return Case(question, [call], [{"ok": True}], f"The {label} timer runs for {minutes} minutes.")


def _lookup(r: random.Random, corpus: Corpus) -> Case:
    number, name, city = r.randint(1, 9999), f"{first_name(r)} {last_name(r)}", city_name(r)
    call = _call("lookup_user", {"user_id": number})
    result = {"user_id": number, "name": name, "city": city}
    return Case(f"Who is user {number}?", [call], [result], f"User {number} is {name} from {city}.")


def _table(r: random.Random, corpus: Corpus) -> Case:
    table, limit = r.choice(("users", "orders", "products", "invoices", "tickets")), r.randint(1, 3)
    rows = [{"id": r.randint(1, 999), "name": first_name(r)} for _ in range(limit)]
    call = _call("query_table", {"table": table, "limit": limit})
    answer = "; ".join(f"{x['id']}: {x['name']}" for x in rows) + "."
    return Case(
        f"Show {limit} row{'s' * (limit > 1)} of the {table} table.", [call], [rows], answer
    )


def _calculator(r: random.Random, corpus: Corpus) -> Case:
    a, b, operator = r.randint(10, 999), r.randint(10, 99), r.choice("+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[operator]
    expression = f"{a} {operator} {b}"
    call = _call("calculate", {"expression": expression})
    return Case(
        f"Use the calculator: {expression}", [call], [{"result": value}], f"{expression} = {value}."
    )


def _invented(r: random.Random, corpus: Corpus) -> Case:
    """A function that no other conversation has: its name, keys and values must be copied."""
    verbs = words(
        """
        create update remove delete fetch start stop check rename archive open close
        """
    )
    nouns = words(
        """
        task project invoice server backup session channel folder report device account order
        """
    )
    keys = words("name owner count color size level region mode tag note")
    act = verb(r, corpus) if r.random() < 0.4 else r.choice(verbs)
    what = noun(r, corpus) if r.random() < 0.4 else r.choice(nouns)
    chosen = r.sample(keys, r.randint(1, 3))
    if r.random() < 0.3:
        chosen = list(dict.fromkeys([*chosen, noun(r, corpus)]))
    values: dict[str, Any] = {}
    for key in chosen:
        numeric = key in ("count", "size", "level")
        text = invented_name(r) if r.random() < 0.3 else r.choice(NAMES + COLORS + THINGS)
        values[key] = r.randint(1, 500) if numeric else text
    tool = signature(
        f"{act}_{what}",
        f"{act.capitalize()} {with_article(what)}",
        {k: json_type(v)["type"] for k, v in values.items()},
    )
    listed = " and ".join(f"{k} {v}" for k, v in values.items())
    question = f"Please {act} {with_article(what)} with {listed}."
    number = r.randint(100, 9999)
    return Case(
        question,
        [Call(tool, values)],
        [{"ok": True, "id": number}],
        f"Done, the {what} has id {number}.",
    )


CASES: tuple[Callable[[random.Random, Corpus], Case], ...] = (
    _weather,
    _weather,
    _search,
    _read,
    _add_event,
    _list_events,
    _mail,
    _currency,
    _stock,
    _timer,
    _lookup,
    _table,
    _calculator,
    _invented,
    _invented,
    _invented,
)


def _offered(r: random.Random, cases: list[Case]) -> list[Signature]:
    tools = {c.name: c.tool for case in cases for c in case.calls}
    for name in r.sample(sorted(TOOLS), r.randint(0, 3)):
        tools.setdefault(name, TOOLS[name])
    listed = list(tools.values())
    r.shuffle(listed)
    return listed


def tool_use(r: random.Random, corpus: Corpus) -> Conversation:
    """One or more tool rounds; sometimes small talk first."""
    cases = [r.choice(CASES)(r, corpus) for _ in range(turn_count(r, corpus))]
    messages: list[Message] = []
    if r.random() < 0.15:
        exchange = small_talk(r)
        messages += [user(exchange.question), assistant(exchange.answer, exchange.reasoning)]
    for case in cases:
        calls = [{"name": c.name, "arguments": c.arguments} for c in case.calls]
        reasoning = r.choice(("", f"I need {calls[0]['name']}."))
        messages += [user(case.question), assistant("", reasoning, calls)]
        messages += [
            {"role": "tool", "content": x if isinstance(x, str) else to_json(x)}
            for x in case.results
        ]
        messages.append(assistant(case.answer))
    return Conversation(messages, _offered(r, cases))


def with_system_prompt(
    r: random.Random, conversation: Conversation, probability: float = 0.2
) -> Conversation:
    """The conversation behind a system message, with the given probability."""
    if r.random() >= probability:
        return conversation
    system = {"role": "system", "content": r.choice(SYSTEM_PROMPTS)}
    return Conversation([system, *conversation.messages], conversation.tools)
