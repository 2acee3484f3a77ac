"""The vectorised environment: N copies of one task on MuJoCo's batch engine.

    action chunk [N, E, A] ─► for each control step: arm.apply ─► Batch.step ─► rewards, success, time limit
                             (an env that ends inside the chunk is not stepped further)
                           ─► final_obs of the ended rows ─► reset of those rows ─► obs, Timestep

The batch is persistent (one MjData for each env), so that the position and velocity stages that make observations
current are the first half of the next substep and cost nothing extra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch, SimulationError
from torch import Tensor

from embodied.core.types import CameraSpec, EnvSpec, Obs, Timestep
from envs.common.episodes import Episodes
from envs.common.instructions import InstructionDraw
from envs.mujoco.nan_guard import NanGuard
from envs.mujoco.randomization import RandomizationTerm, Randomizer
from envs.mujoco.robots.panda import PandaArm
from envs.mujoco.scene import panda_on_table
from envs.rendering.camera_randomization import CameraRandomization
from envs.rendering.cameras import Camera
from envs.rendering.vision import CameraRig
from envs.tasks.base import Task, View
from envs.tasks.common import ROBOT_STATE
from envs.tasks.ground_truth import GroundTruth

_CURRENT = int(mujoco.mjtStage.mjSTAGE_VEL)


@dataclass(frozen=True)
class SimConfig:
    """Options of the simulator. randomization: terms by name, see envs/mujoco/randomization.py.
    camera_randomization: of what cameras see. dump_dir: where the NaN guard writes the state of diverged envs."""

    name: str = "mujoco"
    randomization: dict[str, RandomizationTerm] = field(default_factory=dict)
    camera_randomization: CameraRandomization = field(default_factory=CameraRandomization)
    dump_dir: str = "nan_dumps"


class MujocoPool:
    """VecEnv of one task (see embodied.core.protocols.VecEnv). Not for use from several threads at once.

    num_threads: threads that step the simulations (0: all cores). stagger: the first episode of each env starts at a
    different elapsed time, so that resets spread over time. held_starts: share of episodes that start with the task's
    object in the hand (see TaskConfig). seed: env i uses seed + i // group_size, so that ``group_size`` neighbours have
    the same episodes. splits: of the task's instructions, those that episodes are drawn from (None: all).
    cameras: their pictures are observed (``images.<name>``, see CameraSpec), and ``instruction``, an index into
    ``spec.instructions``. ``state`` has then only what the robot knows of itself; the rest of it is ``privileged``.
    """

    def __init__(
        self,
        task: Task,
        *,
        num_envs: int,
        num_threads: int = 0,
        seed: int = 0,
        sim: SimConfig | None = None,
        stagger: bool = False,
        held_starts: float = 0.0,
        group_size: int = 1,
        splits: Sequence[str] | None = None,
        cameras: Sequence[Camera] = (),
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs: got {num_envs}, allowed: 1 or more")
        if group_size < 1 or num_envs % group_size:
            raise ValueError(f"group_size: got {group_size}, allowed: divisors of the number of envs, {num_envs}")
        sim = sim or SimConfig()
        self.group_size = group_size
        self.task, self.num_envs, self.held_starts = task, num_envs, held_starts
        self.draw_instructions = InstructionDraw(task.instructions, splits)
        self.episodes = Episodes(num_envs, group_size, seed, task.config.max_episode_steps, stagger)
        spec = panda_on_table()
        task.build_scene(spec)
        self.model = spec.compile()
        self.substeps = task.config.substeps(self.model.opt.timestep)
        self.batch = Batch(self.model, num_envs, num_threads, persistent=True)
        self.arm = PandaArm(self.batch, task.config.control)
        self.view = View(self.batch, self.arm)
        task.instruction_N = torch.zeros(num_envs, dtype=torch.int64)
        task.bind(self.view)
        self.guard = NanGuard(self.batch, Path(sim.dump_dir))
        self.randomizer = Randomizer(self.batch, sim.randomization)
        self.on_control_step: Callable[[MujocoPool], None] | None = None  # observer of every control step, for videos
        self.rig = CameraRig(self.batch, spec, cameras, sim.camera_randomization) if cameras else None
        self.observe_pictures = True  # while it is False no pictures are taken, and observations have none
        self.observe_segmentation = False  # also ``segmentation.<camera>``, ids of geoms of ``rig.model``
        self._randomized_N = np.zeros(num_envs, dtype=bool)
        self._start_episodes(np.arange(num_envs))
        obs = self._vectors()
        self.spec = EnvSpec(
            task=task.name,
            state_dim=obs["state"].shape[1],
            privileged_dim=obs["privileged"].shape[1],
            action_dim=len(self.arm.action_names),
            control_dt_s=task.config.control_dt_s,
            max_episode_steps=task.config.max_episode_steps,
            state_names=_names(self._parts()[0]),
            action_names=self.arm.action_names,
            instructions=task.instructions.texts,
            instruction_goals=task.instructions.goals,
            instruction_splits=task.instructions.splits,
            cameras=tuple(CameraSpec(camera.name, camera.height, camera.width) for camera in cameras),
            descriptions=task.descriptions if isinstance(task, GroundTruth) else (),
        )

    # -- VecEnv ----------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> Obs:
        """Start every env anew. With a seed, episode 0 of env seeds that begin there; without, its next episode."""
        if seed is not None:
            self.episodes.rewind(seed)
            self._randomized_N[:] = False
        self._start_episodes(np.arange(self.num_envs))
        return self._observe()

    def step(self, action: Tensor) -> Timestep:
        """Execute a chunk [N, E, A] (or one action [N, A]) in [-1, 1]; values beyond are clipped.

        Raises ValueError on a wrong shape or a value that is not finite; the envs are then untouched.
        """
        action_NEA = self._checked(action)
        num_actions = action_NEA.shape[1]
        reward_NE = torch.zeros(self.num_envs, num_actions)
        num_steps_N = torch.zeros(self.num_envs, dtype=torch.int64)
        success_N = torch.zeros(self.num_envs, dtype=torch.bool)
        alive_N = torch.ones(self.num_envs, dtype=torch.bool)
        for e in range(num_actions):
            ids = None if bool(alive_N.all()) else alive_N.nonzero().squeeze(-1).numpy()
            broken = self._advance(action_NEA[:, e], ids)
            success = self.task.success() & alive_N
            reward = torch.stack(list(self.task.rewards(success).values())).sum(0).float() * alive_N
            if len(broken):  # what is read of them is the model's initial state, not how their episode ended
                reward[broken] = 0.0
                success[broken] = False
            success_N = torch.where(alive_N, success, success_N)
            reward_NE[:, e] = reward
            num_steps_N += alive_N
            self.episodes.count(alive_N, reward, success)
            alive_N &= self.episodes.elapsed_N < self.episodes.max_steps
            alive_N[broken] = False
            if self.on_control_step is not None:
                self.on_control_step(self)
            if not bool(alive_N.any()):
                break
        return self._finish(reward_NE, num_steps_N, success_N, ~alive_N)

    def state_dict(self) -> dict[str, Tensor]:
        """Simulation state, episode counters and what the task keeps of every env, as tensors."""
        return {
            "physics": torch.from_numpy(self.batch.state.copy()),
            "randomized": torch.from_numpy(self._randomized_N.copy()),
            **self.episodes.state_dict(),
            **self.randomizer.state_dict(),
            **self.task.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state_dict`` of a pool of the same task and number of envs; ValueError otherwise."""
        for key, needed in self.state_dict().items():
            if key not in state or state[key].shape != needed.shape:
                got = f"shape {tuple(state[key].shape)}" if key in state else "nothing"
                raise ValueError(f"env state '{key}': got {got}, needed shape {tuple(needed.shape)}")
        self.randomizer.load_state_dict(state)
        self.episodes.load_state_dict(state)
        self._randomized_N[:] = state["randomized"].numpy()
        self.batch.state[:] = state["physics"].numpy()
        self.task.load_state_dict(state)
        self.batch.forward(stage=_CURRENT)
        self.batch.state[:] = state["physics"].numpy()
        self.view.changed()
        if self.rig is not None:
            everyone = np.arange(self.num_envs)
            self.rig.start(everyone, self.episodes.rng(everyone))

    def observe(self) -> Obs:
        """The present observation of every env."""
        return self._observe()

    @property
    def instruction_texts(self) -> list[str]:
        """The instruction of every env's present episode, in words."""
        return [self.spec.instructions[i] for i in self.task.instruction_N.tolist()]

    def close(self) -> None:
        """Nothing to release: the engine's threads end with the batch."""

    # -- inside ----------------------------------------------------------------------------------------------------

    def _checked(self, action: Tensor) -> Tensor:
        action = torch.as_tensor(action)
        shape = tuple(action.shape)
        if action.ndim == 2:
            action = action.unsqueeze(1)
        expected = (self.num_envs, self.spec.action_dim)
        if action.ndim != 3 or (action.shape[0], action.shape[2]) != expected or action.shape[1] < 1:
            raise ValueError(
                f"action: got shape {shape}, needed [{expected[0]}, E, {expected[1]}] with E >= 1, or "
                f"[{expected[0]}, {expected[1]}]"
            )
        if not bool(torch.isfinite(action).all()):
            rows = (~torch.isfinite(action).flatten(1).all(-1)).nonzero().squeeze(-1)
            raise ValueError(f"action: NaN or infinite in env {rows[:5].tolist()}; nothing was executed")
        return action.clamp(-1, 1).double()

    def _advance(self, action_NA: Tensor, ids: np.ndarray | None) -> Tensor:
        """One control step of envs ``ids``. Returns those whose simulation broke; their state is zeroed at reset."""
        self.guard.remember()
        self.arm.apply(action_NA.numpy(), ids)
        raised = None
        try:
            self.batch.step(ids, nstep=self.substeps, stage=_CURRENT)
        except SimulationError as error:
            raised = error.ids
        broken = self.guard.check(raised)
        self.view.changed()
        return broken

    def _finish(self, reward_NE: Tensor, num_steps_N: Tensor, success_N: Tensor, ended_N: Tensor) -> Timestep:
        ended = ended_N.nonzero().squeeze(-1)
        obs = self._observe()
        final_obs = {key: value[ended] for key, value in obs.items()}
        episodes = self.episodes.stats(ended, success_N, self.task.instruction_N)
        if len(ended):
            if self.group_size == 1:
                self._start_episodes(ended.numpy())
            else:
                self._restart_in_step(ended)
            for key, value in self._vectors().items():
                obs[key][ended] = value[ended]
            for key, value in self._pictures(ended.numpy()).items():
                obs[key][ended] = value
        return Timestep(
            obs=obs,
            reward_NE=reward_NE,
            terminated_N=torch.zeros(self.num_envs, dtype=torch.bool),
            truncated_N=ended_N,
            num_steps_N=num_steps_N,
            final_ids=ended,
            final_obs=final_obs,
            episodes=episodes,
            info={"success": success_N},
        )

    def _restart_in_step(self, ended: Tensor) -> None:
        """Start the next episodes of ``ended``; of a group that goes on, its present one."""
        early, elapsed = self.episodes.again_in_step(ended)
        self._start_episodes(ended.numpy())
        self.episodes.elapsed_N[early] = elapsed

    def _observe(self) -> Obs:
        return {**self._vectors(), **self._pictures()}

    def _vectors(self) -> Obs:
        state, privileged = (torch.cat(list(parts.values()), dim=-1).float() for parts in self._parts())
        return {"state": state, "privileged": privileged}

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What ``state`` and ``privileged`` consist of."""
        state, privileged = self.task.observe(), self.task.privileged()
        if self.rig is None:
            return state, privileged
        hidden = {name: state.pop(name) for name in list(state) if name not in ROBOT_STATE}
        return state, {**hidden, **privileged}

    def _pictures(self, ids: np.ndarray | None = None) -> Obs:
        """What the cameras see in envs ``ids`` (None: all), and what the robot is told there."""
        if self.rig is None or not self.observe_pictures:
            return {}
        told = self.task.instruction_N.clone() if ids is None else self.task.instruction_N[torch.from_numpy(ids)]
        return {**self.rig.render(ids, segmentation=self.observe_segmentation), "instruction": told}

    def _start_episodes(self, ids: np.ndarray) -> None:
        """Begin the next episode of envs ``ids``: randomise the model, place arm and objects, compute the sensors."""
        rng = self.episodes.begin(ids)
        self.randomizer.apply(ids, rng, first=~self._randomized_N[ids])
        self._randomized_N[ids] = True
        self.batch.reset(ids, stage=int(mujoco.mjtStage.mjSTAGE_NONE))
        held = rng.uniform("held", 0.0, 1.0) < self.held_starts
        self.arm.reset(ids, self.task.initial_arm_qpos(rng, held))
        rows = torch.from_numpy(ids)
        self.task.instruction_N[rows] = torch.from_numpy(self.draw_instructions(rng))
        self.task.reset(rows, rng)
        self.batch.forward(ids, stage=_CURRENT)
        if held.any():
            self.task.put_in_hand(rows[torch.from_numpy(held)])
            self.batch.forward(ids[held], stage=_CURRENT)
        self.view.changed()
        if self.rig is not None:
            self.rig.start(ids, rng)


def _names(parts: Mapping[str, Tensor]) -> tuple[str, ...]:
    """One name for each entry of the concatenated parts: 'tcp_pos[0]', 'tcp_pos[1]', ..."""
    return tuple(f"{name}[{i}]" for name, part in parts.items() for i in range(part.shape[1]))
