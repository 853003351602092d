"""Prompts for the model's own text: the shared generators' first turns, open questions composed
here, and this project's own functions and pages. Nothing is taken from elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from flare_ray.workload.generators.base import Conversation, Message, user
from flare_ray.workload.generators.chat import chat, define
from flare_ray.workload.generators.corpus import Corpus
from flare_ray.workload.generators.edits import edit_code
from flare_ray.workload.generators.recall import recall
from flare_ray.workload.generators.records import json_records
from flare_ray.workload.generators.story import story
from flare_ray.workload.generators.sums import math
from flare_ray.workload.own_corpus import own_corpus

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the model's own template says where a conversation brings no system message."""

TOPICS = tuple(
    part.strip()
    for part in """
    bees; volcanoes; the water cycle; bicycles; chess; bread; the moon; electricity; rivers;
    trees in winter; the human heart; sleep; glass; maps; coffee; bridges; coral reefs; clouds;
    numbers; the printing press; paper; batteries; earthquakes; honey; ships; clocks; gardens;
    whales; magnets; the alphabet; markets; taxes; recycling; trains; wool; salt; mountains;
    deserts; music; drums; dancing; painting; friendship; patience; learning a language; public
    libraries; a first job; moving to a new town; saving money; running; swimming; healthy
    breakfasts; soup; houseplants; dogs; cats; owls; horses; spiders; penguins; dinosaurs;
    planets; comets; telescopes; microscopes; vaccines; bacteria; photosynthesis; gravity;
    sound; light; heat; friction; rust; steel; plastic; computers; programming; databases;
    networks; passwords; search engines; sorting algorithms; recursion; hash tables; machine
    learning; statistics; probability; fractions; triangles; prime numbers; ancient Rome; the
    Silk Road; castles; sailing ships; the Olympic Games; elections; courts; newspapers; radio;
    photography; cinema; poetry; novels; theatre; museums; cooking rice; tea; cheese;
    chocolate; apples; potatoes; farming; fishing; forests; wind power; solar panels; cars;
    aeroplanes; rockets; tides; weather forecasts; rainbows; snow; fire safety; first aid;
    teamwork; writing letters; giving a speech; time management; stress; meditation;
    volunteering
    """.replace("\n", " ").split(";")
)
OPEN = (
    "What is interesting about {a}?",
    "Explain {a} to a child.",
    "Explain how {a} and {b} are related.",
    "Write a short paragraph about {a}.",
    "Write a poem about {a}.",
    "Write a short story about {a} and {b}.",
    "Give me five tips about {a}.",
    "List three facts about {a}.",
    "What are the advantages and disadvantages of {a}?",
    "Compare {a} with {b}.",
    "Why is {a} important?",
    "How would you teach a class about {a}?",
    "Write an email to a colleague about {a}.",
    "Write a dialogue between two friends about {a}.",
    "What should a beginner know about {a}?",
    "Summarise the history of {a} in a few sentences.",
    "Describe {a} without naming it.",
    "Make a plan for a week of learning about {a}.",
    "Ask me three questions about {a}.",
    "Write a headline and a first sentence for an article about {a}.",
)
CODE = (
    "Write a Python function that {task}.",
    "Write a Python function that {task}, with a docstring and an example.",
    "How do I write code that {task} in Python?",
    "Show me a small {language} program that {task}.",
    "Explain step by step a program that {task}.",
)
TASKS = tuple(
    part.strip()
    for part in """
    adds two numbers; reverses a string; counts the words of a text; finds the largest number
    in a list; checks whether a number is prime; computes the Fibonacci numbers; sorts a list
    of names; reads a file line by line; writes a list to a CSV file; removes duplicates from a
    list; counts vowels; converts Celsius to Fahrenheit; merges two dictionaries; computes the
    factorial of a number; finds the median of a list; checks whether a word is a palindrome;
    rolls two dice; draws a triangle of stars; measures how long a function takes; groups words
    by their first letter; splits a sentence into words; finds common elements of two lists;
    computes the area of a circle; asks for a password until it is right; prints the
    multiplication table; downloads a web page; parses a date; flattens a nested list;
    implements a stack; implements binary search; computes a running average; rounds numbers to
    two digits; keeps a shopping list; plays a guessing game; counts down from ten
    """.replace("\n", " ").split(";")
)
LANGUAGES = ("Python", "JavaScript", "C", "Java", "Bash", "Rust")
PASSAGE = (
    "Summarise this text:\n\n{text}",
    "Rewrite this text in simpler words:\n\n{text}",
    "Repeat this text exactly:\n\n{text}",
    "What is this text about?\n\n{text}",
    "Give three keywords for this text:\n\n{text}",
)
LISTING = (
    "What does this function do?\n\n```python\n{text}\n```",
    "Repeat this code exactly:\n\n```python\n{text}\n```",
    "Add a docstring to this function:\n\n```python\n{text}\n```",
    "Rename the variables in this code:\n\n```python\n{text}\n```",
)
PASSAGE_CHARACTERS = (120, 480)
SHARED: dict[str, Callable[[random.Random, Corpus], Conversation]] = {
    "chat": chat,
    "define": define,
    "story": story,
    "math": math,
    "json": json_records,
    "edit": edit_code,
    "recall": recall,
}
SHARES = {
    "open": 40,
    "code": 14,
    "passage": 10,
    "listing": 8,
    "chat": 8,
    "define": 4,
    "story": 4,
    "math": 4,
    "json": 3,
    "edit": 3,
    "recall": 2,
}
CATEGORIES = tuple(SHARES)


def rendered(messages: list[Message]) -> str:
    """A conversation up to an opened assistant turn, as the model's template writes it."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join([*turns, "<|im_start|>assistant\n"])


def prompt(category: str, r: random.Random, corpus: Corpus) -> str:
    """One rendered prompt of a category of ``SHARES``."""
    if category in SHARED:
        messages = SHARED[category](r, corpus).messages
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        return rendered(messages[:first])
    return rendered([user(_asked(category, r, corpus))])


def _asked(category: str, r: random.Random, corpus: Corpus) -> str:
    if category == "open":
        a, b = r.sample(TOPICS, 2)
        return r.choice(OPEN).format(a=a, b=b)
    if category == "code":
        return r.choice(CODE).format(task=r.choice(TASKS), language=r.choice(LANGUAGES))
    if category == "listing":
        return r.choice(LISTING).replace("{text}", r.choice(corpus.functions))
    page, length = r.choice(corpus.docs), r.randint(*PASSAGE_CHARACTERS)
    start = r.randrange(max(1, len(page) - length))
    return r.choice(PASSAGE).replace("{text}", page[start : start + length].strip())


def prompts(seed: str) -> Iterator[tuple[str, str]]:
    """Endless categories and rendered prompts, by their shares."""
    r, corpus = random.Random(seed), own_corpus()
    weights = list(SHARES.values())
    while True:
        category = r.choices(CATEGORIES, weights)[0]
        yield category, prompt(category, r, corpus)
