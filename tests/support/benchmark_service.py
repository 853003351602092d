"""What tests of the service benchmarks share: a prompt file over the byte tokeniser, and the real
routes over a scripted engine."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from benchmarks.serving.workload import CATEGORIES
from flare_ray.frontend.api import build_api
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.tokenizer import TextCodec
from flare_ray.metrics.export import render
from flare_ray.metrics.exposition import Exposition
from flare_ray.metrics.recorder import Recorder
from tests.support.chat_checkpoint import CHAT
from tests.support.fake_engine_client import FakeEngineClient, Script

MODEL = "tiny"
START_LIMIT_S = 20.0
PER_CATEGORY = 3
CALL = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
]


def conversation(category: str, place: int) -> list[dict]:
    """Messages as prompt files write them; those of tools hold a call and its result."""
    first = {"role": "user", "content": f"{category} {place}"}
    if category != "tool":
        return [first]
    call = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [CALL]}
    return [first, call, {"role": "tool", "content": "{}"}]


def rendered(codec: TextCodec, messages: list[dict], tools: list[dict] | None) -> str:
    """The prompt's text as the template makes it."""
    with_function = [
        dict(m, tool_calls=[{"function": c} for c in m["tool_calls"]]) if m.get("tool_calls") else m
        for m in messages
    ]
    text, _ = codec.encode_chat(with_function, tools=tools, options={})
    return text


def write_prompts(path: Path, codec: TextCodec) -> Path:
    """`PER_CATEGORY` prompts of every category."""
    rows = []
    for category in CATEGORIES:
        for place in range(PER_CATEGORY):
            row: dict = {"category": category, "expected": None}
            if category in ("code", "docs"):
                row |= {"prompt": f"{category} number {place}", "messages": None}
            else:
                messages = conversation(category, place)
                tools = TOOLS if category == "tool" else None
                text = rendered(codec, messages, tools)
                row |= {"prompt": text, "messages": messages, "tools": tools}
            rows.append(json.dumps(row))
    path.write_text("\n".join(rows) + "\n")
    return path


Serve = Callable[[Script], tuple[FakeEngineClient, str]]


@contextmanager
def routes(codec: TextCodec, free_port: Callable[[], int]) -> Iterator[Serve]:
    """Function that starts the routes over a script and returns the fake engine and the URL."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def run(script: Script) -> tuple[FakeEngineClient, str]:
        engine = FakeEngineClient(script)
        settings = ApiSettings(model_name=MODEL, codec=codec, chat=CHAT, max_body_bytes=1 << 20)
        port = free_port()
        config = uvicorn.Config(
            build_api(engine, settings), host="127.0.0.1", port=port, log_level="warning"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        started.append((server, thread))
        deadline = time.monotonic() + START_LIMIT_S
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        return engine, f"http://127.0.0.1:{port}"

    try:
        yield run
    finally:
        for server, thread in started:
            server.should_exit = True
            thread.join(START_LIMIT_S)


def exposition(*engines: Recorder) -> Exposition:
    """A reading of the metrics of some engines, by way of their text."""
    snapshots = [engine.snapshot() for engine in engines]
    return Exposition.parse(render(snapshots, model_name=MODEL, compat=True).decode())
