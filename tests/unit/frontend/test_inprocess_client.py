"""The client of an engine in the same process, whose items come from another thread."""

import asyncio
import queue
import threading

import pytest

from flare_ray.contracts.manifest import ByteBudget, PreparedManifest, SamplingDefaults
from flare_ray.contracts.messages import Admitted, Delta, Failed, Finished
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.errors import InvalidRequest, Overloaded
from flare_ray.frontend.inprocess import InProcessClient

SAMPLING = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
MANIFEST = PreparedManifest(
    recipe="scripted",
    checkpoint_name="c",
    world_size=1,
    device="cpu",
    dtype="float32",
    vocab_size=300,
    context_tokens=128,
    page_tokens=64,
    num_pages=9,
    slots=4,
    prefill_tokens=64,
    draft_tokens=5,
    speculation=True,
    copy_inputs=False,
    eos_ids=(0,),
    sampling_defaults=SamplingDefaults(),
    shapes=(),
    budget=ByteBudget(
        weights_bytes=1, page_bytes=1, state_bytes=1, graph_pool_bytes=0, scratch_bytes=0
    ),
)


class ThreadEngine:
    """Answers on a thread of its own: `count` deltas of one token, then the end."""

    engine_id = "e1"
    manifest = MANIFEST

    def __init__(self, count=5):
        self.ready = True
        self.fatal = ""
        self.count = count
        self.cancelled = []
        self.refusal = None
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request, on_item):
        if self.refusal is not None:
            raise self.refusal
        self._work.put((request.request_id, on_item))

    def cancel(self, request_id):
        self.cancelled.append(request_id)

    def stop(self):
        self._work.put(None)
        self._thread.join(5)

    def _run(self):
        while (work := self._work.get()) is not None:
            request_id, on_item = work
            if request_id.startswith("bad"):
                on_item(Failed(request_id, "context", "too long", status=400))
                continue
            on_item(Admitted(request_id))
            for token in range(self.count):
                on_item(Delta(request_id, (token,)))
            if not request_id.startswith("endless"):
                on_item(Finished(request_id, "stop", 1, self.count))


@pytest.fixture
def engine():
    engine = ThreadEngine()
    yield engine
    engine.stop()


def client_of(engine, limit=None):
    return InProcessClient(engine, max_prompt_tokens=limit, render_metrics=lambda: "m")


def request(name):
    return GenerationRequest(request_id=name, prompt_tokens=(1,), sampling=SAMPLING, max_tokens=8)


def test_many_streams_each_get_their_own_items_in_order(engine):
    async def one(client, name):
        stream = await client.open(request(name))
        tokens = [t async for e in stream if isinstance(e, Delta) for t in e.tokens]
        await stream.aclose()
        return tokens

    async def scenario():
        client = client_of(engine)
        return await asyncio.gather(*(one(client, f"r{i}") for i in range(40)))

    assert asyncio.run(scenario()) == [list(range(5))] * 40
    assert not engine.cancelled


def test_failure_before_admission_is_raised(engine):
    async def scenario():
        with pytest.raises(InvalidRequest, match="too long"):
            await client_of(engine).open(request("bad"))

    asyncio.run(scenario())
    assert not engine.cancelled


def test_refused_submission_cancels_nothing(engine):
    engine.refusal = Overloaded("stopping", retry_after_s=1.0, status=503)

    async def scenario():
        client = client_of(engine)
        with pytest.raises(Overloaded):
            await client.open(request("a"))
        engine.refusal = None
        await (await client.open(request("a"))).aclose()

    asyncio.run(scenario())
    assert engine.cancelled == ["a"]


def test_closing_a_running_stream_cancels_it_once(engine):
    async def scenario():
        stream = await client_of(engine).open(request("endless"))
        async for _ in stream:
            break
        await stream.aclose()
        await stream.aclose()

    asyncio.run(scenario())
    assert engine.cancelled == ["endless"]


def test_info_follows_the_manifest_and_readiness(engine):
    async def scenario():
        info = await client_of(engine, 50).info()
        assert (info.vocab_size, info.context_tokens, info.max_prompt_tokens) == (300, 128, 50)
        assert (await client_of(engine).info()).max_prompt_tokens == 127
        engine.ready, engine.fatal = False, "rank 0 died"
        with pytest.raises(Overloaded, match="rank 0 died"):
            await client_of(engine).info()

    asyncio.run(scenario())
