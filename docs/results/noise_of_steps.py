"""How much of the noise of each denoise step of Flow-SDE is left in the action?

python docs/results/noise_of_steps.py <run directory of a policy that explores by flow_sde> <file to write>

In states that the scripted expert comes by, with one initial noise each, a single step is drawn again and again, and
the others follow the ODE.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from embodied.envs import make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.policies.flow.chains import FlowChains
from embodied.policies.flow.sampler import sample_one_step
from embodied.report.metrics import write_json
from embodied.session.config import read_run
from embodied.session.factories import load_checkpoint, load_policy, make_env

NUM_ENVS, DRAWS, SEED = 64, 24, 1000
DECISION = 2  # the hand is on its way to the object


@torch.no_grad()
def measure(run: Path) -> dict[str, object]:
    """Standard deviations over the draws, averages over states, planned actions and their dimensions."""
    config = read_run(run)
    policy = load_policy(config, load_checkpoint(run, "last"))
    assert isinstance(policy, FlowChains)
    assert policy.noise_network is None
    env = make_env(config, NUM_ENVS, 1)
    assert isinstance(env, MujocoPool)
    obs = env.reset(make_sampler(env, SEED))
    for _ in range(DECISION * policy.execute):
        obs = env.step(env.task.expert()).obs
    env.close()
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(NUM_ENVS, policy.horizon, policy.width, generator=generator)

    code, start, K = policy.encode(obs), normal(), policy.denoise_steps
    steps = []
    for k in range(K):
        index = torch.full((NUM_ENVS,), k)
        draws = [sample_one_step(partial(policy.transition, code), start, normal(), index, K) for _ in range(DRAWS)]
        steps.append({"step": k, "drawn": spread(policy, [one.after for one in draws]),
                      "left_in_action": spread(policy, [one.action for one in draws])})  # fmt: skip
    initial = spread(policy, [policy.integrate_ode(obs, normal())[:, -1] for _ in range(DRAWS)])
    return {"states": {"num_envs": NUM_ENVS, "seed": SEED}, "steps": steps, "initial_noise_left_in_action": initial}


def spread(policy: FlowChains, draws: list[torch.Tensor]) -> float:
    executed = torch.stack(draws)[:, :, : policy.execute, : policy.spec.action_dim]
    return round(float(executed.std(0).mean()), 4)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    write_json(Path(sys.argv[2]), measure(Path(sys.argv[1])))
