"""Small word lists for the generators, written for this project: no third-party text."""

from __future__ import annotations

import random


def words(text: str) -> list[str]:
    """The words of a text, split at white space."""
    return text.split()


NAMES = words(
    """
    Ada Ben Cleo Dan Eva Finn Gus Hana Ivan Jade Kai Lena Max Nora Omar Pia Quinn Rosa Sam Tara
    Uma Victor Wen Yara Zoe Anna Bob Carl Dora Emil Faye Greg Hugo Iris Jack Kim Leo Mia Nick
    Olga Paul Rita Tom Vera Will Alice Bruno Chloe Maria John James Mary David Linda Sarah Peter
    Laura Emma Lucas Oliver Sofia Amir Aisha Diego Elena Felix Grace Henry Ingrid Jonas Karen
    Liam Marta Nadia Oscar Priya Ravi Sara Theo Ursula Vikram Wanda Xenia Yusuf Zara
    """
)
LAST = words(
    """
    Smith Jones Lopez Kim Chen Okafor Novak Rossi Müller Silva Khan Patel Berg Moreau Tanaka
    Ivanov Cohen Dubois Walker Young Garcia Brown Taylor Wilson Davis Clark Lewis Hall Allen
    King Wright Scott Green Baker Adams Nelson Hill Campbell Mitchell Roberts Carter Phillips
    Evans Turner Parker Collins Edwards Stewart Morris Murphy Cook Rogers Reed Bailey Bell
    Cooper Ward Gray Price Bennett Wood Barnes Ross Long Foster Fischer Weber Larsen Santos
    """
)
CAPITAL = {
    "France": "Paris",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Finland": "Helsinki",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
    "Colombia": "Bogota",
    "Vietnam": "Hanoi",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Canada": "Ottawa",
    "Australia": "Canberra",
    "Chile": "Santiago",
    "Hungary": "Budapest",
    "Belgium": "Brussels",
}
CITIES = sorted(
    set(CAPITAL.values())
    | set(
        words(
            """
            London Delhi Seoul Sydney Boston Denver Austin Toronto Prague Manila Kyoto Geneva
            Munich Porto Lyon Turin Chicago Seattle Dallas Houston Miami Montreal Osaka Mumbai
            Lagos Accra Riga Bergen Zurich Milan Naples
            """
        )
    )
)
ANIMALS = words(
    """
    cat dog fox owl bear frog mouse rabbit horse duck goat turtle squirrel hedgehog crow otter
    badger lamb pony wolf
    """
)
COLORS = words(
    """
    red blue green yellow black white brown orange purple pink grey golden silver
    """
)
THINGS = words(
    """
    ball kite lamp book drum boat hat key box bell coin map stone rope cup basket ladder mirror
    shell feather
    """
)
PLACES = words(
    """
    forest garden river market beach hill village barn lake school library meadow tower harbor
    cave bridge
    """
)
FEELINGS = words(
    """
    happy sad proud tired curious brave afraid surprised calm lonely cheerful hungry
    """
)
ITEMS = words(
    """
    apple pear book pen chair table lamp shirt shoe phone mug plate bottle bag clock towel
    pillow knife spoon candle
    """
)
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "open": "closed",
    "up": "down",
    "light": "dark",
    "old": "young",
    "full": "empty",
    "wet": "dry",
    "early": "late",
    "hard": "soft",
    "rich": "poor",
    "loud": "quiet",
    "high": "low",
    "near": "far",
    "strong": "weak",
    "thick": "thin",
    "sweet": "bitter",
}
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    """
    January February March April May June July August September October November December
    """
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in one short sentence.",
    "You are a careful assistant. Be exact.",
    "You are an assistant for a small company.",
    "Be concise.",
    "Help the user with simple tasks.",
    "You are a coding assistant.",
    "You answer questions and use tools when they help.",
    "You are a demo model that serves as a test of an inference server.",
    "Follow the user's instructions exactly.",
)
_ONSETS = words("b c d f g h j k l m n p r s t v w z br ch dr fl gr kr pl sh st th tr")
_VOWELS = words("a e i o u a e i o ai ea")
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "t", "k"]


def with_article(word: str) -> str:
    """``a`` or ``an`` by the first letter."""
    return ("an " if word[0] in "aeiou" else "a ") + word


def plural(word: str) -> str:
    """English plural, good enough for the words of ``ITEMS``."""
    if word == "knife":
        return "knives"
    return word + ("es" if word[-1] in "sxh" else "s")


def invented_name(r: random.Random) -> str:
    """A capitalised name of random syllables: answers must copy it, no list can be learnt."""
    syllables = r.choice((2, 2, 3))
    text = "".join(
        r.choice(_ONSETS) + r.choice(_VOWELS) + r.choice(_CODAS) for _ in range(syllables)
    )
    return text.capitalize()


def first_name(r: random.Random, invented: float = 0.15) -> str:
    """A given name; with probability ``invented`` one that exists in no list."""
    return invented_name(r) if r.random() < invented else r.choice(NAMES)


def last_name(r: random.Random, invented: float = 0.15) -> str:
    """A family name; with probability ``invented`` one that exists in no list."""
    return invented_name(r) if r.random() < invented else r.choice(LAST)


def city_name(r: random.Random, invented: float = 0.1) -> str:
    """A city; with probability ``invented`` one that exists in no list."""
    return invented_name(r) if r.random() < invented else r.choice(CITIES)


def date_text(r: random.Random, first_year: int = 2020, last_year: int = 2029) -> str:
    """An ISO date."""
    return f"{r.randint(first_year, last_year)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"


def time_text(r: random.Random) -> str:
    """A time on a quarter of an hour."""
    return f"{r.randint(7, 21):02d}:{r.choice(('00', '15', '30', '45'))}"


def mail_address(first: str, last: str) -> str:
    """An address under ``example.com``."""
    return f"{first}.{last}@example.com".lower().replace("ü", "u")
