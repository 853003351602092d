"""Start-up prices on their way from ranks to the policy (contract: C2)."""

import msgspec
import pytest

from flare_ray.config import EngineConfig
from flare_ray.controller.parts import verification_policy
from flare_ray.controller.verification.log import Opened, read_log
from tests.support.fake_manifest import make_manifest


@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
def test_prices_of_the_manifest_reach_the_adaptive_policy_alone(tmp_path, policy):
    manifest = make_manifest()
    prices = tuple((shape, 1_000 + i) for i, shape in enumerate(manifest.shapes))
    manifest = msgspec.structs.replace(manifest, prices=prices)
    path = tmp_path / "decisions"
    settings = {"policy": policy, "decision_log": str(path)}
    config = EngineConfig(checkpoint="x", speculation=settings)
    verification_policy(manifest, config, 4).close()
    (opened,) = read_log(path)
    assert isinstance(opened, Opened)
    assert opened.measured == (prices if policy == "adaptive" else ())
