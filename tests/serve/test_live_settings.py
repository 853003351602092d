"""`user_config` under load: the engine takes it between two rounds, and nothing restarts."""

import copy
import threading
import time

import httpx
import pytest
import ray

from flare_ray.cli.config_check import check_document, read_document
from flare_ray.frontend.app import LocalServe
from flare_ray.metrics import names
from flare_ray.metrics.exposition import Exposition
from tests.serve.processes import deployment_file
from tests.support.served_checkpoint import alphabet_from, served_checkpoint, served_deployment
from tests.support.service import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

CPUS = 8
START_LIMIT_S = 180.0
CHANGE_LIMIT_S = 60.0
TOKENS = 1500


@pytest.fixture
def document(tmp_path, free_port):
    """A deployment document of an engine that offers two drafts in every round."""
    config = served_deployment(served_checkpoint(tmp_path), speculation={"policy": "fixed"})
    ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    yield read_document(deployment_file(tmp_path, config, free_port()))
    LocalServe({"applications": []}, ()).stop()


def apply(document, settings):
    """What `serve deploy` and KubeRay do with a changed file."""
    changed = copy.deepcopy(document)
    entry = {"name": "Engine", "user_config": settings}
    changed["applications"][0]["deployments"] = [entry]
    checked = check_document(changed, name="changed")
    LocalServe(checked.document, checked.configs.values()).start()


class Service:
    """Requests of the test."""

    def __init__(self, document) -> None:
        self.url = f"http://127.0.0.1:{document['http_options']['port']}"

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self) -> Exposition:
        return Exposition.parse(httpx.get(f"{self.url}/metrics", timeout=10.0).text)

    def widths(self) -> set[str]:
        """Widths of the lanes of the last two seconds' rounds."""
        before = self.metrics()
        time.sleep(2.0)
        return set(self.metrics().since(before).by_label(names.SPEC_LANE_ROUNDS, "verify_width"))

    def text(self) -> str:
        body = {"model": "letters", "prompt": "a", "max_tokens": TOKENS, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120.0)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]


def test_drafts_are_taken_back_and_given_again_without_a_restart(document):
    apply(document, {})
    service = Service(document)
    wait_for(service.ready, START_LIMIT_S, "an engine")
    started_s = service.metrics().value(names.ENGINE_START)
    texts, done = [], threading.Event()

    def load() -> None:
        while not done.is_set():
            texts.append(service.text())

    client = threading.Thread(target=load)
    client.start()
    try:
        wait_for(lambda: "1" not in service.widths(), CHANGE_LIMIT_S, "wide rounds")
        apply(document, {"max_draft_tokens": 0})
        wait_for(lambda: service.widths() == {"1"}, CHANGE_LIMIT_S, "rounds of width one")
        apply(document, {})
        wait_for(lambda: "1" not in service.widths(), CHANGE_LIMIT_S, "wide rounds again")
    finally:
        done.set()
        client.join()
    assert set(texts) == {alphabet_from("a", TOKENS)}
    assert service.metrics().value(names.ENGINE_START) == started_s
