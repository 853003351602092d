"""A scripted engine that takes constrained requests, and grammars compiled on the spot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from flare_ray.actors.core import EngineCore
from flare_ray.actors.inprocess import start_inprocess
from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.contracts.messages import Delta, Failed, Finished
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.frontend.api import build_api
from flare_ray.frontend.inprocess import InProcessClient
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.tokenizer import TextCodec
from tests.support.chat_checkpoint import CHAT, CONTROL_TOKENS, write_chat_checkpoint
from tests.support.fake_engine_client import byte_tokens
from tests.support.scripted.geometry import Script, write_checkpoint
from tests.support.scripted_engine import scripted_config

VOCAB_SIZE = 272
EOS = 256 + CONTROL_TOKENS.index("<|end|>")
END_OF_REASONING = 256 + len(CONTROL_TOKENS) + 1
LIMIT_S = 120.0
AMBIGUOUS_EBNF = """root ::= many many many many many many "!"
many ::= ((any* any*)* | any*)*
any ::= [a-z0-9 ] | [a-z]
"""
"""Read in ever more ways: a token takes a few ms behind 24 others, more than 50 behind 60."""


def grammar_checkpoint(folder: Path, *, seed: int = 3, spread: float = 1.5) -> str:
    """Random rows over bytes, control tokens and tags; the drafter is right about half the time."""
    write_chat_checkpoint(folder)
    script = Script(
        vocab_size=VOCAB_SIZE,
        eos_ids=(EOS,),
        seed=seed,
        spread=spread,
        draft_noise=0.3,
        max_context_tokens=4096,
    )
    write_checkpoint(folder, script)
    (folder / "model.safetensors").touch()
    return str(folder)


def grammar_engine(checkpoint: str, **fields: Any) -> EngineCore:
    """A started engine of four slots."""
    settings = {"concurrency": 4, "context_tokens": 1024, **fields}
    return start_inprocess(scripted_config(checkpoint, **settings))


class DirectCompiler:
    """`CompileProcess` without a process: for tests that compile hundreds of grammars."""

    def __init__(self, table, eos_ids, limits) -> None:
        from flare_ray.actors.grammar.xgrammar import Vocabulary

        self._vocabulary = Vocabulary(table, eos_ids)

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def compile(self, spec: GrammarSpec) -> str:
        from flare_ray.actors.grammar.structure import structural_tag
        from flare_ray.actors.grammar.xgrammar import compile_tag

        return compile_tag(structural_tag(spec), self._vocabulary)


def request(
    name: str,
    grammar: GrammarSpec | None,
    *,
    greedy: bool = True,
    seed: int = 1,
    max_tokens: int = 100,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> GenerationRequest:
    """A request whose prompt is its name's bytes."""
    spec = SamplingSpec(
        temperature=1.0,
        top_k=1 if greedy else 0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        **(sampling or {}),
    )
    return GenerationRequest(
        request_id=name,
        prompt_tokens=tuple(byte_tokens(name)),
        sampling=spec,
        max_tokens=max_tokens,
        grammar=grammar,
        **fields,
    )


class Outcome:
    """What one request got."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scores: list = []
        self.end: Finished | Failed | None = None


def run(core: EngineCore, requests: Sequence[GenerationRequest]) -> list[Outcome]:
    """Outcomes of requests submitted together, in order."""
    outcomes = {r.request_id: Outcome() for r in requests}
    left = len(requests)
    done = threading.Event()

    def on_item(item) -> None:
        nonlocal left
        outcome = outcomes[item.request_id]
        if isinstance(item, Delta):
            outcome.tokens += item.tokens
            outcome.scores += item.scores
        elif isinstance(item, Finished | Failed):
            outcome.end = item
            left -= 1
            if not left:
                done.set()

    for r in requests:
        core.submit(r, on_item)
    assert done.wait(LIMIT_S), {name: o.end for name, o in outcomes.items()}
    return list(outcomes.values())


def text_of(outcome: Outcome, codec: TextCodec) -> str:
    """Generated text; control tokens have none."""
    return b"".join(codec.token_bytes[token] for token in outcome.tokens).decode()


class GrammarApi:
    """The HTTP routes over an engine of this process; many requests at once."""

    def __init__(self, core: EngineCore, folder: str) -> None:
        self.core = core
        self.settings = ApiSettings(
            model_name="tiny",
            codec=TextCodec(Path(folder), CHAT),
            chat=CHAT,
            max_body_bytes=1 << 20,
        )

    def post(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
        """Responses in order."""

        async def call() -> list[httpx.Response]:
            client = InProcessClient(self.core, max_prompt_tokens=None, render_metrics=lambda: "")
            app = build_api(client, self.settings)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test", timeout=LIMIT_S
            ) as http:
                return await asyncio.gather(*(http.post(path, json=body) for body in bodies))

        return asyncio.run(call())

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", [{"model": "tiny", "prompt": "ab", **fields}])[0]

    def chat(self, **fields: Any) -> httpx.Response:
        """Reasoning is closed at once by a bias, unless the fields say otherwise."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "ab"}],
            "logit_bias": {str(END_OF_REASONING): 100},
            **fields,
        }
        return self.post("/v1/chat/completions", [body])[0]
