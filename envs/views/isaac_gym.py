"""Our environments with the API of Isaac Gym's tasks (``VecTask`` of IsaacGymEnvs): torch buffers.

An env whose ``reset_buf`` is 1 has begun its next episode: its row of ``obs_buf`` is the first observation of that one
and its ``progress_buf`` is 0. Isaac Gym itself resets at the next step. The last observations are in ``extras``.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.types import Obs
from embodied.envs.views.spaces import action_space, episode_means, success_of
from embodied.envs.views.stepper import Stepper, open_task


def make(task: str, num_envs: int, **options: Any) -> "IsaacGymTask":
    """Return ``num_envs`` environments of ``task=<task>``; options: see ``embodied.envs.views.stepper.open_task``."""
    return IsaacGymTask(open_task(task, num_envs, **options))


class IsaacGymTask:
    """N environments. Every step makes new buffers, so read them again. UserError for environments with cameras.

    obs_buf: float32 [N, S]. states_buf: observations of a critic, the privileged ones too, float32 [N, S + P]. rew_buf:
    float32 [N]. reset_buf: 1 where an episode ended, int64 [N]. timeout_buf: whether by truncation, bool [N].
    progress_buf: control steps of the present episode, int64 [N]. extras: ``time_outs`` is ``timeout_buf``;
    ``successes``, whether the task was solved after the last step, bool [N]; if episodes ended, ``final_ids`` [M],
    ``final_obs`` [M, S], ``final_states`` [M, S + P], and ``episode``, means of return, length and outcomes.
    """

    extras: dict[str, Any]

    def __init__(self, stepper: Stepper) -> None:
        spec = stepper.spec
        if spec.cameras:
            others = "embodied.envs.views.sb3, rsl_rl, envpool and lerobot"
            raise UserError(f"cameras: Isaac Gym's API has no images here; {others} have them")
        self.stepper = stepper
        self.num_envs, self.device, self.rl_device = stepper.num_envs, stepper.device, stepper.device
        self.num_obs = self.num_observations = spec.state_dim
        self.num_states = spec.state_dim + spec.privileged_dim
        self.num_acts = self.num_actions = spec.action_dim
        self.max_episode_length = spec.max_episode_steps
        self.observation_space: Any = gymnasium.spaces.Box(-np.inf, np.inf, (self.num_obs,))
        self.state_space: Any = gymnasium.spaces.Box(-np.inf, np.inf, (self.num_states,))
        self.action_space: Any = action_space(spec)
        self.reset()

    def reset(self) -> dict[str, Tensor]:
        """Start an episode in every env and return ``obs`` and ``states``."""
        self.rew_buf = torch.zeros(self.num_envs, device=self.device)
        self.reset_buf = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.timeout_buf = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.extras = {"time_outs": self.timeout_buf, "successes": torch.zeros_like(self.timeout_buf)}
        return self._observe(self.stepper.reset())

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        """Make one control step with actions [N, A]; return observations, rewards, ends and extras."""
        step = self.stepper.step(actions)
        self.rew_buf, self.timeout_buf = step.reward_N, step.truncated_N
        self.reset_buf = (step.terminated_N | step.truncated_N).long()
        self.extras = {"time_outs": self.timeout_buf, "successes": success_of(step)}
        if len(step.final_ids):
            final = {"final_ids": step.final_ids, "final_obs": step.final_obs["state"]}
            means = {"episode": episode_means(step.episodes)}
            self.extras |= {**final, "final_states": critic_state(step.final_obs), **means}
        return self._observe(step.obs), self.rew_buf, self.reset_buf, self.extras

    def reset_done(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the present observations and the ids of the envs that were reset in the last step."""
        return {"obs": self.obs_buf, "states": self.states_buf}, self.reset_buf.nonzero().squeeze(-1)

    def get_state(self) -> Tensor:
        return self.states_buf

    def get_number_of_agents(self) -> int:
        return 1

    def get_env_info(self) -> dict[str, Any]:
        spaces = {"observation_space": self.observation_space, "action_space": self.action_space}
        return {**spaces, "state_space": self.state_space, "agents": 1, "value_size": 1}

    def render(self, mode: str = "rgb_array") -> NDArray[np.uint8]:
        return self.stepper.frames()

    def close(self) -> None:
        self.stepper.close()

    def _observe(self, obs: Obs) -> dict[str, Tensor]:
        self.obs_buf, self.states_buf = obs["state"], critic_state(obs)
        self.progress_buf = self.stepper.elapsed_N.to(self.device)
        return {"obs": self.obs_buf, "states": self.states_buf}


def critic_state(obs: Obs) -> Tensor:
    """Return state and privileged observation in one vector, float32 [..., S + P]."""
    return torch.cat([obs["state"], obs["privileged"]], -1) if "privileged" in obs else obs["state"]
