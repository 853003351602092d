"""How many nodes and engines a rendered chart asks for."""

import pytest
import yaml

from tests.helm.rendering import changed, rayservice
from tests.helm.rendering import read_values as named


@pytest.mark.parametrize(
    ("replicas", "gpus", "nodes"), [(1, 4, 1), (2, 4, 1), (3, 4, 2), (3, 2, 3), (4, 8, 1)]
)
def test_worker_nodes_follow_from_replicas_and_engines_per_node(replicas, gpus, nodes):
    values = changed(named("glm-2gpu"), replicas=replicas, worker__gpus=gpus, worker__cpus=64)
    [group] = rayservice(values)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (nodes,) * 3


def test_scaling_changes_nothing_that_restarts_engines_or_rebuilds_the_cluster():
    """KubeRay compares the cluster without replica counts; Serve compares arguments."""

    def parts(replicas):
        spec = rayservice(changed(named("glm-2gpu"), replicas=replicas))["spec"]
        for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
            for key in ("replicas", "minReplicas", "maxReplicas"):
                group.pop(key)
        [application] = yaml.safe_load(spec.pop("serveConfigV2"))["applications"]
        return spec, application.pop("deployments"), application

    one, three = parts(1), parts(3)
    assert one[0] == three[0]
    assert one[2] == three[2]
    assert one[1] != three[1]


@pytest.mark.parametrize(
    ("autoscaler", "nodes"), [({}, (3, 3, 3)), ({"autoscaler__enabled": True}, (1, 1, 3))]
)
def test_autoscaled_engines_have_their_bounds_in_the_settings_and_nodes_for_the_most(
    autoscaler, nodes
):
    scaling = {"max_replicas": 5, "downscale_delay_s": 900.0}
    values = changed(
        named("glm-2gpu"), replicas=2, engineDeployment__autoscaling=scaling, **autoscaler
    )
    spec = rayservice(changed(values, worker__gpus=4, worker__cpus=64))["spec"]
    [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert tuple(group[key] for key in ("replicas", "minReplicas", "maxReplicas")) == nodes
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["deployments"] == [{"name": "Engine", "user_config": {}}]
    placement = application["args"]["engine_deployment"]
    assert (placement["replicas"], placement["autoscaling"]) == (2, scaling)
