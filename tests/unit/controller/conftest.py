"""A controller over a fake engine, stepped by the test."""

from collections.abc import Sequence

import pytest

from flare_ray.config import AdmissionConfig, EngineConfig, SpeculationConfig
from flare_ray.contracts.messages import Admitted, Delta, Failed, Finished
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.controller.loop import Controller
from flare_ray.metrics.recorder import Recorder
from tests.support.fake_channel import (
    CollectingOutput,
    FakeChannel,
    VirtualClock,
    hashed_accepts,
    hashed_script,
    make_manifest,
)
from tests.support.integrity import books_add_up as books_add_up

GREEDY = SamplingSpec(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=0)
TOKEN_BYTES = [bytes([token]) for token in range(256)]
FIRST_TEXT_TOKEN = 10
MAX_STEPS = 100_000


class Harness:
    """Controller, fake ranks, virtual time and collected output."""

    def __init__(
        self,
        *,
        queue_depth=1,
        accepts=None,
        script=None,
        manifest=None,
        speculation=None,
        admission=None,
        **engine,
    ):
        self.clock = VirtualClock()
        self.manifest = manifest or make_manifest()
        self.script = script or hashed_script(256, FIRST_TEXT_TOKEN)
        self.channel = FakeChannel(
            self.manifest,
            self.script,
            accepts or hashed_accepts(0.6),
            latency_s=lambda plan: 0.01,
            queue_depth=queue_depth,
            clock=self.clock,
        )
        self.output = CollectingOutput()
        self.recorder = Recorder("engine", "e1", clock=self.clock)
        self.config = EngineConfig(
            checkpoint="scripted",
            concurrency=self.manifest.slots,
            context_tokens=self.manifest.context_tokens,
            queue_depth=queue_depth,
            device="cpu",
            debug_checks=True,
            speculation=SpeculationConfig(**(speculation or {})),
            admission=AdmissionConfig(**(admission or {})),
            **engine,
        )
        self.controller = Controller(
            self.manifest,
            self.config,
            channel=self.channel,
            output=self.output,
            token_bytes=TOKEN_BYTES,
            recorder=self.recorder,
        )

    def submit(self, request_id: str, prompt: Sequence[int] = (1, 2, 3), max_tokens=8, **fields):
        fields.setdefault("reply_to", "ingress")
        self.controller.submit(
            GenerationRequest(
                request_id=request_id,
                prompt_tokens=tuple(prompt),
                sampling=fields.pop("sampling", GREEDY),
                max_tokens=max_tokens,
                **fields,
            )
        )

    def step(self, count=1, timeout_s=1.0):
        for _ in range(count):
            self.controller.step(timeout_s)

    def run_until_idle(self):
        """Step until nothing is live and the last items are sent."""
        for _ in range(MAX_STEPS):
            stats = self.controller.stats()
            if stats.fatal or not stats.pending_work:
                break
            self.step()
        else:
            raise AssertionError(f"not idle after {MAX_STEPS} steps: {self.controller.stats()}")
        self.step(3)
        assert not self.controller.stats().fatal, self.controller.stats().fatal

    def run_rounds(self, count):
        """Step until `count` more rounds were harvested."""
        target = self.controller.stats().rounds + count
        for _ in range(MAX_STEPS):
            if self.controller.stats().rounds >= target:
                return
            self.step()
        raise AssertionError("rounds do not advance")

    # What consumers got.

    def tokens(self, request_id):
        return [
            token
            for item in self.output.items(request_id)
            if isinstance(item, Delta)
            for token in item.tokens
        ]

    def end(self, request_id):
        """The one Finished or Failed, which must be the last item."""
        items = self.output.items(request_id)
        ends = [item for item in items if isinstance(item, Finished | Failed)]
        assert len(ends) == 1, f"{request_id}: {items}"
        assert items[-1] is ends[0], f"{request_id}: items after the end: {items}"
        return ends[0]

    def expected(self, prompt, count):
        return [self.script(tuple(prompt), index) for index in range(count)]

    def assert_all_free(self):
        stats = self.controller.stats()
        assert stats.free_pages == stats.total_pages
        assert (stats.running, stats.waiting) == (0, 0)
        self.controller.check_integrity()
        assert self.controller._admission.slots.free == self.manifest.slots


def first_item(harness, request_id):
    items = harness.output.items(request_id)
    assert items and isinstance(items[0], Admitted | Failed)
    return items[0]


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def queue_depth(request):
    """Every controller test runs at both queue depths (contract: C7)."""
    return request.param


@pytest.fixture
def make_harness(queue_depth):
    def make(**settings):
        return Harness(queue_depth=queue_depth, **settings)

    return make
