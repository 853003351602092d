"""`serve` without Ray: options, environment, signals; `debug-serve` settings."""

import os
import signal
import threading
import time

import pytest

from flare_ray.cli import serve as command
from flare_ray.cli.config_check import read_document
from flare_ray.cli.options import EngineOptions
from flare_ray.cli.serve import (
    RAY_ENVIRONMENT,
    THROUGHPUT_ENVIRONMENT,
    address_of,
    apply_options,
    debug_config,
    run_until_signal,
    set_environment,
)
from flare_ray.errors import CapacityError, ConfigError
from tests.rules.sources import ROOT

DEMO = ROOT / "deployments" / "glm-demo.yaml"
WAIT_S = 5.0


def test_options_are_written_into_the_document_and_told():
    document = read_document(DEMO)
    lines = apply_options(document, EngineOptions(concurrency=2, mtp_draft_tokens=3), name="f")
    engine = document["applications"][0]["args"]["engine"]
    assert engine["concurrency"] == 2
    assert engine["speculation"]["draft_tokens"] == 3
    assert "engine.concurrency: 4 -> 2" in lines


def test_no_options_change_nothing():
    document = read_document(DEMO)
    assert apply_options(document, EngineOptions(), name="f") == []
    assert document == read_document(DEMO)


def test_wrong_option_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="--concurrency"):
        apply_options(read_document(DEMO), EngineOptions(concurrency=0), name="f")


def test_options_need_one_engine():
    document = read_document(DEMO)
    document["applications"] *= 2
    with pytest.raises(ConfigError, match="2 engine sections"):
        apply_options(document, EngineOptions(concurrency=2), name="f")
    with pytest.raises(ConfigError, match="0 engine sections"):
        apply_options({}, EngineOptions(concurrency=2), name="f")


@pytest.fixture
def clean_environment(monkeypatch):
    for name in (*RAY_ENVIRONMENT, *THROUGHPUT_ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.mark.parametrize(("host", "proxy"), [("127.0.0.1", None), ("0.0.0.0", "1")])
def test_haproxy_is_for_files_that_listen_beyond_this_machine(clean_environment, host, proxy):
    set_environment({"http_options": {"host": host}})
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == proxy


def test_the_users_environment_wins(clean_environment, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    set_environment({})
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


def test_address_has_serves_defaults():
    assert address_of({}) == ("0.0.0.0", 8000)
    assert address_of({"http_options": {"host": "h", "port": 1}}) == ("h", 1)


class FakeServer:
    """Behaves as told; `log` is what happened."""

    def __init__(self, *, start=None, polls=(True,), stop=None):
        self.log = []
        self._start, self._stop = start, stop
        self._polls = iter(polls)

    def start(self):
        self.log.append("start")
        if self._start is not None:
            self._start()

    def poll(self):
        result = next(self._polls, True)
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self):
        self.log.append("stop")
        if self._stop is not None:
            self._stop()

    def abandon(self):
        self.log.append("abandon")


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch):
    monkeypatch.setattr(command, "POLL_S", 0.01)


def send_after(number, *delays_s):
    def send():
        for delay in delays_s:
            time.sleep(delay)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("polls", [(True,), (False,) * 1000])
def test_signal_stops_the_server_cleanly_ready_or_not(number, polls, capsys):
    before = signal.getsignal(number)
    server = FakeServer(polls=polls)
    send_after(number, 0.1)
    run_until_signal(server, address=("h", 1))
    assert server.log == ["start", "stop"]
    assert signal.getsignal(number) is before
    assert ("ready: http://h:1/v1" in capsys.readouterr().out) == (polls == (True,))


def test_signal_works_when_sigint_was_inherited_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = FakeServer()
        send_after(signal.SIGINT, 0.1)
        run_until_signal(server, address=("h", 1))
        assert server.log == ["start", "stop"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_signal_while_starting_stops_what_there_is():
    server = FakeServer(start=lambda: time.sleep(WAIT_S))
    send_after(signal.SIGTERM, 0.1)
    started = time.monotonic()
    run_until_signal(server, address=("h", 1))
    assert server.log == ["start", "stop"]
    assert time.monotonic() - started < WAIT_S


def test_second_signal_stops_at_once():
    server = FakeServer(stop=lambda: time.sleep(WAIT_S))
    send_after(signal.SIGTERM, 0.1, 0.2)
    started = time.monotonic()
    run_until_signal(server, address=("h", 1))
    assert server.log == ["start", "stop", "abandon"]
    assert time.monotonic() - started < WAIT_S


def test_handlers_that_the_start_replaces_are_put_back_in_place():
    server = FakeServer(start=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    send_after(signal.SIGTERM, 0.1)
    run_until_signal(server, address=("h", 1))
    assert server.log == ["start", "stop"]


@pytest.mark.parametrize("where", ["start", "poll"])
def test_failure_stops_the_server_and_is_told(where):
    error = CapacityError("no GPUs")

    def fail():
        raise error

    server = FakeServer(start=fail) if where == "start" else FakeServer(polls=(False, error))
    with pytest.raises(CapacityError, match="no GPUs"):
        run_until_signal(server, address=("h", 1))
    assert server.log == ["start", "stop"]


def test_debug_config_of_a_folder_is_named_after_it(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    config, lines = debug_config(folder, EngineOptions(device="cpu", concurrency=3))
    assert config.model_name == "some-model"
    assert (config.engine.checkpoint, config.engine.concurrency) == (str(folder), 3)
    assert config.engine.dtype == "float32"
    assert lines == []


def test_debug_config_of_a_file_is_the_files_with_options_applied():
    config, lines = debug_config(DEMO, EngineOptions(concurrency=3))
    assert config.model_name == "glm-demo"
    assert config.engine.concurrency == 3
    assert lines == ["engine.concurrency: 4 -> 3"]
