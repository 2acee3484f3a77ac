"""Our environments as LeRobot evaluates policies in them: a gymnasium vector env with LeRobot's keys and attributes.

    observation   {"agent_pos": state [N, S], "pixels": {"front": uint8 [N, h, w, 3], ...}}
    infos         "is_success" [N]; if episodes ended, "final_info" {"is_success": ...} and "final_obs"
    attributes    call("task_description"): the instructions in words; call("task"); call("_max_episode_steps")

LeRobot renames the observations to ``observation.state`` and ``observation.images.<camera>``, the keys of the data sets
that ``embodied.collect`` writes. LeRobot itself is not imported, so it may live in another version of torch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.core.types import Timestep
from embodied.envs.views.gymnasium_pool import Bools, Info, StepperVectorEnv
from embodied.envs.views.spaces import Form, Observation, success_of
from embodied.envs.views.stepper import Stepper, open_task

NEW_ROLLOUT = "lerobot_new_rollout"  # option of reset that says that the episodes to come are counted


def make(task: str, num_envs: int, *, render_mode: str | None = "rgb_array", **options: Any) -> "LeRobotVectorEnv":
    """Return ``num_envs`` environments of ``task=<task>``; options: see ``embodied.envs.views.stepper.open_task``."""
    return LeRobotVectorEnv(open_task(task, num_envs, **options), render_mode)


class LeRobotVectorEnv(StepperVectorEnv):
    """N environments, SAME_STEP autoreset."""

    def __init__(self, stepper: Stepper, render_mode: str | None = "rgb_array") -> None:
        super().__init__(stepper, Form(stepper.spec, flat=False, state="agent_pos", images="pixels"), render_mode)
        self.envs = [_Row(self, row) for row in range(self.num_envs)]

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start new episodes in all envs. seed: of env 0, or of every env. UserError for options of other libraries."""
        if unknown := [name for name in options or {} if name != NEW_ROLLOUT]:
            raise UserError(f"reset takes no options but {NEW_ROLLOUT}, got: {', '.join(unknown)}")
        obs = self.stepper.reset(seed)
        return self._form(obs), _infos(np.zeros(self.num_envs, bool), np.ones(self.num_envs, bool))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return tuple(getattr(env, name) for env in self.envs)

    def _step_infos(self, step: Timestep, ended_N: Bools, renewed: bool) -> Info:
        return _infos(success_of(step).cpu().numpy() & ~ended_N, np.ones(self.num_envs, bool))

    def _final_infos(self, step: Timestep, ended_N: Bools) -> Info:
        return _infos(success_of(step).cpu().numpy() & ended_N, ended_N)


def _infos(success_N: Bools, valid_N: Bools) -> Info:
    return {"is_success": success_N, "_is_success": valid_N.copy()}


class _Row:
    """The attributes of one env that LeRobot reads."""

    def __init__(self, view: LeRobotVectorEnv, row: int) -> None:
        self._view, self._row = view, row
        self.metadata, self.render_mode, self.task = view.metadata, view.render_mode, view.stepper.spec.task
        self._max_episode_steps = view.stepper.spec.max_episode_steps

    @property
    def task_description(self) -> str:
        return self._view.stepper.env.instruction_texts[self._row]

    def render(self) -> NDArray[np.uint8] | None:
        frames = self._view.render()
        return None if frames is None else frames[self._row]
