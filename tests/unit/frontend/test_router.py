"""What a Serve call's end means, and which engines count as ready."""

import asyncio
import time

import msgspec
import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from flare_ray.actors.directory import EngineRecord, EngineReport
from flare_ray.config import DeploymentConfig
from flare_ray.contracts.messages import Failed, Finished
from flare_ray.contracts.request import GenerationRequest, SamplingSpec
from flare_ray.contracts.routing import Route
from flare_ray.frontend import router
from flare_ray.frontend.router import EngineFinder, HandleCall
from flare_ray.metrics.recorder import Recorder
from tests.unit.frontend.test_inprocess_client import MANIFEST

SAMPLING = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
REQUEST = GenerationRequest(request_id="r", prompt_tokens=(1,), sampling=SAMPLING, max_tokens=2)
CONFIG = DeploymentConfig.model_validate({"model_name": "m", "engine": {"checkpoint": "c"}})


class Handle:
    """A Serve handle whose call ends with `end`: bytes, or an exception."""

    def __init__(self, end):
        self.end = end
        self.sent = []
        self.cancelled = False

    @property
    def submit(self):
        return self

    def remote(self, data, route=None):
        self.sent.append((data, route))
        return self

    def cancel(self):
        self.cancelled = True

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


def result_of(end):
    async def call():
        return await HandleCall(Handle(end), REQUEST).result()

    return asyncio.run(call())


@pytest.mark.parametrize(
    "item", [Finished("r", "stop", 1, 2), Failed("r", "overloaded", "full", status=429)]
)
def test_value_of_the_call_is_the_result(item):
    assert result_of(msgspec.msgpack.encode(item)) == item


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        ActorUnavailableError("away", None),
        TaskCancelledError(),
        RequestCancelledError("r"),
    ],
)
def test_lost_engine_is_a_rank_failure_that_may_be_retried(error):
    result = result_of(error)
    assert (result.code, result.status, result.emitted) == ("rank_failure", 503, False)


def test_serves_own_back_pressure_is_an_overload():
    result = result_of(BackPressureError(5, 4, 503, 7.0))
    assert (result.code, result.status, result.retry_after_s) == ("overloaded", 503, 7.0)


def test_exception_inside_the_engine_is_ours_and_says_no_details():
    error = RayTaskError("submit", "Traceback: secret", ValueError("secret"))
    result = result_of(error)
    assert (result.code, result.status) == ("internal_error", 500)
    assert "secret" not in result.message


def test_call_carries_the_request_and_can_be_cancelled():
    handle = Handle(b"")
    route = Route(keys=(b"k",), home=b"k")
    call = HandleCall(handle, REQUEST, route)
    [(payload, sent)] = handle.sent
    assert msgspec.msgpack.decode(payload, type=GenerationRequest) == REQUEST
    assert sent is route
    call.cancel()
    assert handle.cancelled


class Directory:
    """Reports and records as a test sets them."""

    def __init__(self):
        self.listed = {}
        self.ended = set()

    def put(self, engine_id, time_s, *, ready=True):
        self.listed[engine_id] = EngineReport(
            engine_id=engine_id,
            time_s=time_s,
            ready=ready,
            running=0,
            waiting=0,
            free_pages=1,
            total_pages=1,
            metrics=Recorder("engine", engine_id).snapshot(),
        )

    def reports(self):
        return list(self.listed.values())

    def engine(self, engine_id):
        if engine_id not in self.listed:
            return None
        return EngineRecord(
            engine_id=engine_id,
            secret=b"s" + engine_id.encode(),
            actor_id="a" + engine_id,
            manifest=MANIFEST,
            max_prompt_tokens=100,
            started_s=1.0,
        )

    def alive(self, record):
        return record.actor_id not in self.ended


@pytest.fixture
def directory(monkeypatch):
    directory = Directory()
    monkeypatch.setattr(router, "EngineDirectory", lambda application: directory)
    return directory


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(router.time, "monotonic", lambda: now[0])
    return now


def ready(finder):
    info = finder._ready()
    return info and info.engine_id


def test_engine_that_reports_is_ready_and_one_that_says_no_is_not(directory, clock):
    finder = EngineFinder("a", CONFIG)
    assert ready(finder) is None
    directory.put("e1", 5.0)
    assert ready(finder) == "e1"
    directory.put("e1", 6.0, ready=False)
    assert ready(finder) is None


def test_report_that_stops_changing_is_no_engine_whatever_its_clock_says(directory, clock):
    finder = EngineFinder("a", CONFIG)
    directory.put("killed", 9e9)
    assert ready(finder) == "killed"
    clock[0] += router.SILENT_S + 0.1
    assert ready(finder) is None
    directory.put("next", 5.0)
    assert ready(finder) == "next"
    directory.put("killed", 9e9 + 1)
    assert ready(finder) == "killed"


def test_fresh_report_of_an_engine_that_ended_is_no_engine(directory, clock):
    finder = EngineFinder("a", CONFIG)
    directory.put("killed", 6.0)
    directory.put("other", 5.0)
    directory.ended.add("akilled")
    assert ready(finder) == "other"
    directory.ended.add("aother")
    assert ready(finder) is None


def test_secret_of_an_unknown_engine_is_none(directory):
    finder = EngineFinder("a", CONFIG)
    directory.put("e1", time.time())
    assert asyncio.run(finder.secret("e1")) == b"se1"
    assert asyncio.run(finder.secret("e2")) is None


def test_metrics_hold_every_engine(directory):
    for name in ("e1", "e2"):
        directory.put(name, time.time())
    assert isinstance(asyncio.run(EngineFinder("a", CONFIG).metrics()), str)
