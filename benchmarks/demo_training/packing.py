"""Packs documents into fixed rows of token ids."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import Tokenizer

from flare_ray.workload.generators.corpus import Corpus

from .chat_format import LAYOUT
from .family import ChatLayout
from .generators import RAW, documents, example

BLOCK_DOCUMENTS = 192
SMALLEST_FILL = 48


def packed_rows(
    r: random.Random,
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    length: int,
    shares: dict[str, int],
    chat: ChatLayout = LAYOUT,
) -> Iterator[list[int]]:
    """Endless rows of ``length`` ids; each starts with a document.

    A document that does not fit waits for the next row; the gap is filled with the beginning of a
    source file or a documentation page where ``shares`` has one, else with the beginning of the
    document. Nothing masks one document from the next.
    """
    stream = documents(r, corpus, shares, chat)
    fillers = [c for c in RAW if c in shares]
    row: list[int] = []
    while True:
        texts = [next(stream) for _ in range(BLOCK_DOCUMENTS)]
        waiting = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        waiting.reverse()
        while waiting:
            ids = waiting.pop()
            gap = length - len(row)
            if len(ids) <= gap or not row:
                row += ids
            elif gap > SMALLEST_FILL and fillers:
                filler = example(r.choice(fillers), r, corpus, chat)
                row += tokenizer.encode(filler, add_special_tokens=False).ids[:gap]
                row += ids[: length - len(row)]
                waiting.append(ids)
            else:
                row += ids[:gap]
            if len(row) >= length:
                yield row[:length]
                row = []
