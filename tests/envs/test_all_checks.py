"""All checks of ``embodied.tasks check=``, rendering, closing and leaks among them, on an environment of each kind.

In a process of its own, so that threads and files of other tests do not count. ManiSkill, which takes a minute, has the
rules of the contract in test_maniskill.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

CASES = {
    "pool": ["check=reach", "resets=200"],
    "warp": ["check=reach", "sim=warp", "resets=50"],
    "gym in processes": ["check=gym/CartPole-v1", "sim.processes=1", "resets=200"],
    "gym, a vector environment": ["check=gym/tests.envs.toy_gym:VectorToy-v0", "resets=200"],
    "envpool": ["check=envpool/HalfCheetah-v5", "task.max_episode_steps=10", "resets=200"],
    "envpool, rows as they come": ["check=envpool/TSP-v1", "sim.batch_size=2", "resets=200"],
}
CHECK = "import sys; from embodied.tasks import main; sys.exit(main(sys.argv[1:]))"
QUICK_KERNELS = "import warp; warp.config.optimization_level = 0; "  # as in conftest.py
NEEDS = {"warp": "mujoco_warp", "envpool": "envpool"}


@pytest.mark.slow(reason="builds many environments of each family")
@pytest.mark.parametrize("kind", CASES)
def test_an_environment_passes_all_checks(kind: str) -> None:
    package = NEEDS.get(kind.partition(",")[0])
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -c constraints.txt -e '.[envpool,warp]'")
    code = QUICK_KERNELS + CHECK if kind == "warp" else CHECK
    done = subprocess.run([sys.executable, "-c", code, *CASES[kind]], capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["passed"], done.stderr
    assert done.returncode == 0
    assert {"rendering", "closing", "leaks"} <= result["checks"].keys()
