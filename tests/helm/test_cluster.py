"""The rendered CPU demo on three nodes of processes: it serves, loses a node, scales out and in.

All nodes are of one machine, so only the head's proxy is started: several on one port would share
its connections, and a client of the lost one would see a broken connection that a Service of
Kubernetes would have kept from it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from flare_ray.cli.config_check import check_document
from tests.helm.rendering import changed, helm, read_values, serve_document
from tests.rules.sources import ROOT
from tests.support.service import machine_load, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

NODE_CPUS = 2
STORE_BYTES = 100 << 20
START_LIMIT_S = 180.0
RECOVERY_LIMIT_S = 180.0
SCALE_LIMIT_S = 180.0
DRAIN_SECONDS = 300
CLIENTS = 3
TOKENS = 24
PROMPT = [{"role": "user", "content": "Define principal."}]


@dataclass
class Load:
    """Clients that ask one after the other until stopped; every answer is counted.

    Attributes:
        answers: HTTP status, or the name of what was raised -> count.
    """

    url: str
    answers: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=120.0) as client:
            while not self._stop.is_set():
                self.answers[ask(client, self.url)] += 1


def ask(client: httpx.Client, url: str) -> str:
    """The status of one answer, "200" only if it is whole."""
    body = {"model": "glm-demo", "messages": PROMPT, "max_tokens": TOKENS}
    try:
        response = client.post(f"{url}/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return type(error).__name__
    if response.status_code != 200:
        return f"{response.status_code} {response.text[:200]}"
    usage = response.json()["usage"]
    return "200" if usage["completion_tokens"] > 0 else f"empty: {response.text[:200]}"


class ThreeNodes:
    """A head that runs no replicas, and two workers, as the chart's groups are."""

    def __init__(self, port: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        # A folder of its own, and a short one, since sockets lie in it: another `ray.init` of this
        # machine would take this cluster for the one to connect to.
        self.folder = tempfile.mkdtemp(prefix="fr", dir="/tmp")
        self._before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self.folder
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.workers = [self.add(), self.add()]
        ray.init(self.cluster.address, namespace="serve", log_to_driver=False)

    def add(self):
        """Another worker."""
        return self.cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=STORE_BYTES)

    def apply(self, replicas: int) -> None:
        """What KubeRay does with a changed serveConfigV2: hand it to Serve."""
        from flare_ray.frontend.app import LocalServe

        values = changed(
            read_values("cpu-demo"),
            replicas=replicas,
            worker__cpus=NODE_CPUS,
            http__port=self.port,
            model__checkpoint=str(ROOT / "deployments" / "demo" / "glm"),
        )
        document = serve_document(values)
        document["proxy_location"] = "HeadOnly"
        document["http_options"]["host"] = "127.0.0.1"
        checked = check_document(document, name="rendered")
        LocalServe(checked.document, checked.configs.values()).start()

    def engines(self) -> dict[str, str]:
        """Engines that hold their place: placement group -> node."""
        from ray.util.placement_group import placement_group_table

        return {
            name: next(iter(group["bundles_to_node_id"].values()))
            for name, group in placement_group_table().items()
            if "#Engine#" in group["name"] and group["state"] == "CREATED"
        }

    def drain(self, node_id: str) -> None:
        """The command that the guide names, as `kubectl exec` on the head runs it."""
        command = [
            *("ray", "drain-node", "--address", self.cluster.address, "--node-id", node_id),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"),
            *("--deadline-remaining-seconds", str(DRAIN_SECONDS)),
        ]
        command[0] = str(Path(sys.executable).with_name("ray"))
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def running_engines(self) -> int:
        """Replicas that Serve counts as running."""
        from ray import serve

        application = serve.status().applications.get("flare")
        if application is None or "Engine" not in application.deployments:
            return 0
        return application.deployments["Engine"].replica_states.get("RUNNING", 0)

    def answers(self) -> bool:
        """Whether a request gets a whole answer now."""
        with httpx.Client(timeout=60.0) as client:
            return ask(client, self.url) == "200"

    def close(self) -> None:
        """Stop everything."""
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        if self._before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = self._before
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def nodes(free_port) -> Iterator[ThreeNodes]:
    helm()
    three = ThreeNodes(free_port())
    try:
        three.apply(1)
        wait_for(three.answers, START_LIMIT_S, "the first answer")
        yield three
    finally:
        three.close()


def test_rendered_demo_survives_the_loss_of_a_worker_node(nodes):
    """The node of the engine dies; Serve places another engine on the other worker."""
    [lost] = nodes.engines().values()
    [worker] = [node for node in nodes.workers if node.node_id == lost]
    nodes.cluster.remove_node(worker, allow_graceful=False)
    nodes.workers.remove(worker)
    # processes of the lost node may answer until they notice that it is gone
    took_s = wait_for(
        lambda: nodes.engines() and lost not in nodes.engines().values() and nodes.answers(),
        RECOVERY_LIMIT_S,
        "an answer after the node's loss",
    )
    [node] = nodes.engines().values()
    assert node == nodes.workers[0].node_id
    print(f"answered {took_s:.1f} s after the node's loss ({machine_load()})")


def test_engines_scale_out_and_in_under_load_without_a_failed_request(nodes):
    while len(nodes.workers) < 2:
        nodes.workers.append(nodes.add())
    wait_for(nodes.answers, RECOVERY_LIMIT_S, "an answer before scaling")
    with Load(nodes.url) as load:
        wait_for(lambda: load.answers["200"] >= CLIENTS, SCALE_LIMIT_S, "load on one engine")
        kept = set(nodes.engines())
        nodes.apply(2)
        wait_for(lambda: nodes.running_engines() == 2, SCALE_LIMIT_S, "two engines")
        assert kept < set(nodes.engines()), "scaling out restarted an engine"
        assert len(set(nodes.engines().values())) == 2
        seen = load.answers["200"]
        wait_for(lambda: load.answers["200"] >= seen + 20, SCALE_LIMIT_S, "load on two engines")
        nodes.apply(1)
        wait_for(lambda: len(nodes.engines()) == 1, SCALE_LIMIT_S, "one engine again")
        seen = load.answers["200"]
        wait_for(lambda: load.answers["200"] >= seen + 10, SCALE_LIMIT_S, "load on one engine")
        time.sleep(1.0)
    assert set(load.answers) == {"200"}, load.answers
    print(f"{load.answers['200']} answers, none failed ({machine_load()})")


def test_engine_moves_off_a_drained_node_under_load_without_a_failed_request(nodes):
    """Serve starts the replacement elsewhere first, then lets the old engine end its requests."""
    while len(nodes.workers) < 2:
        nodes.workers.append(nodes.add())
    wait_for(lambda: len(nodes.engines()) == 1, SCALE_LIMIT_S, "one engine")
    [before] = nodes.engines().values()
    with Load(nodes.url) as load:
        wait_for(lambda: load.answers["200"] >= CLIENTS, SCALE_LIMIT_S, "load before draining")
        nodes.drain(before)
        took_s = wait_for(
            lambda: len(nodes.engines()) == 1 and before not in nodes.engines().values(),
            SCALE_LIMIT_S,
            "the engine on the other node",
        )
        seen = load.answers["200"]
        wait_for(lambda: load.answers["200"] >= seen + 10, SCALE_LIMIT_S, "load after draining")
    assert set(load.answers) == {"200"}, load.answers
    print(f"moved in {took_s:.1f} s, {load.answers['200']} answers, none failed ({machine_load()})")
