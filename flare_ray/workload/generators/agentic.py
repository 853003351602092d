"""Agentic sessions: tasks of several calls on a small world whose answers are recorded.

The world is a few files, a calendar and two tables. Calls are answered while a session is made;
what they answered is part of its messages, and a session can be replayed on a fresh world (the
tests do) to see that every recorded result follows from the calls before it. Serving or measuring
executes nothing.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flare_ray.workload.generators.base import Conversation, Message, assistant, to_json, user
from flare_ray.workload.generators.tools import STEMS, TOOLS
from flare_ray.workload.generators.wordlists import (
    ITEMS,
    city_name,
    date_text,
    first_name,
    last_name,
    mail_address,
    plural,
    time_text,
)

SYSTEM = (
    "You are an assistant with access to files, a calendar, mail and two tables. Use one tool at a "
    "time, quote results exactly, and answer in one sentence when the task is done."
)
USED = (
    *("search_files", "read_file", "send_email", "add_event", "list_events"),
    *("lookup_user", "query_table", "calculate"),
)


@dataclass(slots=True)
class World:
    """State that calls read and change."""

    files: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, str]] = field(default_factory=list)
    users: dict[int, dict[str, Any]] = field(default_factory=dict)
    orders: list[dict[str, Any]] = field(default_factory=list)
    mails: list[dict[str, str]] = field(default_factory=list)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Text of a tool's result.

        Raises:
            KeyError: the world has no such function, file or user.
        """
        answer = {
            "search_files": self._search,
            "read_file": self._read,
            "send_email": self._send,
            "add_event": self._add,
            "list_events": self._list,
            "lookup_user": self._user,
            "query_table": self._table,
            "calculate": self._calculate,
        }[name](arguments)
        return answer if isinstance(answer, str) else to_json(answer)

    def _search(self, a: dict[str, Any]) -> Any:
        folder = a["path"].rstrip("/") + "/"
        names = [p for p in sorted(self.files) if p.startswith(folder)]
        return {"files": [p for p in names if fnmatch.fnmatch(p[len(folder) :], a["pattern"])]}

    def _read(self, a: dict[str, Any]) -> Any:
        return self.files[a["path"]]

    def _send(self, a: dict[str, Any]) -> Any:
        self.mails.append(dict(a))
        return {"sent": True, "id": 100 + len(self.mails)}

    def _add(self, a: dict[str, Any]) -> Any:
        self.events.append(dict(a))
        return {"ok": True, "id": 500 + len(self.events)}

    def _list(self, a: dict[str, Any]) -> Any:
        found = [e for e in self.events if e["date"] == a["date"]]
        return [{"time": e["time"], "title": e["title"]} for e in found]

    def _user(self, a: dict[str, Any]) -> Any:
        return {"user_id": a["user_id"], **self.users[a["user_id"]]}

    def _table(self, a: dict[str, Any]) -> Any:
        return self.orders[: a["limit"]]

    def _calculate(self, a: dict[str, Any]) -> Any:
        left, operator, right = a["expression"].split()
        results = {"+": int(left) + int(right), "*": int(left) * int(right)}
        return {"result": results[operator]}


class Step(NamedTuple):
    """One call of a task."""

    name: str
    arguments: dict[str, Any]


class Task(NamedTuple):
    """A request, its calls, and the answer, which is made from the last results."""

    question: str
    steps: list[Step]
    answer: Callable[[list[str]], str]


def make_world(r: random.Random) -> World:
    """Files in two folders, users, orders; an empty calendar."""
    world = World()
    for folder in ("docs", "reports"):
        for stem in r.sample(STEMS, 3):
            act = r.choice(("owes", "sent", "needs", "sold"))
            text = f"{first_name(r)} {act} {r.randint(2, 90)} {plural(r.choice(ITEMS))}."
            world.files[f"{folder}/{stem}.txt"] = text
    for number in r.sample(range(1, 1000), 4):
        first, last = first_name(r), last_name(r)
        world.users[number] = {
            "name": f"{first} {last}",
            "city": city_name(r),
            "email": mail_address(first, last),
        }
    world.orders = [
        {"id": r.randint(100, 999), "count": r.randint(2, 40), "price": r.randint(2, 9)}
        for _ in range(3)
    ]
    return world


def _file_to_mail(r: random.Random, world: World) -> Task:
    path = r.choice(sorted(world.files))
    folder = path.split("/")[0]
    number = r.choice(sorted(world.users))
    text, person = world.files[path], world.users[number]
    return Task(
        f"Look for txt files in {folder}, read {path} and send its text to user {number} with "
        f'subject "Notes".',
        [
            Step("search_files", {"pattern": "*.txt", "path": folder}),
            Step("read_file", {"path": path}),
            Step("lookup_user", {"user_id": number}),
            Step("send_email", {"to": person["email"], "subject": "Notes", "body": text}),
        ],
        lambda _: f"I sent the email to {person['email']}.",
    )


def _plan_event(r: random.Random, world: World) -> Task:
    date, time = date_text(r, 2026, 2028), time_text(r)
    title = r.choice(("Team meeting", "Book club", "Code review", "Yoga class"))
    return Task(
        f"Put {title} into my calendar for {date}, {time}, then list my events for that day.",
        [
            Step("add_event", {"title": title, "date": date, "time": time}),
            Step("list_events", {"date": date}),
        ],
        lambda _: f"On {date} you have: {title} at {time}.",
    )


def _order_total(r: random.Random, world: World) -> Task:
    limit = r.randint(1, len(world.orders))
    order = world.orders[limit - 1]
    expression = f"{order['count']} * {order['price']}"
    total = order["count"] * order["price"]
    return Task(
        f"Show {limit} row{'s' * (limit > 1)} of the orders table and compute the price of order "
        f"{order['id']}.",
        [
            Step("query_table", {"table": "orders", "limit": limit}),
            Step("calculate", {"expression": expression}),
        ],
        lambda _: f"Order {order['id']} costs {total} dollars: {expression} = {total}.",
    )


def _read_file(r: random.Random, world: World) -> Task:
    path = r.choice(sorted(world.files))
    return Task(
        f"What is in {path}?",
        [Step("read_file", {"path": path})],
        lambda results: f"The file says: {results[-1]}",
    )


TASKS: tuple[Callable[[random.Random, World], Task], ...] = (
    _file_to_mail,
    _plan_event,
    _order_total,
    _read_file,
)


def agentic_session(r: random.Random, tasks: int) -> Conversation:
    """A session of `tasks` requests on one world, of other kinds as long as there are some."""
    world = make_world(r)
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    kinds = r.sample(TASKS, len(TASKS)) * -(-tasks // len(TASKS))
    for make in kinds[:tasks]:
        task = make(r, world)
        messages.append(user(task.question))
        results = []
        for step in task.steps:
            call = {"name": step.name, "arguments": step.arguments}
            results.append(world.call(step.name, step.arguments))
            messages.append(assistant("", "", [call]))
            messages.append({"role": "tool", "content": results[-1]})
        messages.append(assistant(task.answer(results)))
    return Conversation(messages, [TOOLS[name] for name in USED])
