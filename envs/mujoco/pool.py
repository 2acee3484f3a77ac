"""The vectorised environment: N copies of one task on MuJoCo's batch engine.

    advance: arm.apply ─► Batch.step ─► rewards, failures, success          chunks and ends: envs/base/episodic.py
    start: randomise the model ─► place arm and objects ─► compute the sensors

After a step the position stage runs once more, so that observations are current.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch, SimulationError
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.contract import check_state
from embodied.core.episodes import EpisodePlans, EpisodeSampler, Ints
from embodied.core.errors import UserError
from embodied.core.process.child import Builder
from embodied.core.spec import SUCCESS, CameraSpec, Term
from embodied.core.types import Obs
from embodied.envs.base.episodic import Advance, EpisodicEnv
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import SimConfig
from embodied.envs.mujoco.engine import Beginning, Weights, last_stage, needs_own_data, stop_timers, take_gravity
from embodied.envs.mujoco.randomization.non_model import NonModelRandomization, prepare
from embodied.envs.mujoco.randomization.randomizer import Fields, Randomizer
from embodied.envs.mujoco.view import View
from embodied.envs.mujoco.viewer import FRONT, Viewer, front, quick_viewer
from embodied.envs.rendering.cameras import Camera
from embodied.envs.rendering.vision import CameraRig, find_cameras
from embodied.envs.tasks.base import Task, task_spec
from embodied.envs.tasks.shapes import check_finite, check_shapes

_WARNINGS = slice(int(mujoco.mjtWarning.mjWARN_BADQPOS), int(mujoco.mjtWarning.mjWARN_BADQACC) + 1)
# Under full random actions joints of the Panda reach 10 rad/s and objects 50 rad/s. Far above that, contacts are
# missed, and observations spoil a policy's normaliser. The engine warns only at 1e10.
MAX_SPEED = 1_000.0  # of any degree of freedom, m/s or rad/s
MAX_DUMPS = 100  # of one pool: limits what an env that diverges repeatedly writes to the disk
log = logging.getLogger(__name__)


class MujocoPool(EpisodicEnv):
    """Environments of one task on MuJoCo's batch engine, stepped by ``num_threads`` threads (0: all cores).

    With ``cameras`` observations also have images (``images.<name>``) and ``instruction``, an index into
    ``spec.instructions``. ``state`` then has only what the robot measures; other terms are ``privileged``.
    """

    resumes_exactly = True
    expert: Callable[[], Tensor]

    def __init__(
        self,
        task: Task,
        *,
        num_envs: int,
        num_threads: int = 0,
        sim: SimConfig | None = None,
        cameras: Sequence[Camera | CameraSpec] = (),
    ) -> None:
        if num_threads < 0:
            raise UserError(f"num_threads: got {num_threads}, allowed: at least 0, which is all cores")
        sim = sim or SimConfig()
        placed = find_cameras(cameras, task.scale.reach)
        super().__init__(task_spec(task, placed), num_envs)
        self.task, self.expert = task, task.expert
        terms = {name: term for name, term in sim.randomization.items() if term is not None}
        spec = task.scene()
        prepare(spec, terms)
        self.model = task.compiled(spec)
        self.substeps = task.config.substeps(self.model.opt.timestep)
        stop_timers()
        gravity_3 = take_gravity(self.model)
        self.batch = Batch(self.model, num_envs, num_threads, needs_own_data(self.model))
        self.beginning = Beginning(self.batch)
        self.stage = last_stage(self.model)
        self.weights = Weights(self.batch, gravity_3)
        self._builder = Builder(can_fork=self.batch.nthread == 1)
        self.arm = task.robot.attach(self.batch)
        self.view = View(self.batch, self.arm)
        task.instruction_N = torch.zeros(num_envs, dtype=torch.int64)
        task.attach(self.view)
        self.guard = NanGuard(self.batch, Path(sim.dump_dir))
        self._rng = EpisodeRng(self.plans.seed_n, self.plans.number_n)  # of all present episodes
        fields = Fields(self.batch)
        self.non_model = NonModelRandomization(self.arm, task, terms, fields, self.batch, self._noise)
        self.randomizer = Randomizer(fields, terms, self.non_model.targets, task.config.control_dt_s)
        self.ended_stay = self.non_model.sensing is None and not task.state_dict()  # they may go on with the others
        if self.non_model.sizes is not None:
            self.view.sizes = self.non_model.sizes.by_name
        self.rig = None
        if placed:
            self.rig = CameraRig(self.batch, spec, task.robot.coarse, placed, sim.camera_randomization)
        self.observe_images = True  # if False, nothing is rendered, and observations have no images
        self.observe_segmentation = False  # if True, also ``segmentation.<camera>``, ids of ``rig.model``'s geoms

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        self._builder.check()
        rng = EpisodeRng(plans.seed_n, plans.number_n)
        self.randomizer.apply(ids, rng)
        self._rng = EpisodeRng(self.plans.seed_n, self.plans.number_n)
        self.beginning.restore(ids)
        held = plans.stage_n == 1
        self.arm.reset(ids, self.task.robot.start_qpos(rng, held))
        rows = torch.from_numpy(ids)
        self.task.instruction_N[rows] = torch.from_numpy(plans.instruction_n)
        with self.non_model.resizing(ids):
            self.task.reset(rows, rng)
        self.weights.apply(ids)
        self.batch.forward(ids, stage=self.stage)
        if held.any():
            self.task.put_in_hand(rows[torch.from_numpy(held)])
            self.batch.forward(ids[held], stage=self.stage)
        check_shapes(self.task, self.num_envs)
        self.view.changed()
        self.non_model.start(ids)
        if self.rig is not None:
            self.rig.start(ids, rng)

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        self._builder.check()
        if self.randomizer.intervals:
            changed = self.randomizer.step(self._rng, self.steps_made_N(), ids)
            if len(changed):
                self.weights.apply(changed)
                self.batch.forward(changed, stage=self.stage)
        self.guard.remember()
        self.arm.apply(action_NA.double().numpy(), ids, measured=self.non_model.measured())
        raised = None
        try:
            self.batch.step(ids, nstep=self.substeps, stage=self.stage)
        except SimulationError as error:
            raised = error.ids
        broken_N = self.guard.check(raised)
        self.view.changed()
        self.non_model.moved()
        return step_result(self.task, broken_N)

    def check_rewards(self, reward_N: Tensor) -> None:
        check_finite(self.task, reward_N)

    def observe(self, ids: Ints | None = None) -> Obs:
        measured, true = self.non_model.observe(ids), {**self.task.privileged(), **self.task.observe()}
        seen, rows = ({**self.arm.observe(), **true}, ids) if measured is None else (measured, None)
        obs = {
            "state": pack_terms(self.spec.state, seen, rows), "privileged": pack_terms(self.spec.privileged, true, ids),
        }  # fmt: skip
        for vector in obs.values():
            check_finite(self.task, vector)
        if self.rig is not None and self.observe_images:
            obs |= self.rig.render(ids, segmentation=self.observe_segmentation)
            obs["instruction"] = self.task.instruction_N[slice(None) if ids is None else ids].clone()
        return obs

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "physics": torch.from_numpy(self.batch.state.copy()),
            **self.episode_state(),
            **self.randomizer.fields.state_dict(),
            **self.non_model.state_dict(),
            **self.task.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        check_state(state, self.state_dict())
        self.load_episode_state(state, sampler)
        self.batch.state[:] = state["physics"].numpy()
        self._rng = EpisodeRng(self.plans.seed_n, self.plans.number_n)
        self.non_model.load_state_dict(state)
        self.task.instruction_N.copy_(torch.from_numpy(self.plans.instruction_n))
        with self.non_model.resizing(np.arange(self.num_envs)):
            self.task.load_state_dict(state)
        self.randomizer.load_state_dict(state)  # after sizes and shapes, which set inertia too
        self.batch.forward(stage=self.stage)
        self.batch.state[:] = state["physics"].numpy()
        self.weights.apply(np.arange(self.num_envs))  # the state may be of a version whose engine simulated gravity
        self.view.changed()
        if self.rig is not None:
            self.rig.start(np.arange(self.num_envs), self._rng)

    def _noise(self, stream: str, size: int, rows: slice | Tensor) -> Tensor:
        """Return standard normals of the present control step, [n, size]."""
        ids = np.arange(self.num_envs)[rows if isinstance(rows, slice) else rows.numpy()]
        return torch.from_numpy(self._rng.rows(ids).normal(stream, self.steps_made_N()[ids], size))

    def film(self, width: int, height: int) -> Callable[[], NDArray[np.uint8]]:
        """Return a function that renders every env from the front, uint8 [N, height, width, 3]."""
        return Viewer(self.task, self.batch, front(self.task, width, height)).render

    def film_quickly(self, width: int, height: int, camera: Camera = FRONT) -> Callable[[], NDArray[np.uint8]]:
        """Return a function like that of ``film``: a hundred times as fast, without shadows (``quick_viewer``)."""
        render = quick_viewer(self.task, self.batch, replace(camera, width=width, height=height))
        physics = self.batch.state.copy()
        self.batch.forward(stage=self.stage)  # fills what the viewer has bound
        self.batch.state[:] = physics
        return render


def step_result(task: Task, broken_N: Tensor | None) -> Advance:
    """Return the result of a control step: reward, outcomes and failures of the present state."""
    success_N = task.success()
    reward_N = torch.stack(list(task.rewards(success_N).values())).sum(0).float()
    return Advance(reward_N, {SUCCESS: success_N, **task.outcomes()}, task.failure(), broken_N)


def pack_terms(terms: Sequence[Term], parts: Mapping[str, Tensor], ids: Ints | None = None) -> Tensor:
    """Return the scaled quantities of ``terms``, float32 with one row per env. ids: envs to return (None: all)."""
    vector = torch.cat([parts[t.name] if t.scale == 1 else parts[t.name] * t.scale for t in terms], -1).float()
    return vector if ids is None else vector[ids]


class StateDumps:
    """Write the states of envs whose simulation diverged to files."""

    def __init__(self, dump_dir: Path) -> None:
        self.dump_dir, self.dumps = dump_dir, 0

    def dump(self, ids: np.ndarray, before_nS: np.ndarray, after_nS: np.ndarray) -> None:
        """Write ``ids`` [n] and their states before and after the step, [n, S], as an ``.npz`` file."""
        path, self.dumps = self.dump_dir / f"nan_{time.time_ns()}.npz", self.dumps + 1
        written = f"no dump after {MAX_DUMPS}"
        try:
            if self.dumps <= MAX_DUMPS:
                self.dump_dir.mkdir(parents=True, exist_ok=True)
                np.savez(path, ids=ids, state_before=before_nS, state=after_nS)
                written = f"state written to {path}"
        except OSError as error:
            written = f"no dump: {error}"
        log.warning("simulation diverged in env %s, they start anew; %s", ids[:5].tolist(), written)


class NanGuard(StateDumps):
    """Find envs whose simulation diverged: the engine raised or warned, or a velocity exceeds ``MAX_SPEED`` or is NaN.

    The model has the engine's own autoreset disabled. The state of a broken env before and after the step is written to
    a file: rows of ``Batch.state``. Then the env is set to the model's initial state, so that observations are finite.
    """

    def __init__(self, batch: Batch, dump_dir: Path) -> None:
        super().__init__(dump_dir)
        self.batch, self.before = batch, batch.state.copy()
        self.qvel = batch.bind("qvel")

    def remember(self) -> None:
        """Copy the state that the next step starts from."""
        np.copyto(self.before, self.batch.state)

    def check(self, raised: np.ndarray | None = None) -> Tensor | None:
        """Write and reset the envs that broke in the last step; return which did, bool [N], or None if none did.

        raised: ids of the envs in which the engine raised an error.
        """
        counts = self.batch.warning[:, _WARNINGS, 1]
        slow = -MAX_SPEED <= self.qvel.min() and self.qvel.max() <= MAX_SPEED  # a comparison with NaN is false
        if raised is None and slow and not counts.any():
            return None
        broken = counts.any(axis=1) | ~(np.abs(self.qvel) <= MAX_SPEED).all(axis=1)
        if raised is not None:
            broken[raised] = True
        ids = np.flatnonzero(broken)
        self.dump(ids, self.before[ids], self.batch.state[ids])
        self.batch.warning[ids] = 0
        self.batch.reset(ids)
        return torch.from_numpy(broken)
