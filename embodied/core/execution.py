"""Execute a policy's chunks in an environment: the same limits and devices in training, evaluation and videos."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.device import CPU
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, PlanList
from embodied.core.policy import Policy
from embodied.core.spec import Box
from embodied.core.types import Obs, Timestep


def clip_chunk(env: VecEnv, chunk_NHA: Tensor, num_actions: int) -> Tensor:
    """Return the first ``num_actions`` of a chunk [N, H, A], all for an env with delays, clipped for a ``Box``."""
    action = chunk_NHA if env.max_delay else chunk_NHA[:, :num_actions]
    return action.clamp(-1, 1) if isinstance(env.spec.action, Box) else action


class EvalRollout:
    """Run a policy as it is deployed through a list of plans. ``obs`` and the last ``action`` are on its device."""

    action: Tensor

    def __init__(self, policy: Policy, env: VecEnv, plans: EpisodePlans, seeded: bool) -> None:
        """Start the first episodes. seeded: draw ``plan_noise`` for each decision instead of none."""
        self.policy, self.env, self.seeded = policy, env, seeded
        self._device = next((weight.device for weight in policy.parameters()), CPU)
        self._decision_n = np.zeros(env.num_envs, dtype=np.int64)
        self._ended, self._num_plans = 0, len(plans)
        self._sampler = PlanList(plans, env.num_envs)
        self.obs = obs_to(env.reset(self._sampler), self._device)

    @torch.no_grad()
    def step(self) -> Timestep:
        """Plan and execute the next decision of every env."""
        noise = None
        if self.seeded:
            shape = self.policy.plan_noise_shape
            noise = plan_noise(self._sampler.present, self._decision_n, shape).to(self._device)
        chunk = self.policy.plan(self.obs, noise)
        self.action = clip_chunk(self.env, chunk, self.policy.execute)
        step = timestep_to(self.env.step(self.action.to(self.env.device)), self._device)
        self.obs = step.obs
        self._decision_n += 1
        self._decision_n[step.final_ids.numpy()] = 0
        self._ended += len(step.episodes.counted())
        return step

    @property
    def share(self) -> float:
        """Fraction of the episodes that is done, in [0, 1]. Episodes in progress count by their time limits."""
        present = self._sampler.present
        part_n = np.minimum(1.0, self._decision_n * self.policy.execute / np.maximum(1, present.time_limit_n))
        return (self._ended + float(part_n[~present.filler_n].sum())) / self._num_plans


def plan_noise(plans: EpisodePlans, decision_n: NDArray[np.int64], shape: tuple[int, ...]) -> Tensor:
    """Draw the noise of deployed decisions, standard normals [n, *shape].

    The noise depends only on the episode's plan and on ``decision_n``, the number of the decision in its episode. So an
    episode can be repeated among other episodes. Generator: Philox (Salmon et al. 2011), one key per decision.
    """
    keys = np.stack([plans.seed_n, plans.number_n * 2**32 + decision_n], -1).astype(np.uint64)
    rows = [np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32) for key in keys]
    return torch.from_numpy(np.stack(rows))


def timestep_to(step: Timestep, device: torch.device) -> Timestep:
    """Return a result with its observations on ``device`` and its other tensors on the CPU."""
    if step.reward_NE.device.type == device.type == "cpu":
        return step
    names = ("reward_NE", "terminated_N", "truncated_N", "num_steps_N", "final_ids")
    rows = {name: getattr(step, name).cpu() for name in names}
    obs, final_obs, info = obs_to(step.obs, device), obs_to(step.final_obs, device), obs_to(step.info, CPU)
    return replace(step, obs=obs, final_obs=final_obs, info=info, **rows)


def obs_to(obs: Obs, device: torch.device) -> Obs:
    """Return observations on ``device``."""
    return {key: value.to(device) for key, value in obs.items()}
