"""Text to tokens, on threads: the tokeniser and the template never run on the event loop.

Uses the `tokenizers` library on the checkpoint's `tokenizer.json`; the bytes of tokens come from
the same table that stop matching uses (`controller.grammar.token_bytes`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from flare_ray.controller.grammar.token_bytes import load_token_bytes
from flare_ray.errors import CheckpointError, ConfigError, InvalidRequest
from flare_ray.frontend.templates.render import (
    ChatTemplate,
    load_chat_template,
    template_line,
)
from flare_ray.recipes.declaration import ChatFormat

Result = TypeVar("Result")

TOKENIZER_THREADS = 2
"""Threads of one HTTP replica; `tokenizers` releases the interpreter lock while it encodes."""


class TextCodec:
    """A checkpoint's tokeniser, chat template and token bytes.

    Attributes:
        token_bytes: text bytes by token id; b"" for special tokens, except those that are tags of
            the chat format, which parsers must see.
        template: None if the checkpoint has none.

    Args:
        folder: checkpoint.
        chat: the family's tags.
        chat_template: template instead of the checkpoint's (`ingress.chat_template`).
    Raises:
        CheckpointError: the folder has no readable tokenizer.json, or a broken template.
        ConfigError: the template given is broken.
    """

    def __init__(self, folder: Path, chat: ChatFormat, *, chat_template: str | None = None) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; the checkpoint needs its tokenizer.json")
        self._file = file
        self._tokenizer = _load(file)
        known = load_token_bytes(file)
        table = list(known.table)
        for tag in chat.tags:
            token = self._tokenizer.token_to_id(tag)
            if token is not None and token in known.special_ids:
                table[token] = tag.encode()
        self.token_bytes: tuple[bytes, ...] = tuple(table)
        added = self._tokenizer.get_added_tokens_decoder()
        control = [added[token].content for token in sorted(added) if added[token].special]
        # Runs of spaces that some vocabularies add are text, not markup.
        tags = [
            added[token].content
            for token in sorted(added)
            if not added[token].special and added[token].content.strip()
        ]
        self.template: ChatTemplate | None = load_chat_template(
            folder, control, tags, recipe=chat.template, given=chat_template
        )
        if self.template is not None:
            self._try_template(self.template)

    def encode_prompt(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a plain prompt, with whatever the tokeniser itself puts around a text unless
        `special` is false."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which control tokens and tags are plain text."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out; broken UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def spellings(self, tokens: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id; "" for ids that only pad the vocabulary."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> tuple[str, list[int]]:
        """Rendered conversation and its ids; nothing is added to the template.

        Control tokens and tags that a client wrote inside a message are encoded as plain text.

        Raises:
            InvalidRequest: as `ChatTemplate.pieces`.
        """
        assert self.template is not None
        pieces = self.template.pieces(messages, tools=tools, options=options)
        ids: list[int] = []
        for text, plain in pieces:
            tokenizer = self._plain if plain else self._tokenizer
            ids += tokenizer.encode(text, add_special_tokens=False).ids
        return "".join(text for text, _ in pieces), ids

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell each word at a text's start and after a space."""
        spellings = [text for word in words for text in (word, f" {word}")]
        encoded = self._tokenizer.encode_batch(spellings, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(entry.ids) for entry in encoded))

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same vocabulary without its added tokens; loaded on first need."""
        document = json.loads(self._file.read_text(encoding="utf-8"))
        added = {entry["content"] for entry in document["added_tokens"]}
        document["added_tokens"] = []
        # What it puts around a text names added tokens; pieces of a conversation get none of it.
        document["post_processor"] = None
        # A vocabulary may list them too. No merges lead there, but `ignore_merges` would.
        vocabulary = document["model"]["vocab"]
        for content in added & vocabulary.keys():
            del vocabulary[content]
        tokenizer = Tokenizer.from_str(json.dumps(document))
        _unchanged(tokenizer)
        return tokenizer

    def _try_template(self, template: ChatTemplate) -> None:
        """Render once, so that a template that cannot work fails at start-up and not in a request;
        it also imports the renderer, which takes about a second."""
        try:
            self.encode_chat([{"role": "user", "content": "."}], tools=None, options={})
        except InvalidRequest as error:
            line = template_line(error.__cause__)
            kind = ConfigError if template.given else CheckpointError
            raise kind(
                f"{template.name} cannot render one user message"
                f"{'' if line is None else f', line {line}'}: {error}"
            ) from error


class TokenizerPool:
    """Runs codec calls on a few threads."""

    def __init__(self, threads: int = TOKENIZER_THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="flare-tokenize")

    async def run(self, work: Callable[[], Result]) -> Result:
        """`work()` on a thread; its exceptions come back as they are."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Let running work end and start no other."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _load(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every malformed file
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
    _unchanged(tokenizer)
    return tokenizer


def _unchanged(tokenizer: Tokenizer) -> None:
    """A file may carry the padding and truncation of its training run; neither applies here."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
