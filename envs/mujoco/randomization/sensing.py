"""Measurements of the true state: encoders and perception with noise, constant errors and delay.

    true joints ──► delay ──► + offset + noise ──► kinematics ──► robot's terms and the pose that actions start from
    true poses of objects ──► delay ──► + offset + noise ──────► task's terms
                             both ──► differences (``cube_from_tcp``), as in embodied.deployment.control.arm

A measurement belongs to a control step: observation and controller of this step see the same one. Noise is a function
of the episode's plan and the control step.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.robots.base import Arm, Measurement
from embodied.envs.tasks.base import Task

JOINT_QUANTITIES = ("encoder_offset", "joint_noise", "velocity_noise", "joint_delay")
QUANTITIES = {*JOINT_QUANTITIES, "object_noise", "object_offset", "object_delay"}
"""Quantities that make a measurement differ from the truth."""
Rows = slice | np.ndarray  # all envs, or ids
Now = Callable[[], tuple[EpisodeRng, np.ndarray]]
"""Returns the random numbers of all present episodes, and how many control steps each has made, [N]."""


class Lag:
    """The last values of a signal at control steps. Between two of them it is taken as linear."""

    def __init__(self, num_envs: int, size: int, longest_s: float, control_dt_s: float) -> None:
        self.control_dt_s = control_dt_s
        self.past = np.zeros((int(np.ceil(longest_s / control_dt_s - 1e-9)) + 1, num_envs, size))

    def push(self, value_ND: np.ndarray) -> None:
        """Add the value of the present control step."""
        self.past[1:] = self.past[:-1].copy()
        self.past[0] = value_ND

    def read(self, age_n: np.ndarray, rows: Rows) -> np.ndarray:
        """Return the values of envs ``rows`` at ages in seconds, at most the longest, [n, D]."""
        age_n = age_n / self.control_dt_s
        newest = len(self.past) - 1
        newer_n = np.minimum(age_n.astype(np.int64), newest)
        older_n, share_n1 = np.minimum(newer_n + 1, newest), (age_n - newer_n)[:, None]
        at = np.arange(self.past.shape[1])[rows]
        read: np.ndarray = self.past[newer_n, at] * (1 - share_n1) + self.past[older_n, at] * share_n1
        return read


class Sensing:
    """Measurements of all N robots and of the objects in front of them.

    values: numbers of the quantities that vary, [N, size] by name, live. longest_s: largest delays by name.
    """

    def __init__(
        self, task: Task, arm: Arm, values: Mapping[str, np.ndarray], longest_s: Mapping[str, float], now: Now
    ) -> None:
        self.task, self.arm, self.values, self.now = task, arm, values, now
        terms, num_envs = task.state_terms(), len(arm.joint_pos)
        self.external = [term for term in terms if term.source == "external" and term.difference is None]
        self.derived = [term for term in terms if term.difference is not None]
        units = [term.unit for term in self.external for _ in range(term.size)]
        self.metric = np.flatnonzero([unit == "m" for unit in units])
        self.axis = np.array([i for term in self.external for i in range(term.size)], dtype=np.int64)[self.metric]
        self.joints = arm.joint_pos.shape[1]
        sizes = {"joint_delay": 2 * self.joints + 1, "object_delay": len(units)}
        late = [name for name in sizes if name in longest_s]
        self.lags = {name: Lag(num_envs, sizes[name], longest_s[name], task.config.control_dt_s) for name in late}
        self._measured: Measurement | None = None

    def start(self, ids: np.ndarray) -> None:
        """Begin episodes in envs ``ids``."""
        for name, lag in self.lags.items():
            lag.past[:, ids] = self._signal(name)[ids]
        if self._measured is not None and len(ids) < len(self.arm.joint_pos):
            for known, new in zip(self._measured, self._measure(ids), strict=True):
                known[..., ids] = new
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
            noise = self._noise("noise/joints", 2 * joints, rows)
            qpos = qpos + self._value("joint_noise", rows) * noise[:, :joints]
            qvel = qvel + self._value("velocity_noise", rows) * noise[:, joints:]
        return self.arm.measurement(qpos, qvel, signal[:, 2 * joints :])

    def observe(self, ids: np.ndarray | None) -> dict[str, Tensor]:
        """Return the terms of the state of envs ``ids`` (None: all) as measured, by name."""
        rows: Rows = slice(None) if ids is None else ids
        parts = {name: value.numpy()[rows] for name, value in self.arm.observe(self.measured()).items()}
        external = self._late("object_delay", rows).copy()
        if "object_offset" in self.values:
            external[:, self.metric] += self.values["object_offset"][rows][:, self.axis]
        if "object_noise" in self.values:
            noise = self._noise("noise/objects", len(self.metric), rows)
            external[:, self.metric] += self.values["object_noise"][rows] * noise
        first = 0
        for term in self.external:
            parts[term.name] = external[:, first : first + term.size]
            first += term.size
        for term in self.derived:
            parts[term.name] = term.derive(parts)
        return {name: torch.from_numpy(value) for name, value in parts.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the past of delayed signals, copies."""
        return {f"sensing/{name}": torch.from_numpy(lag.past.copy()) for name, lag in self.lags.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._measured = None
        for name, lag in self.lags.items():
            lag.past[:] = state[f"sensing/{name}"].numpy()

    def _value(self, name: str, rows: Rows) -> np.ndarray | float:
        """Return the numbers of a quantity, [n, size]; 0 if it does not vary."""
        return self.values[name][rows] if name in self.values else 0.0

    def _noise(self, stream: str, size: int, rows: Rows) -> np.ndarray:
        """Return standard normals of the present control step, [n, size]."""
        rng, step_N = self.now()
        return (rng if isinstance(rows, slice) else rng.rows(rows)).normal(stream, step_N[rows], size)

    def _late(self, delay: str, rows: Rows) -> np.ndarray:
        """Return the true signal at the age of its delay, [n, D]."""
        lag = self.lags.get(delay)
        return self._signal(delay)[rows] if lag is None else lag.read(self.values[delay][rows, 0], rows)

    def _signal(self, delay: str) -> np.ndarray:
        """Return the true present signal that a delay applies to, [N, D]."""
        if delay == "joint_delay":
            finger = self.arm.finger_qpos.mean(dim=1, keepdim=True)
            return torch.cat([self.arm.joint_pos, self.arm.joint_vel, finger], 1).numpy()
        quantities = self.task.observe()
        if not self.external:
            return np.zeros((len(self.arm.joint_pos), 0))
        return torch.cat([quantities[term.name] for term in self.external], 1).numpy()
