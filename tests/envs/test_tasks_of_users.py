"""A task of a user's: what it reads of the scene, and what it is told where it makes a mistake."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from embodied import tasks
from embodied.core.errors import UserError
from embodied.core.options import config_dataclass
from embodied.core.spec import Difference, Term
from embodied.envs import make_sampler
from embodied.envs.checks.robot import check_robot
from embodied.envs.episodes.sampler import first_episodes
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import SimConfig
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.scene import add_body, add_object_sensors
from embodied.envs.mujoco.view import View
from embodied.envs.mujoco.warp.pool import WarpConfig, WarpPool
from embodied.envs.tasks.base import Quantity, Task, column
from embodied.envs.tasks.config import TaskConfig
from tests.commands.helpers import run

BOX = mujoco.mjtGeom.mjGEOM_BOX


class Lid(Task):
    """A lid on a box, which stands elsewhere in every episode."""

    name = "lid"
    instruction = "open the lid"
    config: TaskConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        box = add_body(spec, "box", mocap=True)
        lid = box.add_body(name="lid", pos=[0, 0, 0.1])
        lid.add_joint(name="lid", type=mujoco.mjtJoint.mjJNT_HINGE, axis=[0, -1, 0], range=[0, 1.5])
        lid.add_geom(type=BOX, size=[0.05, 0.05, 0.005], pos=[0.05, 0, 0], mass=0.1)
        lid.add_site(name="edge", pos=[0.1, 0, 0])
        add_object_sensors(spec, "lid")

    def bind(self, view: View) -> None:
        super().bind(view)
        self.box, self.edge, self.angle = view.mocap("box"), view.site("edge"), view.joint_pos("lid")

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        self.box[ids, :2] = self.view.tensor(rng.uniform("box", [0.4, -0.1], [0.6, 0.1]))
        self.view.mocap_quat("box")[ids] = self.view.tensor([0.0, 0.0, 0.0, 1.0])  # half a turn
        self.angle[ids] = 0.5

    def observed(self) -> tuple[Quantity, ...]:
        return (Quantity(Term("edge", 3, "m", "base"), lambda: self.edge),)

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        return (Quantity(Term("speed", 1, "rad/s"), lambda: column(self.view.joint_vel("lid"))),)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        return {"open": 0.5 * self.angle.clamp(0, 1), "opened": 0.5 * success}

    def success(self) -> Tensor:
        return self.angle > 1.0


def started(task: Task, num_envs: int = 4, **sim: Any) -> MujocoPool:
    env = MujocoPool(task, num_envs=num_envs, num_threads=1, sim=SimConfig(**sim))
    env.reset(make_sampler(env, seed=0))
    return env


@pytest.mark.parametrize("warp", [False, True], ids=["mujoco", "warp"])
def test_parts_of_a_scene_are_read_and_written_by_name(warp: bool) -> None:
    task = Lid(TaskConfig())
    env = WarpPool(task, num_envs=3, sim=WarpConfig(device="cpu")) if warp else MujocoPool(task, num_envs=3)
    env.reset(make_sampler(env, seed=0))
    torch.testing.assert_close(task.angle, torch.full_like(task.angle, 0.5))
    angle = task.angle[0].double()
    offset = torch.stack([-0.1 * angle.cos(), 0 * angle, 0.1 + 0.1 * angle.sin()])  # turned by half a turn
    torch.testing.assert_close(task.edge.double() - task.box.double(), offset.expand(3, -1), atol=1e-5, rtol=0)
    assert len(task.box[:, 0].unique()) == 3, "another place in each env"
    hinge = task.edge - task.view.position("lid")
    torch.testing.assert_close(hinge.norm(dim=-1), torch.full_like(hinge[:, 0], 0.1))
    assert not task.view.grasped("lid").any()
    env.step(torch.zeros(3, 1, env.spec.action.size))
    assert (task.view.joint_vel("lid") < 0).all(), "it falls"


@pytest.mark.parametrize("read", ["joint_pos", "joint_vel", "site", "mocap", "mocap_quat", "body_qpos", "body_qvel",
                                  "position", "sensor"])  # fmt: skip
def test_a_name_that_the_scene_lacks_is_refused_with_the_names_it_has(read: str) -> None:
    task = started(Lid(TaskConfig())).task
    with pytest.raises(UserError, match=r"of the scene 'ldi'.* Allowed: "):
        getattr(task.view, read)("ldi")
    with pytest.raises(UserError, match=r"fingers do not feel 'box'.*add_object_sensors\(spec, 'box'\)"):
        task.view.grasped("box")


class Eager(Lid):
    def observed(self) -> tuple[Quantity, ...]:
        edge = self.edge
        return (Quantity(Term("edge", 3, "m", "base"), lambda: edge),)


class TakesTheRobotsName(Lid):
    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        spec.worldbody.add_body(name="hand").add_geom(type=BOX, size=[0.1, 0.1, 0.1])


class Numbers(Lid):
    def success(self) -> Tensor:
        return super().success().float()


class NotANumber(Lid):
    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        return super().rewards(success) | {"odd": self.angle / (0 * self.angle) * 0}


class LooksUp(Lid):
    def bind(self, view: View) -> None:
        super().bind(view)
        self.other = view.joint_pos("hinge")


@config_dataclass
class HalfAnAreaConfig(TaskConfig):
    """Options of HalfAnArea."""

    yellow_low_m: tuple[float, float] = (0.4, 0.0)


class HalfAnArea(Lid):
    config: HalfAnAreaConfig


class NoReward(Lid):
    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        return {}


class TwoOfAName(Lid):
    def observed(self) -> tuple[Quantity, ...]:
        return (*super().observed(), Quantity(Term("joint_pos", 3), lambda: self.edge))


class Backwards(Lid):
    def observed(self) -> tuple[Quantity, ...]:
        of_lid = Quantity(Term("from_lid", 3, difference=Difference("lid", "tcp_pos")))
        return (of_lid, Quantity(Term("lid", 3), lambda: self.edge))


class HoldsNothing(Lid):
    held_object = "lid"


class OneReward(Lid):
    def rewards(self, success: Tensor) -> Any:
        return 0.5 * success


@dataclass
class Mistake:
    task: type[Task]
    message: str
    config: Any = TaskConfig


@pytest.mark.parametrize(
    "mistake",
    [
        Mistake(Eager, r"observed, .*AttributeError in test_tasks_of_users.py, line \d+: .*'edge'; .* before bind"),
        Mistake(TakesTheRobotsName, r"its scene: .*repeated name 'hand'.*; the robot may have a part of this name"),
        Mistake(Numbers, r"success\(\): got numbers, needed: true or false"),
        Mistake(NotANumber, r"rewards\(\)\['odd'\]: not finite at the start"),
        Mistake(LooksUp, r"unknown hinge or slide of the scene 'hinge'\. .*lid"),
        Mistake(
            HalfAnArea, r"yellow_low_m and yellow_high_m are the corners.*; got \(0.4, 0.0\) and None", HalfAnAreaConfig
        ),
        Mistake(NoReward, r"rewards\(\): got nothing"),
        Mistake(OneReward, r"rewards\(\): got Tensor, needed: a dictionary"),
        Mistake(TwoOfAName, r"two quantities are called 'joint_pos'; taken: joint_pos, joint_vel, "),
        Mistake(Backwards, r"Quantity 'from_lid': unknown term before it 'lid'.* Allowed: tcp_pos"),
        Mistake(HoldsNothing, r"held_object needs half_width_m"),
    ],
    ids=lambda mistake: mistake.task.__name__,
)
def test_a_mistake_in_a_task_is_told_as_one(mistake: Mistake) -> None:
    with pytest.raises(UserError, match=mistake.message):
        started(mistake.task(mistake.config()))


class LateReward(Lid):
    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        return {"fine": 0.5 * success, "odd": torch.where(self.angle < 0.3, torch.nan, 1.0)}


class LateQuantity(Lid):
    def observed(self) -> tuple[Quantity, ...]:
        return (Quantity(Term("odd", 1, ""), lambda: column(torch.where(self.angle < 0.3, torch.nan, 1.0))),)


LATE = {"reward": (LateReward, r"rewards\(\)\['odd'\]"), "state": (LateQuantity, "Quantity 'odd'")}


@pytest.mark.parametrize(("task", "message"), LATE.values(), ids=LATE)
def test_what_is_not_finite_later_is_named(task: type[Task], message: str) -> None:
    env = started(task(TaskConfig()))

    def until_the_lid_falls() -> None:
        for _ in range(env.spec.max_episode_steps):
            env.step(torch.zeros(4, 4))

    with pytest.raises(UserError, match=f"{message}: not finite in [1-4] envs, such as"):
        until_the_lid_falls()


def test_a_reward_that_is_not_finite_is_named_after_other_envs_have_ended_too() -> None:
    env = started(LateReward(TaskConfig()))
    plans = first_episodes(env.spec, 4, 0)
    plans.time_limit_n[0] = 1
    env.begin(np.arange(4), plans)
    with pytest.raises(UserError, match=r"rewards\(\)\['odd'\]: not finite in [1-4] envs"):
        env.step(torch.zeros(4, env.spec.max_episode_steps, 4))


class UndefinedAtTheStart(Lid):
    """A reward that is no number in the model's initial state, in which an env whose simulation diverged is put."""

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        return {"angle": self.angle / self.angle}


def test_a_simulation_that_diverged_is_not_held_against_the_task(tmp_path: Path) -> None:
    env = started(UndefinedAtTheStart(TaskConfig()), dump_dir=str(tmp_path))
    env.batch.bind("qvel")[1] = float("nan")
    step = env.step(torch.zeros(4, 4))
    assert step.num_steps_N.tolist() == [1, 0, 1, 1]


def test_a_bind_that_forgets_the_base_class_still_has_a_view() -> None:
    class Forgets(Lid):
        def bind(self, view: View) -> None:
            self.box, self.edge, self.angle = self.view.mocap("box"), view.site("edge"), view.joint_pos("lid")

    assert started(Forgets(TaskConfig())).observe()["state"].isfinite().all()


class AlwaysSolved(Lid):
    def success(self) -> Tensor:
        return self.angle > -1


def test_the_check_finds_a_task_that_is_solved_at_its_start() -> None:
    found = {result.name: result for result in check_robot(started(AlwaysSolved(TaskConfig()), num_envs=8))}
    assert not found["start"].passed
    assert found["start"].why.startswith("100% of 8 episodes are solved at their start: ")
    found = {result.name: result for result in check_robot(started(Lid(TaskConfig()), num_envs=8))}
    assert found["start"].passed
    assert found["ik"].why.startswith("no areas to reach")
    assert "expert" not in found


class InTheWay(Lid):
    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        spec.body("box").add_geom(type=BOX, size=[0.05, 0.05, 0.05])

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        self.box[ids] = self.view.tensor([0.6, 0.0, 0.2])


def test_the_check_names_what_touches_the_robot_at_the_start() -> None:
    found = {result.name: result for result in check_robot(started(InTheWay(TaskConfig()), num_envs=8))}
    assert not found["still"].passed
    assert re.search(r"another start, since the robot begins in contact with (box|lid)", found["still"].why)


class Loose(Lid):
    """A ball that begins beside the table's part that the tool reaches, and below the table's surface."""

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        ball = add_body(spec, "ball", pos=[1.0, 0.0, -0.1])
        ball.add_freejoint()
        ball.add_geom(size=[0.03, 0, 0])


def test_the_check_notes_objects_that_begin_at_odd_places() -> None:
    notes: list[str] = []
    next(check_robot(started(Loose(TaskConfig())), notes.append))
    assert notes[0] == "ball begins up to 0.25 m outside of the workspace of robot franka_panda"
    assert re.match(r"ball moves by up to \d\.\d\d m while the robot stands still: does it begin inside", notes[1])


def test_the_picture_of_a_task_without_an_expert_shows_an_arm_that_stands_still(tmp_path: Path) -> None:
    source = Path(__file__).read_text().partition("\ndef started")[0]
    (tmp_path / "lid.py").write_text(source)
    words = [f"check={tmp_path / 'lid.py'}:Lid", "resets=2", "steps=2", "num_envs=1", f"picture={tmp_path / 'x.png'}"]
    outcome = run(tasks.main, words)
    assert outcome.code == 0, outcome.stderr
    assert (tmp_path / "x.png").stat().st_size > 10_000
