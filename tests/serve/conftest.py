"""What the tests of the page share: its routes over a scripted engine, and one browser a file."""

import pytest

from tests.support.browser import browser
from tests.support.http_server import chat_codec, http_server, wait_running
from tests.support.page_script import page_script
from tests.support.page_window import metrics_of, opened


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
