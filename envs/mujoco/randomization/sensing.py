"""Measurements of the true state: encoders and perception with noise, constant errors and delay.

    true joints ──► delay ──► + offset + noise ──► kinematics ──► robot's terms and the pose that actions start from
    true poses of objects ──► delay ──► + offset + noise ──────► task's terms
                             both ──► differences (``cube_from_tcp``), as in embodied.deployment.control.arm

A measurement belongs to a control step: observation and controller of this step see the same one. Noise is a function
of the episode's plan and the control step.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from embodied.envs.mujoco.robots.base import ArmState, Measurement
from embodied.envs.tasks.base import Task

JOINT_QUANTITIES = ("encoder_offset", "joint_noise", "velocity_noise", "joint_delay")
QUANTITIES = {*JOINT_QUANTITIES, "object_noise", "object_offset", "object_delay"}
"""Quantities that make a measurement differ from the truth."""
Rows = slice | Tensor  # all envs, or ids
Noise = Callable[[str, int, Rows], Tensor]
"""Returns standard normals, float64 [n, size], of a stream, a size and envs: new ones in every control step."""


class Lag:
    """The last values of a signal at control steps. Between two of them it is taken as linear."""

    def __init__(self, present_ND: Tensor, longest_s: float, control_dt_s: float) -> None:
        self.control_dt_s = control_dt_s
        self.past = present_ND.new_zeros(math.ceil(longest_s / control_dt_s - 1e-9) + 1, *present_ND.shape)
        self._row_N = torch.arange(len(present_ND), device=present_ND.device)

    def push(self, value_ND: Tensor) -> None:
        """Add the value of the present control step."""
        self.past[1:] = self.past[:-1].clone()
        self.past[0] = value_ND

    def read(self, age_n: Tensor, rows: Rows) -> Tensor:
        """Return the values of envs ``rows`` at ages in seconds, at most the longest, [n, D]."""
        age_n, at, newest = age_n / self.control_dt_s, self._row_N[rows], len(self.past) - 1
        newer_n = age_n.long().clamp(max=newest)
        older_n, share_n1 = (newer_n + 1).clamp(max=newest), (age_n - newer_n)[:, None]
        return self.past[newer_n, at] * (1 - share_n1) + self.past[older_n, at] * share_n1


class Sensing:
    """Measurements of all N robots and of the objects in front of them.

    values: numbers of the quantities that vary, [N, size] by name, live. longest_s: largest delays by name.
    """

    def __init__(
        self,
        task: Task,
        arm: ArmState,
        values: Mapping[str, Tensor],
        longest_s: Mapping[str, float],
        noise: Noise,
    ) -> None:
        self.task, self.arm, self.values, self.noise = task, arm, values, noise
        quantities, self.device = task.observed(), arm.joint_pos.device
        self.external = [q.term for q in quantities if q.read is not None and q.term.source == "external"]
        self.derived = [q for q in quantities if q.read is None]
        units = [term.unit for term in self.external for _ in range(term.size)]
        metric = np.flatnonzero([unit == "m" for unit in units])
        axis = np.array([i for term in self.external for i in range(term.size)], dtype=np.int64)[metric]
        self.metric, self.axis = (torch.from_numpy(index).to(self.device) for index in (metric, axis))
        self.joints = arm.joint_pos.shape[1]
        late = [name for name in ("joint_delay", "object_delay") if name in longest_s]
        self.lags = {name: Lag(self._signal(name), longest_s[name], task.config.control_dt_s) for name in late}
        self._measured: Measurement | None = None

    def start(self, ids: np.ndarray) -> None:
        """Begin episodes in envs ``ids``."""
        rows = torch.from_numpy(ids).to(self.device)
        for name, lag in self.lags.items():
            lag.past[:, rows] = self._signal(name)[rows]
        if self._measured is not None and len(ids) < len(self.arm.joint_pos):
            for known, new in zip(self._measured, self._measure(rows), strict=True):
                known[..., rows] = new
        else:
            self._measured = None

    def moved(self) -> None:
        """Record the state after a control step."""
        for name, lag in self.lags.items():
            lag.push(self._signal(name))
        self._measured = None

    def measured(self) -> Measurement | None:
        """Return the readings of the encoders at the present control step; None if they are exact."""
        if not any(name in self.values for name in JOINT_QUANTITIES):
            return None
        if self.device.type != "cpu":
            return self._measure(slice(None))  # nothing is kept, so that its kernels can be recorded
        if self._measured is None:
            self._measured = self._measure(slice(None))
        return self._measured

    def _measure(self, rows: Rows) -> Measurement:
        """Return the readings of the encoders of robots ``rows``."""
        joints = self.joints
        signal = self._late("joint_delay", rows)
        qpos, qvel = signal[:, :joints], signal[:, joints : 2 * joints]
        if "encoder_offset" in self.values:
            qpos = qpos + self.values["encoder_offset"][rows]
        if "joint_noise" in self.values or "velocity_noise" in self.values:
            noise = self.noise("noise/joints", 2 * joints, rows)
            qpos = qpos + self._value("joint_noise", rows) * noise[:, :joints]
            qvel = qvel + self._value("velocity_noise", rows) * noise[:, joints:]
        return self.arm.measurement(qpos, qvel, signal[:, 2 * joints :])

    def observe(self, ids: np.ndarray | None) -> dict[str, Tensor]:
        """Return the terms of the state of envs ``ids`` (None: all) as measured, by name."""
        rows: Rows = slice(None) if ids is None else torch.from_numpy(ids).to(self.device)
        parts = {name: value[rows].double() for name, value in self.arm.observe(self.measured()).items()}
        external = self._late("object_delay", rows).double().clone()
        if "object_offset" in self.values:
            external[:, self.metric] += self.values["object_offset"][rows][:, self.axis]
        if "object_noise" in self.values:
            noise = self.noise("noise/objects", len(self.metric), rows)
            external[:, self.metric] += self.values["object_noise"][rows] * noise
        first = 0
        for term in self.external:
            parts[term.name] = external[:, first : first + term.size]
            first += term.size
        for quantity in self.derived:
            parts[quantity.term.name] = quantity.derive(parts, self.task.view)
        return parts

    def state_dict(self) -> dict[str, Tensor]:
        """Return the past of delayed signals, copies."""
        return {f"sensing/{name}": lag.past.clone() for name, lag in self.lags.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._measured = None
        for name, lag in self.lags.items():
            lag.past.copy_(state[f"sensing/{name}"])

    def _value(self, name: str, rows: Rows) -> Tensor | float:
        """Return the numbers of a quantity, [n, size]; 0 if it does not vary."""
        return self.values[name][rows] if name in self.values else 0.0

    def _late(self, delay: str, rows: Rows) -> Tensor:
        """Return the true signal at the age of its delay, [n, D]."""
        lag = self.lags.get(delay)
        return self._signal(delay)[rows] if lag is None else lag.read(self.values[delay][rows, 0], rows)

    def _signal(self, delay: str) -> Tensor:
        """Return the true present signal that a delay applies to, [N, D]."""
        if delay == "joint_delay":
            return torch.cat([self.arm.joint_pos, self.arm.joint_vel, self.arm.gripper_pos], 1)
        quantities = self.task.observe()
        if not self.external:
            return self.arm.joint_pos[:, :0]
        return torch.cat([quantities[term.name] for term in self.external], 1)
