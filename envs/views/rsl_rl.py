"""Our environments as a ``VecEnv`` of rsl_rl (rsl-rl-lib 5), with observations in a TensorDict.

Observation groups, for ``obs_groups`` of the runner's configuration (docs/use_with.md has an example):

    policy        state vector, float32 [N, S]
    privileged    what only a critic may see, float32 [N, P], if the task has it
    <camera>      images, float32 [N, 3, h, w] from 0 to 1, for a CNNModel
    instruction   with cameras: the instruction as a one-hot vector, float32 [N, I]
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.spec import Box
from embodied.core.types import Obs
from embodied.envs.views.spaces import episode_means
from embodied.envs.views.stepper import Stepper, missing_package, open_task

try:
    from rsl_rl.env import VecEnv
    from tensordict import TensorDict
except ModuleNotFoundError as error:
    raise missing_package("rsl-rl-lib") from error


def make(task: str, num_envs: int, **options: Any) -> "RslRlVecEnv":
    """Return ``num_envs`` environments of ``task=<task>``; options: see ``embodied.envs.views.stepper.open_task``."""
    return RslRlVecEnv(open_task(task, num_envs, **options), {"task": task, "num_envs": num_envs, **options})


class RslRlVecEnv(VecEnv):
    """N environments. An env that is done has begun its next episode.

    cfg: description that rsl_rl's loggers keep. UserError for discrete actions, which rsl_rl does not know.
    """

    def __init__(self, stepper: Stepper, cfg: dict[str, Any] | None = None) -> None:
        if not isinstance(stepper.spec.action, Box):
            raise UserError(f"task '{stepper.spec.task}' has discrete actions; rsl_rl needs a Box")
        self.stepper = stepper
        self.num_envs, self.num_actions, self.device = stepper.num_envs, stepper.spec.action_dim, stepper.device
        self.max_episode_length = stepper.spec.max_episode_steps
        self.cfg = {"task": stepper.spec.task} if cfg is None else cfg
        self._obs = self._groups(stepper.reset())

    @property
    def episode_length_buf(self) -> Tensor:
        """Control steps since the beginning of each env's present episode, int64 [N].

        To set it starts new episodes that end as much earlier: rsl_rl's ``init_at_random_ep_len`` does so.
        """
        return self.stepper.elapsed_N.to(self.device)

    @episode_length_buf.setter
    def episode_length_buf(self, elapsed_N: Tensor) -> None:
        self._obs = self._groups(self.stepper.reset(elapsed_N=elapsed_N))

    def get_observations(self) -> TensorDict:
        return self._obs

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Make one control step with actions [N, A]; return observations, rewards [N], dones int64 [N] and extras.

        extras: ``time_outs`` bool [N], the dones that are truncations, and ``log``, ``episode_means`` of what ended.
        """
        step = self.stepper.step(actions)
        self._obs = self._groups(step.obs)
        extras: dict[str, Any] = {"time_outs": step.truncated_N}
        if len(step.final_ids):
            extras["log"] = {f"/episode/{name}": mean for name, mean in episode_means(step.episodes).items()}
        return self._obs, step.reward_N, (step.terminated_N | step.truncated_N).long(), extras

    def render(self) -> NDArray[np.uint8]:
        return self.stepper.frames()

    def close(self) -> None:
        self.stepper.close()

    def _groups(self, obs: Obs) -> TensorDict:
        spec = self.stepper.spec
        groups = {"policy": obs["state"]}
        if spec.privileged:
            groups["privileged"] = obs["privileged"]
        for camera in spec.cameras:
            groups[camera.name] = obs[f"images.{camera.name}"].permute(0, 3, 1, 2).float() / 255
        if "instruction" in obs:
            groups["instruction"] = torch.nn.functional.one_hot(obs["instruction"], len(spec.instructions)).float()
        return TensorDict(groups, batch_size=[self.num_envs], device=self.device)
