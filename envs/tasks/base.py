"""The base class of tasks and its options.

A task reads torch tensors over the batch's live arrays (``View``) and returns torch tensors; it never steps the
simulation. Quantities have a row per env, N, in metres, seconds and radians, with the type and on the device of the
view's tensors: numbers of a task's own become tensors by ``View.tensor`` or take type and device from another tensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from embodied.core.errors import UserError, describe_error, unknown_name
from embodied.core.spec import SUCCESS, CameraSpec, EnvSpec, Instruction, StartStage, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import Shape
from embodied.envs.mujoco.robots.base import Robot
from embodied.envs.mujoco.robots.described import build_robot
from embodied.envs.mujoco.robots.pair import Pair
from embodied.envs.mujoco.scene import add_scene, on_table
from embodied.envs.mujoco.view import View
from embodied.envs.rendering.cameras import Camera
from embodied.envs.tasks.config import TaskConfig

OUT_OF_REACH = 0.02  # m of the Panda, by which a corner of an area may be missed


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a task observes, and how it is read."""

    term: Term
    read: Callable[[], Tensor] | None = None
    """Return the quantity, [N, size], in the term's unit. None: it follows from others."""
    compute: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    """Compute the quantity from tools (``tcp_pos``) and quantities before it, by name, which may be measured values.
    None: by the term's ``difference``."""
    observed: bool = True
    """False: it is perceived, and what is computed from it is observed."""

    def derive(self, parts: Mapping[str, Tensor], view: View) -> Tensor:
        """Return the quantity as it follows from others, by name, [N, size]."""
        if self.compute is not None:
            return self.compute(parts)
        rule, size = self.term.difference, self.term.size
        assert rule is not None
        of, minus = (pad(parts[name], (0, size - parts[name].shape[1])) for name in (rule.of, rule.minus))
        offset = (*rule.offset, *(0.0,) * (size - len(rule.offset)))
        return (of + view.constant(offset) if rule.offset else of) - minus


class Task:
    """One task. A subclass defines scene, observations, rewards and success; the pool simulates it.

    UserError for an option that the task does not allow.
    """

    name: str
    """Name in the registry."""
    instruction: str
    """What is to be done, in a sentence."""
    instruction_N: Tensor
    """Index into ``instructions`` for the present episode of each env, int64; the pool writes it before ``reset``."""
    other_outcomes: tuple[str, ...] = ()
    """Names of what ``outcomes`` returns: what is counted of episodes besides success."""
    held_object: str | None = None
    """Body that is in the hand where an episode starts from the stage ``held``; None: there is no such stage."""
    recordable = False
    """Whether a GPU may record rewards, outcomes, failures and observations (``core.graphs.Recorded``)."""
    shapes_checked = False
    """Whether the shapes of what it returns have been checked."""
    half_width_m: float | Tensor
    """Distance from the centre of ``held_object`` to each finger, a number or [N]; set by ``bind``."""
    config: TaskConfig
    view: View
    """Access to the simulation; set before ``bind``."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.robot = self.build_robot()
        self.scale = self.robot.scale
        if config.held_starts > 0 and not self.stages:
            raise UserError(f"held_starts: {self.name} has no object to hold, allowed: 0")
        self._check_reach()

    def build_robot(self) -> Robot:
        """Return the robot of the options."""
        return build_robot(self.config.robot, self.config.control)

    def corners(self) -> list[tuple[str, tuple[float, ...]]]:
        """Return the corners of the areas of the options, m, each with the option's name."""
        table_m, corners = self.robot.workspace_m[0][2], []
        for low in [option.name for option in fields(self.config) if option.name.endswith("_low_m")]:
            high = f"{low.removesuffix('_low_m')}_high_m"
            area: tuple[Any, Any] = getattr(self.config, low), getattr(self.config, high, None)
            if not all(isinstance(corner, tuple) and len(corner) in (2, 3) for corner in area):
                needed = f"{low} and {high} are the corners of an area, x and y, or x, y and z, in m"
                raise UserError(f"task {self.name}: {needed}; got {area[0]} and {area[1]}")
            corners += [(low, (*corner, table_m)[:3]) for corner in product(*zip(*area, strict=True))]
        return corners

    def _check_reach(self) -> None:
        """Raise UserError if the tool cannot be brought to a corner of an area of the options."""
        if not (corners := self.corners()):
            return
        _, miss_n = self.robot.reach_for(np.array([corner for _, corner in corners]))
        (low, corner), miss_m = corners[miss_n.argmax()], miss_n.max()
        if miss_m > OUT_OF_REACH * self.scale.reach:
            at, home = (", ".join(f"{x:.3g}" for x in place) for place in (corner, self.robot.home_tool_m))
            reason = f"({at}) m is {miss_m:.3f} m out of reach of the robot {self.robot.name}, whose tool is at"
            reason += f" ({home}) m at home"
            raise UserError(f"{low}, {low.removesuffix('_low_m')}_high_m: the corner {reason}")

    # -- description, known before the simulation ----------------------------------------------------------------------

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions of the task; by default one."""
        return (Instruction(self.instruction, goal=self.instruction),)

    @property
    def stages(self) -> tuple[StartStage, ...]:
        """Stages other than the ordinary start; at most one, ``held``, which ``put_in_hand`` makes."""
        return (StartStage("held", self.config.held_starts),) if self.held_object else ()

    def observed(self) -> tuple[Quantity, ...]:
        """Return the quantities of ``obs["state"]`` after the robot's own, in order; and those they follow from."""
        raise NotImplementedError

    def observed_by_critic(self) -> tuple[Quantity, ...]:
        """Return the quantities of ``obs["privileged"]``, in order; for the critic only."""
        raise NotImplementedError

    def state_terms(self) -> tuple[Term, ...]:
        """Return the terms of what is observed after the robot's own."""
        return tuple(quantity.term for quantity in self.observed() if quantity.observed)

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        """Add the task's objects to a spec that holds the robot and the table."""

    def scene(self) -> mujoco.MjSpec:
        """Return the robot at its table, with the user's scene and the task's objects."""
        spec = on_table(self.robot)
        if self.held_object and self.robot.impratio is not None:
            spec.option.impratio = self.robot.impratio
        if self.config.scene:
            add_scene(spec, Path(self.config.scene))
        with self._told():
            self.build_scene(spec)
        free = [body for body in spec.bodies if any(x.type == mujoco.mjtJoint.mjJNT_FREE for x in body.joints)]
        for number, geom in enumerate(geom for body in free for geom in body.geoms):
            geom.name = geom.name or f"#{number}"  # images find by its name what changes its size
        return spec

    def compiled(self, spec: mujoco.MjSpec) -> mujoco.MjModel:
        """Return the model of a scene. UserError if MuJoCo refuses it."""
        with self._told():
            return spec.compile()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raise what MuJoCo refuses in the block as UserError."""
        try:
            yield
        except UserError:
            raise
        except ValueError as error:
            hint = "; the robot may have a part of this name" if "repeated name" in str(error) else ""
            raise UserError(f"task {self.name}: its scene: {describe_error(error)}{hint}") from error

    def shapes(self) -> Mapping[str, Sequence[Shape]]:
        """Return the shapes that ``reset`` may give the geom of an object, by its body's name.

        ``sim=warp`` must know them before it is built; others are as in the scene.
        """
        return {}

    # -- in the simulation ---------------------------------------------------------------------------------------------

    def attach(self, view: View) -> None:
        """Give the task its simulation. The pool calls it once."""
        self.view = view
        self.bind(view)
        if self.held_object and not hasattr(self, "half_width_m"):
            raise UserError(f"task {self.name}: held_object needs half_width_m, which bind sets")
        self._observed, self._observed_by_critic = self.observed(), self.observed_by_critic()

    def bind(self, view: View) -> None:
        """Keep the tensors that the task reads often. A subclass calls ``super().bind(view)`` first."""

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        """Write the initial state of envs ``ids`` [n] (objects and goals; the arm is already placed)."""

    def observe(self) -> dict[str, Tensor]:
        """Read the quantities of ``observed``: by name, each [N, size], in the terms' units (the pool scales)."""
        return _read(self._observed, self.view)

    def privileged(self) -> dict[str, Tensor]:
        """Read the quantities of ``observed_by_critic``: by name, each [N, size], in the terms' units."""
        return _read(self._observed_by_critic, self.view)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        """Return the reward terms by name, each [N]; the reward is their sum. success: of the same state, bool [N]."""
        raise NotImplementedError

    def success(self) -> Tensor:
        """Return whether the task is solved now, bool [N]."""
        raise NotImplementedError

    def outcomes(self) -> dict[str, Tensor]:
        """Return whether each of ``other_outcomes`` holds now, by name, bool [N]."""
        return {}

    def failure(self) -> Tensor | None:
        """Return whether the episode has failed and ends as a termination, bool [N]; None: the task has no failures."""
        return None

    def expert(self) -> Tensor:
        """Return the scripted expert's action, [N, A], a function of the present state."""
        raise UserError(f"task {self.name} has no scripted expert")

    def put_in_hand(self, ids: Tensor) -> None:
        """Put ``held_object`` of envs ``ids`` [n] at the tool centre point, aligned with the fingers, closed on it."""
        view, name = self.view, self.held_object
        assert name is not None
        half_yaw = torch.atan2(view.tcp_mat[ids, 3], view.tcp_mat[ids, 0]) / 2
        pose = view.qpos.new_zeros(len(ids), 7)
        half_width_n = view.tensor(self.half_width_m).expand(len(view.qpos))[ids] * view.size_factor(name, ids)
        middle_n3 = view.arm.hold(ids, half_width_n)
        middle_n3 = (view.tcp_mat[ids].reshape(-1, 3, 3) * middle_n3.unsqueeze(1)).sum(-1)
        pose[:, :3], pose[:, 3], pose[:, 6] = view.tcp_pos[ids] + middle_n3, half_yaw.cos(), half_yaw.sin()
        view.body_qpos(name)[ids] = pose

    # -- labels of images, for grounding -------------------------------------------------------------------------------

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Descriptions of all possible bodies, such as "red cube"; by default none: images cannot be labelled."""
        return ()

    def body_descriptions(self) -> dict[str, Tensor]:
        """Return the index into ``descriptions`` for each body, int64 [N], by the body's name."""
        raise NotImplementedError

    def body_roles(self) -> dict[str, Tensor]:
        """Return the ``Role`` of each body, uint8 [N], by the body's name; a body missing from the dict has none."""
        raise NotImplementedError

    def target_positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the object and of the place that the instruction names, [N, 3], m, base frame."""
        raise NotImplementedError

    # -- exact resume --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the task's state outside of the physics, tensors of fixed shapes; keys begin with ``task/``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state_dict``, whose entries ``state`` contains; the physics is restored already."""


def _read(quantities: Sequence[Quantity], view: View) -> dict[str, Tensor]:
    """Read quantities by name; those without ``read`` follow from tools (``tcp_pos``) and those before."""
    values = dict(view.tools)
    for quantity in quantities:
        name = quantity.term.name
        values[name] = quantity.derive(values, view) if quantity.read is None else quantity.read()
    return {name: value for name, value in values.items() if name not in view.tools}


def _check_terms(task: str, own: int, terms: Sequence[Term]) -> None:
    """Raise UserError for a name of two terms, and for a difference of others than tools and earlier terms.

    own: how many of the terms, the first ones, are the robot's.
    """
    names = [term.name for term in terms]
    known = {name for name in names[:own] if name.endswith("tcp_pos")}
    for i, term in enumerate(terms[own:], own):
        if term.name in names[:i]:
            raise UserError(f"task {task}: two quantities are called '{term.name}'; taken: {', '.join(names[:i])}")
        rule = term.difference
        for name in () if rule is None else (rule.of, rule.minus):
            if name not in known:
                raise UserError(f"task {task}: Quantity '{term.name}': {unknown_name('term before it', name, known)}")
        known.add(term.name)


def column(x: Tensor) -> Tensor:
    """Return a bool or real [N] as real [N, 1]."""
    return (x if x.is_floating_point() else x.float()).unsqueeze(-1)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distance of points [N, d], [N]."""
    length: Tensor = vector_norm(a - b, dim=-1)
    return length


def near(distance: Tensor, scale_m: float) -> Tensor:
    """Return 1 - tanh(d / scale): 1 at distance 0, falling to 0.24 at ``scale_m``."""
    return 1 - torch.tanh(distance / scale_m)


def progress(distance: Tensor, range_m: float) -> Tensor:
    """Return 1 at distance 0, falling linearly to 0 at ``range_m``: the same gradient everywhere in the range."""
    return (1 - distance / range_m).clamp(min=0)


def task_spec(task: Task, cameras: Sequence[Camera] = ()) -> EnvSpec:
    """Return the spec of a task; with cameras its own terms are privileged."""
    try:
        robot, objects = task.robot.terms, task.state_terms()
        privileged = tuple(quantity.term for quantity in task.observed_by_critic())
    except AttributeError as error:
        when = "they are called before bind, so a Quantity reads tensors in a function"
        raise UserError(f"task {task.name}: observed, observed_by_critic: {describe_error(error)}; {when}") from error
    if not privileged:
        raise UserError(f"task {task.name}: observed_by_critic: got nothing, needed: at least one quantity")
    for terms in ((*robot, *objects), (*robot, *privileged)):
        _check_terms(task.name, len(robot), terms)
    return EnvSpec(
        task=task.name,
        state=robot if cameras else (*robot, *objects),
        action=task.robot.action,
        robot=task.robot.name,
        arm=task.robot.arm,
        right_arm=task.robot.right_arm if isinstance(task.robot, Pair) else None,
        control_dt_s=task.config.control_dt_s,
        max_episode_steps=task.config.max_episode_steps,
        privileged=(*objects, *privileged) if cameras else privileged,
        cameras=tuple(CameraSpec(camera.name, camera.height, camera.width) for camera in cameras),
        instructions=task.instructions,
        outcomes=(SUCCESS, *task.other_outcomes),
        stages=task.stages,
        descriptions=task.descriptions,
    )
