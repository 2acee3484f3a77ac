"""A simulated arm in a process of its own.

Started by ``python -m embodied.envs.mujoco.robots.robot_process <socket> <pipe> <options as JSON>``.

It answers calls of the methods of SimulatedArm by their results, or by UserError, and steps the physics in real time: a
command takes effect at the step nearest to its arrival, and the newest position targets count. It ends with the parent
or when the parent closes the socket. Client: embodied.deployment.robots.sim.
"""

import json
import select
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.arm import Chain
from embodied.core.errors import UserError
from embodied.core.process.child import end_with_parent
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import CameraSpec, joints_of
from embodied.envs import make_pool
from embodied.envs.episodes.sampler import first_episodes
from embodied.envs.mujoco.config import SIDES
from embodied.envs.mujoco.robot_file import Perturbation, robot_perturbation
from embodied.envs.mujoco.robots.gripper_arm import backlash
from embodied.envs.mujoco.robots.pair import PairState

FILM_SIZE = (320, 240)
FILM_DT_S = 0.1


class SimulatedArm:
    """One simulation of the task, driven by joint targets. Times are seconds of simulation.

    task: its name and options, as in training. cameras: those that are observed.
    """

    def __init__(
        self, task: Mapping[str, Any], cameras: Sequence[CameraSpec] = (), perturbation: Perturbation | None = None
    ) -> None:
        self.perturbation = perturbation or Perturbation()
        config = {key: value for key, value in task.items() if key not in ("name", "held_starts")}
        sim = {"randomization": self.perturbation.terms()}
        self.pool = make_pool(task["name"], config, num_envs=1, num_threads=1, sim=sim, cameras=cameras)
        self.pool.observe_images = False
        arms = self.pool.spec.arms
        if not arms:
            raise UserError(f"task {task['name']} does not describe the arm of its robot")
        self.chains = {side: Chain(arm) for side, arm in arms.items()}
        self.joints, self.grippers = [*joints_of(arms)], [f"{side}gripper.pos" for side in arms]
        self.arms = self.pool.arm.arms if isinstance(self.pool.arm, PairState) else (self.pool.arm,)
        of_task = self.pool.task.observed()
        self.perceived = [q for q in of_task if q.term.source == "external" and q.term.difference is None]
        self.timestep_s = float(self.pool.model.opt.timestep)
        self.steps_per_frame = max(1, round(FILM_DT_S / self.timestep_s))
        self.reset(0, 0)

    def reset(self, seed: int, episode: int) -> str:
        """Begin episode ``episode`` of an evaluation with this seed; return its instruction."""
        pool, ids = self.pool, np.zeros(1, np.int64)
        plans = first_episodes(pool.spec, episode + 1, first_env_seed(Purpose.EVALUATION, seed)).rows(ids + episode)
        pool.plans.put(ids, plans)
        pool.start(ids, plans)
        self.time_s, self.steps = 0.0, 0
        self.random = np.random.Generator(np.random.Philox(key=np.array([seed, episode], np.uint64)))
        self.offset = self.perturbation.encoder_offset_rad * self.random.uniform(-1, 1, len(self.joints))
        self.wanted = self.pool.arm.ctrl[0].copy()
        self.film: list[NDArray[np.float64]] = []
        return pool.instruction_texts[0]

    def act(self, targets: Mapping[str, float]) -> None:
        """Command position targets of the joints and grippers; they take effect after the action delay.

        UserError for a missing or unknown name, or a number that is not finite.
        """
        names = [*(f"{name}.pos" for name in self.joints), *self.grippers]
        if set(targets) != set(names):
            raise UserError(f"action: got {', '.join(targets)}, needed {', '.join(names)}")
        values = np.array([float(targets[name]) for name in names])
        if not np.isfinite(values).all():
            raise UserError("action: has NaN or infinite numbers")
        joints, grippers = np.split(values, [len(self.joints)])
        joints = joints - self.offset  # the robot's own controller reads its encoders
        for arm, own, gripper in zip(self.arms, np.split(joints, len(self.arms)), grippers, strict=True):
            self.wanted[arm.parts.arm.ctrl], self.wanted[arm.parts.gripper.ctrl] = own, gripper

    def step(self) -> None:
        """Make one step of the physics."""
        ctrl, wanted = self.pool.arm.ctrl[0], self.wanted
        for arm in self.arms:
            joints, gripper = arm.parts.arm.ctrl, arm.parts.gripper.ctrl
            ctrl[joints] = backlash(ctrl[joints], wanted[joints], self.perturbation.backlash_rad)
            ctrl[gripper] = wanted[gripper]
        self.pool.batch.step(None, nstep=1, stage=self.pool.stage)
        self.pool.view.changed()
        self.time_s += self.timestep_s
        self.steps += 1
        if self.steps % self.steps_per_frame == 0:
            self.film.append(self.pool.batch.state.copy())

    def success(self) -> bool:
        """Whether the task is solved now."""
        return bool(self.pool.task.success()[0])

    def observe(self, images: bool = False) -> dict[str, Any]:
        """Return the measurements, named as in embodied.deployment.robots.base. images: also those of the cameras."""
        p, arm, num_joints = self.perturbation, self.pool.arm, len(self.joints)
        qpos = arm.joint_pos[0].numpy() + self.offset + p.joint_noise_rad * self.random.standard_normal(num_joints)
        qvel = arm.joint_vel[0].numpy() + p.velocity_noise_rad_s * self.random.standard_normal(num_joints)
        found: dict[str, Any] = {f"{name}.pos": float(value) for name, value in zip(self.joints, qpos, strict=True)}
        found |= {f"{name}.vel": float(value) for name, value in zip(self.joints, qvel, strict=True)}
        fingers = [float(arm.finger_qpos[0].mean()) for arm in self.arms]
        found |= dict(zip(self.grippers, fingers, strict=True))
        each = zip(self.chains.items(), np.split(qpos, len(self.chains)), strict=True)
        parts = {f"{side}tcp_pos": torch.from_numpy(chain.tool(own)[0])[None] for (side, chain), own in each}
        quantities = self.pool.task.observe()
        for quantity in self.perceived:
            term = quantity.term
            if quantity.read is None:  # it follows from what is measured
                parts[term.name] = quantity.derive(parts, self.pool.view)
            else:
                noise_m = p.object_noise_m if term.unit == "m" else 0.0
                error = noise_m * torch.from_numpy(self.random.standard_normal(term.size))
                parts[term.name] = quantities[term.name][:1] + error
            if quantity.observed:
                found |= dict(zip(term.entry_names, parts[term.name][0].tolist(), strict=True))
        rendered = self.pool.rig.render(None) if images and self.pool.rig is not None else {}
        return found | {name.removeprefix("images."): value[0].numpy() for name, value in rendered.items()}

    def advance(self, until_s: float) -> None:
        """Step the physics until a time."""
        for _ in range(round((until_s - self.time_s) / self.timestep_s)):
            self.step()

    def frames(self) -> NDArray[np.uint8]:
        """Return the film of the episode, ten frames per second, uint8 [F, h, w, 3]."""
        render, batch = self.pool.film(*FILM_SIZE), self.pool.batch
        frames = np.zeros((len(self.film), FILM_SIZE[1], FILM_SIZE[0], 3), np.uint8)
        for i, state in enumerate([*self.film, batch.state.copy()]):  # the last one is the present state
            batch.state[:] = state
            batch.forward(None, stage=self.pool.stage)
            self.pool.view.changed()
            if i < len(frames):
                frames[i] = render()[0]
        return frames


def serve(arm: SimulatedArm, connection: Connection, lockstep: bool) -> None:
    """Answer calls until the parent closes the connection (EOFError); in between, step the physics in real time."""
    origin_s = time.monotonic()

    def due_s() -> float:
        return origin_s + arm.time_s + arm.timestep_s / 2

    while True:
        wait_s = None if lockstep else max(0.0, due_s() - time.monotonic())
        if select.select([connection], [], [], wait_s)[0]:
            method, arguments = connection.recv()
            try:
                answer = getattr(arm, method)(*arguments)
            except (UserError, KeyError, TypeError, ValueError) as error:
                answer = UserError(str(error))
            if method in ("reset", "frames"):  # which take long: time goes on from here
                origin_s = time.monotonic() - arm.time_s
            connection.send(answer)
        if not lockstep and time.monotonic() >= due_s():
            arm.step()
            if time.monotonic() - origin_s > arm.time_s + 1.0:  # the machine was busy for a second: do not race
                origin_s = time.monotonic() - arm.time_s


def main(argv: list[str]) -> int:
    torch.set_num_threads(1)
    connection = Connection(int(argv[0]))
    end_with_parent(int(argv[1]))
    options = json.loads(argv[2])
    task, cameras = options["task"], [CameraSpec(**camera) for camera in options["cameras"]]
    try:
        robots = task.get("robots")  # two of a kind
        robot = robots.get(SIDES[0]) if isinstance(robots, dict) else task.get("robot", "panda")
        perturbation = robot_perturbation(str(robot)) if options["perturbed"] else None
        arm = SimulatedArm(task, cameras, perturbation)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with connection, closing(arm.pool), suppress(EOFError, ConnectionError, KeyboardInterrupt):
        connection.send("ready")
        serve(arm, connection, options["lockstep"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
