"""The tasks' access to the simulation: named torch tensors over the live arrays of a batch."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import mujoco
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from embodied.core.errors import UserError, unknown_name
from embodied.envs.mujoco.robots.base import ArmState, Simulations, live

Found = TypeVar("Found")
BETWEEN_M = 0.02  # a cube whose centre is this near the tool centre point along every axis is between the fingers


def per_state(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep what a method of a view or of a task returns, by the names that it is given, until ``View.changed``."""

    @wraps(compute)
    def cached(self: Any, *names: str) -> Tensor:
        derived, key = (self if isinstance(self, View) else self.view).derived, (compute.__qualname__, *names)
        if key not in derived:
            derived[key] = compute(self, *names)
        return derived[key]

    return cached


class View:
    """Named torch tensors over the live arrays of a batch: no copies, current after every control step.

    Tensors have a row per env, N, in metres, seconds and radians, with the batch's type and device. ``batch`` is for
    model fields that a task sets per simulation: it is ``models``, if they are kept apart. Accelerations, forces and
    what the engine derives from velocities (``cvel``) belong to the last step, and at the start of an episode to
    another env: read them by sensors, which are 0 there if they are of forces. ``xfrc_applied`` may hold objects'
    weights (engine.py): add to it, do not replace it. UserError for a name that the scene does not have; it lists those
    that it has.
    """

    def __init__(self, batch: Simulations, arm: ArmState, models: Simulations | None = None) -> None:
        self.batch, self.arm = models or batch, arm
        self.model = self.batch.model
        self.qpos, self.qvel = live(batch.bind("qpos")), live(batch.bind("qvel"))
        self.mocap_pos, self._mocap_quat = live(batch.bind("mocap_pos")), live(batch.bind("mocap_quat"))
        self.sites, self.sensors = live(batch.bind("site_xpos")), live(batch.bind("sensordata"))
        self.prefix, self.scale = arm.prefix, arm.scale
        self.views = tuple(View(batch, each, models) for each in arm.arms)  # of two robots, which have their own tools
        if not self.views:
            self.tcp_pos, self.tcp_mat = arm.tcp_pos, arm.tcp_mat
        self.tools = {f"{view.prefix.replace('/', '_')}tcp_pos": view.tcp_pos for view in self.views or (self,)}
        self.sizes: Mapping[str, Tensor] = {}  # factor of the size of objects, [N], of those that vary
        self.derived: dict[tuple[str, ...], Tensor] = {}  # results of ``per_state`` by method and names
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self._qpos, self._qvel = dict[str, Tensor](), dict[str, Tensor]()  # by object: looking up names is slow
        for joint in (self.model.jnt_type == mujoco.mjtJoint.mjJNT_FREE).nonzero()[0]:
            name, at = self.model.body(self.model.jnt_bodyid[joint]).name, self.model.jnt_qposadr[joint]
            dof = self.model.jnt_dofadr[joint]
            self._qpos[name], self._qvel[name] = self.qpos[:, at : at + 7], self.qvel[:, dof : dof + 6]
        self._sensor_ids = {self.model.sensor(i).name: i for i in range(self.model.nsensor)}
        self._sensor_adr = [*self.model.sensor_adr.tolist(), self.model.nsensordata]
        self._mocap_ids = {self.model.body(i).name: int(at) for i, at in enumerate(self.model.body_mocapid) if at >= 0}
        self._site_ids = {self.model.site(i).name: i for i in range(self.model.nsite)}
        single = (self.model.jnt_type >= int(mujoco.mjtJoint.mjJNT_SLIDE)).nonzero()[0]
        self._joint_ids = {self.model.joint(int(i)).name: int(i) for i in single}  # hinges and slides

    def tensor(self, numbers: ArrayLike) -> Tensor:
        """Return numbers, such as random ones, with the type and on the device of the view's tensors."""
        return torch.as_tensor(numbers, dtype=self.qpos.dtype, device=self.qpos.device)

    def constant(self, numbers: tuple[float, ...]) -> Tensor:
        """Return ``tensor(numbers)``, the same one each time, because a GPU waits for new ones."""
        if numbers not in self._constants:
            self._constants[numbers] = self.tensor(numbers)
        return self._constants[numbers]

    def changed(self) -> None:
        """Drop the quantities derived from the state, because the simulation has moved."""
        self.derived.clear()
        for view in self.views:
            view.changed()

    def sensor(self, name: str, count: int = 1) -> Tensor:
        """Return the reading of a sensor, [N, d]; those of ``count`` sensors from this one on, in the scene's order."""
        first = _found("sensor", self._sensor_ids, name)
        return self.sensors[:, self._sensor_adr[first] : self._sensor_adr[first + count]]

    def body_qpos(self, name: str) -> Tensor:
        """Return position and quaternion of a free body, [N, 7]; writable."""
        return _found("free body", self._qpos, name)

    def position(self, name: str) -> Tensor:
        """Return the position of a free body, or of a part of one with the sensor ``<name>_pos``, [N, 3]."""
        by_sensor = name not in self._qpos and f"{name}_pos" in self._sensor_ids
        return self.sensor(f"{name}_pos") if by_sensor else self.body_qpos(name)[:, :3]

    def body_qvel(self, name: str) -> Tensor:
        """Return linear (world frame) and angular (body frame) velocity of a free body, [N, 6]; writable."""
        return _found("free body", self._qvel, name)

    def mocap(self, name: str) -> Tensor:
        """Return the position of a mocap body, [N, 3]; writable."""
        return self.mocap_pos[:, _found("mocap body", self._mocap_ids, name)]

    def mocap_quat(self, name: str) -> Tensor:
        """Return the quaternion of a mocap body, [N, 4]; writable."""
        return self._mocap_quat[:, _found("mocap body", self._mocap_ids, name)]

    def joint_pos(self, name: str) -> Tensor:
        """Return the position of a hinge (rad) or of a slide (m), [N]; writable."""
        return self.qpos[:, self.model.jnt_qposadr[_found("hinge or slide", self._joint_ids, name)]]

    def joint_vel(self, name: str) -> Tensor:
        """Return the velocity of a hinge (rad/s) or of a slide (m/s), [N]; writable."""
        return self.qvel[:, self.model.jnt_dofadr[_found("hinge or slide", self._joint_ids, name)]]

    def site(self, name: str) -> Tensor:
        """Return the position of a site, which may be on any body, [N, 3]."""
        return self.sites[:, _found("site", self._site_ids, name)]

    def size_factor(self, name: str, ids: Tensor | slice = slice(None)) -> Tensor | float:
        """Return the factor of the size of the object ``name`` in envs ``ids``, [n]; 1 if sizes do not vary."""
        return self.sizes[name][ids] if name in self.sizes else 1.0

    @per_state
    def between(self, name: str) -> Tensor:
        """Return whether the centre of the cube ``name`` is between the fingers, open or closed, bool [N]."""
        return (self.position(name) - self.tcp_pos).abs().amax(dim=-1) < BETWEEN_M * self.scale.size

    @per_state
    def grasped(self, name: str) -> Tensor:
        """Return whether both fingers touch the cube ``name`` and it is between them, bool [N].

        Contacts alone are not enough: closed fingers that rest on top of a cube both touch it.
        """
        return (self._contacts(name) > 0).all(dim=-1) & self.between(name)

    def yaw(self) -> Tensor:
        """Return the turn of the tool about the vertical, rad [N]."""
        return torch.atan2(self.tcp_mat[:, 3], self.tcp_mat[:, 0])

    def turn_to(self, name: str) -> Tensor:
        """Return the yaw that aligns the fingers with the nearest faces of the cube ``name``, rad [N]."""
        x, y = self.sensor(f"{name}_x_axis")[:, :2].unbind(-1)
        turn = torch.atan2(y, x) - self.yaw()
        return turn - (turn / (torch.pi / 2)).round() * (torch.pi / 2)

    @per_state
    def touched(self, name: str) -> Tensor:
        """Return whether any finger touches the cube ``name``, bool [N]."""
        return (self._contacts(name) > 0).any(dim=-1)

    def _contacts(self, name: str) -> Tensor:
        """Return the number of contacts of each finger with the object ``name``, [N, 2]."""
        first = f"{self.prefix}left_finger_{name}"
        if first not in self._sensor_ids:
            how = f"build_scene adds them: add_object_sensors(spec, '{name}') of embodied.envs.mujoco.scene"
            raise UserError(f"fingers do not feel '{name}', which has no sensors of contacts; {how}")
        return self.sensor(first, 2)


def _found(kind: str, those: Mapping[str, Found], name: str) -> Found:
    """Return the thing called ``name``. UserError if there is none; it lists the others."""
    if name not in those:
        raise unknown_name(f"{kind} of the scene", name, those)
    return those[name]
