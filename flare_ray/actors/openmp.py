"""How a rank's threads wait for one another, decided before torch loads its OpenMP runtime.

A round is hundreds of parallel regions of some microseconds. By default a thread that is done spins
for milliseconds, on the very core that the thread it waits for may need: with two threads on two
cores that also run the controller, the demo's round took 100 ms instead of 15.
"""

from __future__ import annotations

import os

WAIT_POLICY = "OMP_WAIT_POLICY"


def wait_passively() -> None:
    """Let waiting threads sleep, unless the environment already says how they wait.

    Without effect in a process that has imported torch.
    """
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
