"""What the acceptance tests share: the micro checkpoint, and its greedy text from one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flare_ray import LLM, SamplingParams
from tests.support.served_glm import engine_settings, served_glm

Greedy = Callable[..., str]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The services under test need the other core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the micro checkpoint."""
    return served_glm(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="session")
def greedy(checkpoint: Path) -> Iterator[Greedy]:
    """Greedy text of a prompt or a conversation, one request at a time, without speculation."""
    settings = engine_settings(
        checkpoint, context_tokens=2048, concurrency=1, speculation={"families": "ordinary"}
    )
    with LLM(**settings) as llm:
        known: dict[tuple[str, int], str] = {}

        def text(prompt: str, max_tokens: int, *, chat: bool = False) -> str:
            if (prompt, max_tokens) not in known:
                params = SamplingParams(temperature=0, max_tokens=max_tokens)
                ids = (
                    llm.encode_chat([{"role": "user", "content": prompt}])
                    if chat
                    else llm.encode(prompt)
                )
                [output] = llm.generate([ids], params)
                known[prompt, max_tokens] = output.text
            return known[prompt, max_tokens]

        yield text
