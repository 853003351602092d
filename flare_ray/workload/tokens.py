"""Prompts as token ids, and the synthetic serving corpus, which is defined by token counts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from flare_ray.errors import ConfigError
from flare_ray.frontend.openai.messages import normalise_messages, normalise_tools
from flare_ray.frontend.tokenizer import TextCodec
from flare_ray.recipes import registry
from flare_ray.recipes.declaration import ChatFormat
from flare_ray.workload.items import SYNTHETIC, Item, Settings, Source

SYNTHETIC_LENGTHS = (11, 64, 256, 512, 1024, 2048, 3584)
"""Prompt tokens of the committed corpus; longer ones are made by `synthetic_ids` where needed."""
SYNTHETIC_SHARED = (3584, 11)
"""A prefix that several prompts share, and the tail of each, tokens."""
SYNTHETIC_BRANCHES = 4
SYNTHETIC_OUTPUT = 256
PAD = " x"
"""Repeated behind a numbered list until the length is exact; one token in the vocabularies seen."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of one item's prompt."""

    item_id: str
    ids: tuple[int, ...]


class Encoder:
    """A checkpoint's tokeniser and chat template, without its weights.

    Attributes:
        digest: SHA-256 over both; ids are valid for equal digests only.
        chat: the format's tags, which split an answer into its parts.

    Raises:
        ConfigError: no recipe knows the checkpoint.
        CheckpointError: it has no readable tokeniser.
    """

    def __init__(self, checkpoint: Path) -> None:
        file = checkpoint / "config.json"
        if not file.is_file():
            raise ConfigError(f"{checkpoint} has no config.json: name a checkpoint folder")
        recipe = registry.for_config(json.loads(file.read_text(encoding="utf-8")))
        self.chat: ChatFormat = recipe.chat
        self.codec = TextCodec(checkpoint, recipe.chat)
        parts = [checkpoint / "tokenizer.json", checkpoint / "tokenizer_config.json"]
        data = b"".join(part.read_bytes() for part in parts if part.is_file())
        self.digest = hashlib.sha256(data).hexdigest()

    @property
    def name(self) -> str:
        """Short name, of which the ids' file is called."""
        return self.digest[:12]

    def ids(self, item: Item) -> tuple[int, ...]:
        """Ids of an item's prompt as the server makes them of its request.

        Raises:
            ConfigError: the item is a conversation and the checkpoint has no template.
            InvalidRequest: the template refuses the messages.
        """
        if not item.messages:
            return tuple(self.codec.encode_prompt(item.prompt))
        if self.codec.template is None:
            raise ConfigError(f"{item.item_id} is a conversation, the checkpoint has no template")
        tools = normalise_tools(item.tools) or None
        messages = normalise_messages(item.messages)
        return tuple(self.codec.encode_chat(messages, tools=tools, options={})[1])


def synthetic_items(lengths: Iterable[int] = SYNTHETIC_LENGTHS) -> list[Item]:
    """The serving corpus: one item a length, then branches of a shared prefix. Their prompts exist
    as ids alone (`synthetic_tokens`); no claim about acceptance rests on them (contract: B6)."""
    prefix, tail = SYNTHETIC_SHARED
    keys = [f"list-{length}" for length in lengths]
    keys += [f"shared-{prefix}-{tail}-{branch}" for branch in range(SYNTHETIC_BRANCHES)]
    return [synthetic_item(key, seed=len(key), max_tokens=SYNTHETIC_OUTPUT) for key in keys]


def synthetic_item(key: str, *, seed: int, max_tokens: int) -> Item:
    """An item whose prompt comes as ids with its request."""
    return Item(
        item_id=key,
        category=SYNTHETIC,
        session=key,
        turn=0,
        source=Source(name="synthetic", key=key, licence="Apache-2.0"),
        settings=Settings(seed=seed, max_tokens=max_tokens),
    )


def synthetic_tokens(encode: Callable[[str], list[int]], item: Item) -> tuple[int, ...]:
    """Prompt ids of a synthetic item: exactly as many as its key says.

    Raises:
        ConfigError: the item is no synthetic one.
    """
    kind, *numbers = item.source.key.split("-")
    if kind == "list":
        return synthetic_ids(encode, int(numbers[0]), seed=int(numbers[0]))
    if kind == "shared":
        prefix, tail, branch = map(int, numbers)
        head = synthetic_ids(encode, prefix, seed=prefix)
        return head + synthetic_ids(encode, tail, seed=1_000_003 + branch)
    raise ConfigError(f"{item.item_id} is no item of the synthetic corpus")


def synthetic_ids(encode: Callable[[str], list[int]], length: int, *, seed: int) -> tuple[int, ...]:
    """`length` ids: a numbered list of words, cut at a line and padded with one repeated token."""
    r = random.Random(seed)
    pad = encode(PAD)[-1]
    ids: list[int] = []
    for number in range(1, length + 1):
        line = encode(f"{number}. item {r.randrange(1000)}\n")
        if len(ids) + len(line) > length:
            break
        ids += line
    return (*ids, *[pad] * (length - len(ids)))


def read_tokens(data: bytes) -> Mapping[str, tuple[int, ...]]:
    """Ids by item, from a tokens file."""
    decoder = msgspec.json.Decoder(Tokens)
    rows = [decoder.decode(line) for line in data.splitlines()]
    return {row.item_id: row.ids for row in rows}


def encode_tokens(encoder: Encoder, items: Iterable[Item]) -> bytes:
    """A tokens file."""
    rows = [Tokens(item_id=item.item_id, ids=_ids_of(encoder, item)) for item in items]
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _ids_of(encoder: Encoder, item: Item) -> tuple[int, ...]:
    if item.category == SYNTHETIC:
        return synthetic_tokens(encoder.codec.encode_prompt, item)
    return encoder.ids(item)
