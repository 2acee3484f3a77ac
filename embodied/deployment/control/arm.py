"""Between a robot and a policy, in physical units: observation ─► state, action ─► position targets. numpy only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.arm import ArmLaw, Array, Chain, ToolPose
from embodied.core.errors import UserError
from embodied.core.spec import ActionTerm, ArmSpec, EnvSpec
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.robots.base import GRIPPER, Observation, Unusable, age, joint_names, number


@dataclass(frozen=True, slots=True)
class Measurement:
    """An observation that a command may be based on."""

    observation: Observation
    time_s: float
    """What the robot measured, and when it answered, on the loop's clock."""
    qpos: Array
    qvel: Array
    """Joint positions and velocities, [J]."""

    @property
    def age_s(self) -> float:
        """Age of the observation when the robot answered."""
        return age(self.observation, self.time_s)


class StateBuilder:
    """Assemble the input ``state`` of a policy from a robot's observation (names: embodied.deployment.robots.base).

    Measured terms are read, those of kinematics are computed from the joints, differences from other terms.
    """

    def __init__(self, described: Bundle | EnvSpec) -> None:
        """Raise UserError if there is a term that nothing here can provide. described: it has an arm."""
        arm, terms = described.arm, described.state
        assert arm is not None
        self.arm, self.terms, self.cameras, self.chain = arm, terms, described.cameras, Chain(arm)
        self._positions, self._velocities = joint_names(arm), joint_names(arm, "vel")
        own = {"joint_pos", "joint_vel", "joint_target", "fingers", "finger_target", "tcp_pos", "tcp_vel"}
        names = own | {term.name for term in terms}
        self.external = [term for term in terms if term.name not in own and term.difference is None]
        for term in terms:
            inputs = set() if term.difference is None else {term.difference.of, term.difference.minus}
            if not inputs <= names or (term.name not in own and term.source != "external"):
                raise UserError(f"the term {term.name} cannot be computed from a robot's observation")

    @property
    def needed(self) -> list[str]:
        """Names of the numbers that the observation must have."""
        return [*self._positions, *self._velocities, GRIPPER, *self.external_names]

    @property
    def external_names(self) -> list[str]:
        """Names of the numbers that perception or a person must provide."""
        return [name for term in self.external for name in term.entry_names]

    def qpos(self, observation: Mapping[str, Any]) -> Array:
        """Return the joint positions [J]."""
        return self._numbers(observation, self._positions)

    def qvel(self, observation: Mapping[str, Any]) -> Array:
        """Return the joint velocities [J]."""
        return self._numbers(observation, self._velocities)

    def state(
        self, observation: Mapping[str, Any], finger_target_m: float, joint_target_J: Array | None = None
    ) -> NDArray[np.float32]:
        """Return the state [S], physical units. Unusable for an entry that is missing or not finite.

        joint_target: the last joint targets that were sent; None: there are none yet.
        """
        qpos, qvel = self.qpos(observation), self.qvel(observation)
        position, _, jacobian = self.chain.tool(qpos)
        parts: dict[str, Array] = {
            "joint_pos": qpos, "joint_vel": qvel, "tcp_pos": position, "tcp_vel": jacobian[:3] @ qvel,
            "joint_target": qpos if joint_target_J is None else joint_target_J,
            "fingers": self._numbers(observation, [GRIPPER] * self.arm.gripper.fingers),
            "finger_target": np.array([finger_target_m]),
        }  # fmt: skip
        for term in self.external:
            parts[term.name] = self._numbers(observation, list(term.entry_names))
        for term in self.terms:
            if term.difference is not None:
                parts[term.name] = term.derive(parts)
        return np.concatenate([parts[term.name] for term in self.terms]).astype(np.float32)

    def images(self, observation: Mapping[str, Any]) -> dict[str, NDArray[np.uint8]]:
        """Return a copy of the image of each camera, [height, width, 3]. Unusable without it."""
        found = {camera.name: np.array(observation.get(camera.name)) for camera in self.cameras}
        for camera in self.cameras:
            if (got := found[camera.name].shape) != (camera.height, camera.width, 3):
                what = f"{camera.height} x {camera.width} x 3, of camera '{camera.name}'; got {list(got)}"
                raise Unusable("lacking", f"the robot's observation lacks the image, {what}")
        return found

    @staticmethod
    def _numbers(observation: Mapping[str, Any], names: list[str]) -> Array:
        """Return the named numbers as float64; Unusable for one that is missing or not finite."""
        missing = [name for name in names if name not in observation]
        if missing:
            has = f"(it has {', '.join(observation)})"
            raise Unusable("lacking", f"the robot's observation lacks {', '.join(missing)} {has}")
        values = np.array([number(observation, name) for name in names])
        bad = [name for name, finite in zip(names, np.isfinite(values), strict=True) if not finite]
        if bad:
            raise Unusable("not finite", f"the robot's observation is not finite in {', '.join(bad)}")
        return values


class ArmController:
    """Turn physical actions into position targets by the control law of training (embodied.core.arm)."""

    def __init__(self, arm: ArmSpec, action: tuple[ActionTerm, ...]) -> None:
        self.arm, self.action = arm, action
        self.chain, self.law = Chain(arm), ArmLaw(arm)

    def targets(self, action_A: NDArray[np.floating], qpos_J: Array, finger_target_m: float) -> tuple[Array, float]:
        """Return joint targets [J] and the next finger target (m or rad) for an action in physical units.

        qpos: the measured pose, or with ``arm.from_target`` the last joint targets.
        """
        action = np.asarray(action_A, np.float64)
        qpos_J1 = np.asarray(qpos_J, np.float64)[:, None]

        def tool() -> ToolPose:
            position, rotation, jacobian = self.chain.tools(qpos_J1)
            return ToolPose(position, rotation.reshape(9, 1), jacobian)

        targets: Array = self.law.joint_targets(action[:-1, None], qpos_J1, tool)[:, 0]
        return targets, float(finger_target_m + self.law.finger_step(action[-1], finger_target_m))
