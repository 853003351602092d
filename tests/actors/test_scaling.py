"""What Serve is told about the number of engines and their router, without a cluster."""

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from flare_ray.actors.engine import engine_options
from flare_ray.actors.prefix_router import PrefixRouter
from flare_ray.actors.scaling import EngineScaling
from flare_ray.config import DeploymentConfig

POLICY = EngineScaling(waiting_tokens=100, page_usage=0.9, slots=2)


def options(*, placement=None, routing=None) -> dict:
    config = DeploymentConfig.model_validate(
        {
            "model_name": "m",
            "engine": {"checkpoint": "c", "device": "cpu", "context_tokens": 4096},
            "engine_deployment": placement or {},
            "ingress": {"routing": routing or {}},
        }
    )
    return engine_options(config)


def test_fixed_number_and_prefix_router_unless_told_otherwise():
    found = options(placement={"replicas": 3})
    assert found["num_replicas"] == 3 and "autoscaling_config" not in found
    router = RequestRouterConfig(**found["request_router_config"]).get_request_router_class()
    assert router.__name__ == PrefixRouter.__name__


def test_routing_by_load_is_serves_own():
    assert "request_router_config" not in options(routing={"by": "load"})


def test_autoscaled_engines_have_our_policy_with_the_context_as_bound():
    found = options(placement={"replicas": 2, "autoscaling": {"max_replicas": 5}})
    assert "num_replicas" not in found
    scaling = AutoscalingConfig(**found["autoscaling_config"])
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    policy = scaling.policy.get_policy()(**scaling.policy.policy_kwargs)
    assert policy(context(2, 2, waiting=(9000, 0)))[0] == 3


def context(current: int, target: int, *, waiting=(), pages=0.1):
    """What Serve hands to the policy."""
    told = {
        "waiting_tokens": dict(enumerate(waiting)),
        "page_usage": dict.fromkeys(range(len(waiting)), pages),
        "running_requests": dict.fromkeys(range(len(waiting)), 2.0),
    }
    return SimpleNamespace(
        current_num_replicas=current, target_num_replicas=target, aggregated_metrics=told
    )


@pytest.mark.parametrize(
    ("now", "wanted"),
    [
        (context(1, 1, waiting=(150,)), 2),
        (context(2, 2, waiting=(30, 30)), 2),
        (context(2, 2, waiting=(90, 0), pages=0.95), 3),
        (context(1, 2, waiting=(900,)), 2),  # one is starting, or was lost
        (context(2, 2, waiting=(900,)), 2),  # one has not reported yet
        (context(2, 2), 2),
    ],
)
def test_policy_waits_for_every_engine_and_then_decides(now, wanted):
    assert POLICY(now) == (wanted, {})
