"""Our environments as LeRobot evaluates policies in them: a gymnasium vector env with LeRobot's keys and attributes.

    env = embodied.envs.views.lerobot.make("tabletop", num_envs=10, cameras=["front", "wrist"])
    lerobot.scripts.lerobot_eval.eval_policy(env, policy, ..., n_episodes=50)

    observation   {"agent_pos": state [N, S], "pixels": {"front": uint8 [N, h, w, 3], ...}}
    infos         "is_success" [N]; if episodes ended, "final_info" {"is_success": ...} and "final_obs"
    attributes    call("task_description"): the instructions in words; call("task"); call("_max_episode_steps")

LeRobot renames the observations to ``observation.state`` and ``observation.images.<camera>``, the keys of the data sets
that ``embodied.collect`` writes. LeRobot itself is not imported, so it may live in another version of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.core.types import Timestep
from embodied.envs.views.spaces import Form, Observation, action_space, take_row
from embodied.envs.views.stepper import RENDER_MODES, Stepper, check_render_mode, open_task, success_of

Info = dict[str, Any]

NEW_ROLLOUT = "lerobot_new_rollout"  # option of reset that says that the episodes to come are counted


def make(task: str, num_envs: int, *, render_mode: str | None = "rgb_array", **options: Any) -> LeRobotVectorEnv:
    """Return ``num_envs`` environments of ``task=<task>``; options: see ``embodied.envs.views.stepper.open_task``."""
    check_render_mode(render_mode)
    return LeRobotVectorEnv(open_task(task, num_envs, **options), render_mode)


class LeRobotVectorEnv(VectorEnv[Observation, NDArray[Any], NDArray[Any]]):
    """N environments, SAME_STEP autoreset."""

    metadata: dict[str, Any] = {"render_modes": [*RENDER_MODES], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, stepper: Stepper, render_mode: str | None = "rgb_array") -> None:
        self.stepper, self.render_mode = stepper, check_render_mode(render_mode)
        self.num_envs = stepper.num_envs
        self.metadata = {**type(self).metadata, "render_fps": round(1 / stepper.spec.control_dt_s)}
        self._form = Form(stepper.spec, flat=False, state="agent_pos", images="pixels")
        self.single_observation_space = self._form.space
        self.single_action_space = action_space(stepper.spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.envs = [_Row(self, row) for row in range(self.num_envs)]

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start new episodes in all envs. seed: of env 0, or of every env. UserError for options of other libraries."""
        unknown = [name for name in options or {} if name != NEW_ROLLOUT]
        if unknown:
            raise UserError(f"reset takes no options but {NEW_ROLLOUT}, got: {', '.join(unknown)}")
        obs = self.stepper.reset(seed)
        return self._form(obs), self._infos(np.zeros(self.num_envs, bool), np.ones(self.num_envs, bool))

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Observation, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]:
        """Make one control step with actions [N, A]."""
        step = self.stepper.step(actions)
        success_N = success_of(step.info, self.num_envs).cpu().numpy()
        ended_N = (step.terminated_N | step.truncated_N).cpu().numpy()
        infos = self._infos(success_N & ~ended_N, np.ones(self.num_envs, bool))
        if ended_N.any():
            infos |= {"final_info": self._infos(success_N & ended_N, ended_N), "_final_info": ended_N.copy()}
            infos |= {"final_obs": self._final_obs(step), "_final_obs": ended_N.copy()}
        reward_N = step.reward_N.double().cpu().numpy()
        terminated_N, truncated_N = step.terminated_N.cpu().numpy(), step.truncated_N.cpu().numpy()
        return self._form(step.obs), reward_N, terminated_N, truncated_N, infos

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an attribute of every env, or what it returns if it is a method. AttributeError if there is none."""
        if name == "render":
            return self.render() or (None,) * self.num_envs
        values = self.get_attr(name)
        return tuple(value(*args, **kwargs) if callable(value) else value for value in values)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every env. AttributeError if there is none."""
        return tuple(getattr(env, name) for env in self.envs)

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Render every env, N images [480, 640, 3], if ``render_mode="rgb_array"``."""
        return None if self.render_mode is None else tuple(self.stepper.frames())

    def close_extras(self, **kwargs: Any) -> None:
        """Release the environments."""
        self.stepper.close()

    def _infos(self, success_N: NDArray[np.bool_], valid_N: NDArray[np.bool_]) -> Info:
        """Return infos with their mask."""
        return {"is_success": success_N, "_is_success": valid_N.copy()}

    def _final_obs(self, step: Timestep) -> NDArray[np.object_]:
        """Return the last observations of the episodes that ended, an array of objects [N], None in other rows."""
        rows = np.full(self.num_envs, None, dtype=object)
        final = self._form(step.final_obs)
        for i, env in enumerate(step.final_ids.tolist()):
            rows[env] = take_row(final, i)
        return rows


class _Row:
    """The attributes of one env that LeRobot reads."""

    def __init__(self, view: LeRobotVectorEnv, row: int) -> None:
        self._view, self._row = view, row
        self.metadata, self.render_mode = view.metadata, view.render_mode

    @property
    def task(self) -> str:
        """Name of the task."""
        return self._view.stepper.spec.task

    @property
    def task_description(self) -> str:
        """Instruction of the present episode, in words."""
        return self._view.stepper.instructions()[self._row]

    @property
    def _max_episode_steps(self) -> int:
        """Time limit, control steps."""
        return self._view.stepper.spec.max_episode_steps

    def render(self) -> NDArray[np.uint8] | None:
        """Render the env, [480, 640, 3]."""
        frames = self._view.render()
        return None if frames is None else frames[self._row]
