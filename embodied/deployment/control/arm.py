"""Between a robot and a policy, in physical units: observation ─► state, action ─► position targets. numpy only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.arm import ArmLaw, Array, Chain, ToolPose
from embodied.core.errors import UserError
from embodied.core.spec import ActionTerm, Arms, ArmSpec, EnvSpec
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.robots.base import GRIPPER, Observation, Unusable, age, gripper_names, joint_names, number


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
        """Raise UserError if there is a term that nothing here can provide. described: it has an arm, or two."""
        self.arms, self.terms, self.cameras = described.arms, described.state, described.cameras
        self.chains = {side: Chain(arm) for side, arm in self.arms.items()}
        self._positions, self._velocities = joint_names(self.arms), joint_names(self.arms, "vel")
        of_arm = ("joint_pos", "joint_vel", "joint_target", "fingers", "finger_target", "tcp_pos", "tcp_vel")
        own = {side + name for side in self.arms for name in of_arm}
        names = own | {term.name for term in self.terms}
        self.external = [term for term in self.terms if term.name not in own and term.difference is None]
        for term in self.terms:
            inputs = set() if term.difference is None else {term.difference.of, term.difference.minus}
            if not inputs <= names or (term.name not in own and term.source != "external"):
                raise UserError(f"the term {term.name} cannot be computed from a robot's observation")

    @property
    def needed(self) -> list[str]:
        """Names of the numbers that the observation must have."""
        return [*self._positions, *self._velocities, *gripper_names(self.arms), *self.external_names]

    @property
    def external_names(self) -> list[str]:
        """Names of the numbers that perception or a person must provide."""
        return [name for term in self.external for name in term.entry_names]

    def qpos(self, observation: Mapping[str, Any]) -> Array:
        """Return the joint positions [J] of all arms."""
        return self._numbers(observation, self._positions)

    def qvel(self, observation: Mapping[str, Any]) -> Array:
        """Return the joint velocities [J] of all arms."""
        return self._numbers(observation, self._velocities)

    def state(
        self, observation: Mapping[str, Any], finger_target_m: float | Array, joint_target_J: Array | None = None
    ) -> NDArray[np.float32]:
        """Return the state [S], physical units. Unusable for an entry that is missing or not finite.

        finger_target: that of each arm, [arms]. joint_target: the last joint targets that were sent; None: there are
        none yet.
        """
        qpos_J, qvel_J = self.qpos(observation), self.qvel(observation)
        targets, parts = qpos_J if joint_target_J is None else joint_target_J, dict[str, Array]()
        of_arm = [np.split(values, len(self.arms)) for values in (qpos_J, qvel_J, targets)]
        fingers = np.broadcast_to(finger_target_m, len(self.arms))
        for side, qpos, qvel, target, finger in zip(self.arms, *of_arm, fingers, strict=True):
            position, _, jacobian = self.chains[side].tool(qpos)
            measured = self._numbers(observation, [side + GRIPPER] * self.arms[side].gripper.fingers)
            found = {
                "joint_pos": qpos, "joint_vel": qvel, "joint_target": target, "fingers": measured,
                "finger_target": np.array([finger]), "tcp_pos": position, "tcp_vel": jacobian[:3] @ qvel,
            }  # fmt: skip
            parts |= {side + name: value for name, value in found.items()}
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
    """Turn physical actions of one arm into position targets by the control law of training (embodied.core.arm)."""

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


class Controller:
    """The controllers of all arms of a policy."""

    def __init__(self, arms: Arms, action: tuple[ActionTerm, ...]) -> None:
        size = len(action) // len(arms)
        self.each = [ArmController(arm, action[i * size : (i + 1) * size]) for i, arm in enumerate(arms.values())]

    def targets(self, action_A: NDArray[np.floating], qpos_J: Array, fingers_m: Array) -> tuple[Array, Array]:
        """Return joint targets [J] and the next finger target of each arm; see ``ArmController.targets``."""
        each = (np.split(values, len(self.each)) for values in (action_A, qpos_J))
        joints, fingers = zip(*map(ArmController.targets, self.each, *each, fingers_m.tolist()), strict=True)
        return np.concatenate(joints), np.array(fingers)
