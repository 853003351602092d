"""What tests of servers share: the page's routes over a scripted engine, one browser a file, and
one server over the demo checkpoint, for slow tests that ask it through other programs."""

from collections.abc import Callable, Iterator

import pytest

from tests.rules.sources import ROOT
from tests.serve.processes import running
from tests.support.browser import browser
from tests.support.http_server import chat_codec, http_server, wait_running
from tests.support.page_script import page_script
from tests.support.page_window import metrics_of, opened

DEMO_DEPLOYMENT = ROOT / "deployments" / "glm-demo.yaml"
DEMO_START_LIMIT_S = 300.0


@pytest.fixture(scope="module")
def page_codec(tmp_path_factory):
    return chat_codec(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def page_server(page_codec, free_port):
    with http_server(page_codec, free_port(), page_script) as (engine, url):
        yield engine, url


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(page_server, window):
    """The page over the scripted engine, which is as in the beginning, its models there."""
    engine, url = page_server
    engine.refusal, engine.ready = None, True
    engine.metrics = metrics_of({})
    opened(window, url)
    yield window
    wait_running(engine)


@pytest.fixture(scope="session")
def demo_url(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[str]:
    """`debug-serve` of the demo's deployment file; its URL without a path."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("demo") / "server.log"
    arguments = ("debug-serve", str(DEMO_DEPLOYMENT), "--port", str(port))
    with running(*arguments, log=log, url=url, start_limit_s=DEMO_START_LIMIT_S):
        yield url
