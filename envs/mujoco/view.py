"""The tasks' access to the simulation: named torch tensors over the live arrays of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from embodied.envs.mujoco.arrays import Simulations, live
from embodied.envs.mujoco.robots.base import ArmState

BETWEEN_M = 0.02  # a cube whose centre is this near the tool centre point along every axis is between the fingers


class View:
    """Named torch tensors over the live arrays of a batch: no copies, current after every control step.

    Tensors have a row per env, N, in metres, seconds and radians. Device and type are those of the batch: CPU and
    float64, or any device and float32. ``batch`` is for model fields that a task sets per simulation. Accelerations
    and forces, which the engine computes after velocities, belong to the last step. At the start of an episode they are
    meaningless: read them by sensors, which are 0 there.
    """

    def __init__(self, batch: Simulations, arm: ArmState) -> None:
        self.batch, self.model, self.arm = batch, batch.model, arm
        self.qpos = live(batch.bind("qpos"))
        self.qvel = live(batch.bind("qvel"))
        self.mocap_pos = live(batch.bind("mocap_pos"))
        self.sensors = live(batch.bind("sensordata"))
        self.tcp_pos, self.tcp_mat = arm.tcp_pos, arm.tcp_mat
        self.finger_target = arm.finger_targets[:, :1]
        self.sizes: Mapping[str, Tensor] = {}  # factor of the size of objects, [N], of those that vary
        self._views: dict[tuple[str, str], Tensor] = {}  # by (quantity, object): looking up names is slow
        self._derived: dict[tuple[str, str], Tensor] = {}  # by (quantity, object), for the present state

    def tensor(self, numbers: ArrayLike) -> Tensor:
        """Return numbers, such as random ones, with the type and on the device of the view's tensors."""
        return torch.as_tensor(numbers, dtype=self.qpos.dtype, device=self.qpos.device)

    def changed(self) -> None:
        """Drop the quantities derived from the state, because the simulation has moved."""
        self._derived.clear()

    def sensor(self, name: str) -> Tensor:
        """Return the reading of a sensor, [N, d]."""
        sensor = self.model.sensor(name)
        return self.sensors[:, sensor.adr[0] : sensor.adr[0] + sensor.dim[0]]

    def body_qpos(self, name: str) -> Tensor:
        """Return position and quaternion of a free body, [N, 7]; writable."""
        return _memoized(self._views, ("qpos", name), lambda: _columns(self.qpos, self.model.joint(name).qposadr[0], 7))

    def body_qvel(self, name: str) -> Tensor:
        """Return linear (world frame) and angular (body frame) velocity of a free body, [N, 6]; writable."""
        return _memoized(self._views, ("qvel", name), lambda: _columns(self.qvel, self.model.joint(name).dofadr[0], 6))

    def cube_axes(self, name: str) -> Tensor:
        """Return the directions of the x and the y axis of the cube ``name``, [N, 6]."""
        return self._readings(f"{name}_x_axis", 6)

    def mocap(self, name: str) -> Tensor:
        """Return the position of a mocap body, [N, 3]; writable."""
        return self.mocap_pos[:, int(self.model.body(name).mocapid[0])]

    def size_factor(self, name: str, ids: Tensor) -> Tensor | float:
        """Return the factor of the size of the object ``name`` in envs ``ids``, [n]; 1 if sizes do not vary."""
        return self.sizes[name][ids] if name in self.sizes else 1.0

    def opening(self) -> Tensor:
        """Return how far the fingers are commanded to open, 0 (closed) to 1 (open), [N]."""
        return self.arm.opening()

    def between(self, name: str) -> Tensor:
        """Return whether the centre of the cube ``name`` is between the fingers, open or closed, bool [N]."""

        def compute() -> Tensor:
            return (self.body_qpos(name)[:, :3] - self.tcp_pos).abs().amax(dim=-1) < BETWEEN_M

        return _memoized(self._derived, ("between", name), compute)

    def grasped(self, name: str) -> Tensor:
        """Return whether both fingers touch the cube ``name`` and it is between them, bool [N].

        Contacts alone are not enough: closed fingers that rest on top of a cube both touch it.
        """
        return _memoized(self._derived, ("grasped", name), lambda: self._fingers(name).all(dim=-1) & self.between(name))

    def touched(self, name: str) -> Tensor:
        """Return whether any finger touches the cube ``name``, bool [N]."""
        return _memoized(self._derived, ("touched", name), lambda: self._fingers(name).any(dim=-1))

    def _fingers(self, name: str) -> Tensor:
        """Return whether the left and the right finger touch the cube, bool [N, 2]."""
        return self._readings(f"left_finger_{name}", 2) > 0

    def _readings(self, first: str, size: int) -> Tensor:
        """Return ``size`` readings from the sensor ``first`` on; ``add_object_sensors`` adds them in this order."""
        return _memoized(
            self._views, ("sensors", first), lambda: _columns(self.sensors, self.model.sensor(first).adr[0], size)
        )


def _memoized(cache: dict[tuple[str, str], Tensor], key: tuple[str, str], compute: Callable[[], Tensor]) -> Tensor:
    """Return the value at ``key``; compute it if the cache lacks it."""
    if key not in cache:
        cache[key] = compute()
    return cache[key]


def _columns(array: Tensor, first: int, size: int) -> Tensor:
    """Return a view of ``size`` columns from ``first`` on."""
    return array[:, first : first + size]
