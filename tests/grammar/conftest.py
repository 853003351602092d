"""Engines with grammars; all of it needs the optional library."""

from pathlib import Path

import pytest

from flare_ray.contracts.grammar import GrammarSpec
from flare_ray.controller.grammar.utf8 import Utf8Masks
from flare_ray.frontend.tokenizer import TextCodec
from tests.support.chat_checkpoint import CHAT
from tests.support.grammar_engine import (
    EOS,
    VOCAB_SIZE,
    DirectCompiler,
    GrammarApi,
    grammar_checkpoint,
)

pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    return grammar_checkpoint(tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="session")
def codec(checkpoint) -> TextCodec:
    return TextCodec(Path(checkpoint), CHAT)


@pytest.fixture(scope="session", autouse=True)
def direct_compiles():
    """Grammars are compiled where they are asked for; `test_service` has a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flare_ray.actors.grammar.service.CompileProcess", DirectCompiler)
        yield


@pytest.fixture(scope="session")
def compile_spec(codec):
    """A compiled `GrammarSpec`."""
    from flare_ray.actors.grammar.xgrammar import Compiled

    table = list(codec.token_bytes[:VOCAB_SIZE])
    compiler, utf8 = DirectCompiler(table, (EOS,), None), Utf8Masks(table)

    def compiled(spec):
        return Compiled(compiler.compile(spec), compiler._vocabulary, utf8)

    return compiled


@pytest.fixture(scope="session")
def compile_(compile_spec):
    """Compiled grammar of a kind and a source."""
    return lambda kind, source: compile_spec(GrammarSpec(kind=kind, source=source))


@pytest.fixture(scope="session")
def engines(checkpoint, direct_compiles):
    """Started engines by their settings, each started once."""
    from tests.support.grammar_engine import grammar_engine

    started = {}

    def get(**fields):
        key = repr(sorted(fields.items()))
        if key not in started:
            started[key] = grammar_engine(checkpoint, **fields)
        return started[key]

    yield get
    for core in started.values():
        core.shutdown(0.0)


@pytest.fixture(scope="session")
def api(engines, checkpoint) -> GrammarApi:
    return GrammarApi(engines(), checkpoint)
