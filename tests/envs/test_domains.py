"""The family gym: environments of two packages from other domains, motor control and driving."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from embodied.core.env import VecEnv
from embodied.envs.checks.conformance import check_env
from embodied.session.config import compose_run
from embodied.session.factories import make_env, make_spec

PACKAGES = {
    "Cont-CC-PMSM-v0": "gym_electric_motor",
    "highway-fast-v0": "highway_env",
    "parking-v0": "highway_env",
}


@pytest.mark.slow(reason="a step of a simulated street takes 20 ms")
@pytest.mark.parametrize("id", PACKAGES)
def test_an_environment_of_another_domain_conforms(id: str) -> None:
    if find_spec(PACKAGES[id]) is None:
        pytest.skip(f"{PACKAGES[id]} is not installed: pip install -c constraints.txt -e '.[domains]'")
    config = compose_run({"task": f"gym/{id}", "task.max_episode_steps": 4})
    assert make_spec(config).has_success == (id == "parking-v0")

    def make(num_envs: int) -> VecEnv:
        return make_env(config, num_envs, num_threads=1)

    check_env(make, num_envs=2)


def test_recipes_of_other_domains_are_complete() -> None:
    """What the table of docs/simulators.md leaves out stands in the task's file."""
    motor = compose_run({"task": "gym/Cont-CC-PMSM-v0", "policy": "gaussian"})
    assert (motor.algo.options.gamma, motor.num_envs, motor.total_steps) == (0.9, 32, 1_000_000)
    highway = compose_run({"task": "gym/highway-fast-v0", "policy": "categorical"})
    assert (highway.algo.options.gamma, highway.num_envs, highway.total_steps) == (0.8, 16, 30_000)
