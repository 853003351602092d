"""Greedy text does not depend on how it is made: width, batch, ranks, speculation, queue depth, all
through `LLM` (contract: S2, T6, A1). What goes over Ray is compared in the tests of services.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flare_ray import LLM, SamplingParams
from flare_ray.cli.outputs import RequestOutput
from tests.rules.sources import ROOT
from tests.support.served_glm import engine_settings

pytestmark = pytest.mark.timeout(300)

PROMPTS = (
    "so ",
    "the red fox and the red fox and the red fox and the red fox and ",
    "a small door in the wall ",
    "12 owls on a long road. 12 owls on a long road. 12 owls on a long road. 12 owls",
)
"""Their texts end inside the first page, begin on a page boundary, and cross two."""
LENGTHS = (40, 28, 34, 60)
DEMO = ROOT / "deployments" / "demo" / "glm"
BATCHES = range(1, len(PROMPTS) + 1)
MIN_MARGIN = 1e-3
"""Smallest difference of the two best logits along the texts; float32 sums in another order differ
by some 1e-6."""


@dataclass(frozen=True)
class Way:
    """One way to make the text. width: 1..8 at a fixed policy, 0 = chosen by the adaptive one, -1 =
    without speculation."""

    width: int
    ranks: int
    depth: int

    def __str__(self) -> str:
        name = {0: "adaptive", -1: "off"}.get(self.width, f"width{self.width}")
        return f"{name}-tp{self.ranks}-depth{self.depth}"

    @property
    def speculation(self) -> dict[str, object]:
        if self.width < 0:
            return {"families": "ordinary"}
        if self.width == 0:
            return {"draft_tokens": 7, "policy": "adaptive"}
        return {"draft_tokens": 7, "policy": "fixed", "fixed_width": self.width}


EVERY = [
    Way(width, ranks, depth) for width in range(-1, 9) for ranks in (1, 2, 4) for depth in (1, 2)
]
FAST = {
    *(Way(-1, 1, 2), Way(-1, 2, 1), Way(0, 1, 1), Way(0, 2, 2), Way(1, 1, 2), Way(2, 2, 1)),
    *(Way(3, 1, 1), Way(4, 4, 2), Way(5, 1, 2), Way(6, 2, 2), Way(7, 1, 1), Way(8, 4, 1)),
}
"""Each width, rank count, family and depth, and most pairs of them; the whole product is slow."""
WAYS = [pytest.param(w, id=str(w), marks=() if w in FAST else pytest.mark.slow) for w in EVERY]


def params_of(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in LENGTHS[:count]]


def open_llm(checkpoint: Path, way: Way) -> LLM:
    settings = engine_settings(
        checkpoint,
        context_tokens=256,
        prefill_tokens=32,
        tensor_parallel_size=way.ranks,
        queue_depth=way.depth,
        speculation=way.speculation,
    )
    return LLM(**settings)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[list[RequestOutput]]:
    """One rank, no speculation, no queue, each prompt alone."""
    with open_llm(checkpoint, Way(-1, 1, 1)) as llm:
        yield [
            llm.generate(prompt, params)[0]
            for prompt, params in zip(PROMPTS, params_of(len(PROMPTS)), strict=True)
        ]


def test_plain_text_is_the_oracles(checkpoint, plain):
    """Every token is the lowest-id maximum of transformers' logits for all tokens before it."""
    pytest.importorskip(
        "transformers.models.glm5_next",
        reason="the oracle is transformers' glm5_next (5.24); this transformers has none",
    )
    from tests.support.glm_oracle import TransformersGlm

    oracle = TransformersGlm(checkpoint)
    for output in plain:
        tokens = torch.tensor([*output.prompt_token_ids, *output.token_ids])
        logits = oracle.run(tokens).logits[len(output.prompt_token_ids) - 1 : -1]
        best = logits.topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > MIN_MARGIN, "choose another seed"
        assert logits.argmax(-1).tolist() == list(output.token_ids)


def test_texts_are_worth_comparing(plain):
    texts = [output.text for output in plain]
    assert len(set(texts)) == len(PROMPTS)
    assert all(len(set(text)) > 12 for text in texts)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_the_plain_one_for_every_batch(checkpoint, plain, way):
    accepted = rejected = 0
    with open_llm(checkpoint, way) as llm:
        for batch in BATCHES:
            outputs = llm.generate(PROMPTS[:batch], params_of(batch))
            for output, expected in zip(outputs, plain, strict=False):
                assert output.token_ids == expected.token_ids, (batch, output.prompt)
                assert output.finish_reason == "length"
            speculation = [output.speculation for output in outputs]
            accepted += sum(s.drafts_accepted for s in speculation)
            rejected += sum(s.drafts_offered - s.drafts_accepted for s in speculation)
        stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_pages == stats.total_pages
    if way.width > 1:
        assert accepted > 0 and rejected > 0, "nothing was tried: the equality proves little"
    elif way.width in (-1, 1):
        assert accepted == rejected == 0


# The trained checkpoint, whose drafts are mostly right: long accepted prefixes, not short ones.

QUESTIONS = (
    "Define principal.",
    "Write a short story about Mia the fox.",
    "What is 12 + 7?",
    "Name three colours.",
)
DEMO_WAYS = [
    pytest.param(way, id=str(way), marks=() if way.ranks == 2 else pytest.mark.slow)
    for way in (Way(0, 1, 2), Way(0, 2, 1), Way(4, 1, 1), Way(8, 1, 1), Way(8, 4, 2))
]


def ask(way: Way) -> list[RequestOutput]:
    settings = engine_settings(
        DEMO,
        tensor_parallel_size=way.ranks,
        queue_depth=way.depth,
        speculation=way.speculation,
    )
    with LLM(**settings) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return llm.chat(chats, SamplingParams(temperature=0, max_tokens=64))


@pytest.fixture(scope="module")
def answers() -> list[tuple[int, ...]]:
    return [output.token_ids for output in ask(Way(-1, 1, 1))]


@pytest.mark.parametrize("way", DEMO_WAYS)
def test_trained_checkpoint_says_the_same_with_speculation(answers, way):
    outputs = ask(way)
    assert [output.token_ids for output in outputs] == answers
    accepted = sum(output.speculation.drafts_accepted for output in outputs)
    rounds = sum(output.speculation.rounds for output in outputs)
    # The adaptive widths follow this machine's clock: narrow ones may be the best on a busy host.
    least = rounds / 2 if way.width else 0
    assert accepted > least, f"{accepted} drafts accepted in {rounds} rounds"
