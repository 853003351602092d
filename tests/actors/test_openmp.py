"""How OpenMP threads wait: set before torch is there, never against the operator's own word."""

import os
import subprocess
import sys

import pytest

from flare_ray.actors.openmp import WAIT_POLICY, wait_passively

CHECK = "import sys, {module}; sys.exit('torch' in sys.modules)"


def test_waiting_is_passive_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    wait_passively()
    assert os.environ[WAIT_POLICY] == "PASSIVE"
    monkeypatch.setenv(WAIT_POLICY, "ACTIVE")
    wait_passively()
    assert os.environ[WAIT_POLICY] == "ACTIVE"


@pytest.mark.parametrize("module", ["flare_ray.actors.rank", "flare_ray.cli.llm"])
def test_torch_is_not_loaded_before_the_policy_is_set(module):
    done = subprocess.run([sys.executable, "-c", CHECK.format(module=module)], timeout=60)
    assert done.returncode == 0
