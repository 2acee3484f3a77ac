"""A small arm in LeRobot's shape, in degrees, with names, signs and offsets of its own."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

NAMES = ["base", "shoulder", "arm_roll", "elbow", "forearm_roll", "wrist", "flange"]
SIGNS = [1, -1, 1, 1, -1, 1, 1]
OFFSETS_DEG = [0.0, 10.0, 0.0, -90.0, 0.0, 0.0, 45.0]
HOME_DEG = [0.0, 22.5, 0.0, -112.5, 0.0, 135.0, 45.0]
"""The default pose of the policy's arm in degrees, in its own counting."""


@dataclass(kw_only=True)
class ToyConfig:
    """Options of the arm."""

    id: str | None = None
    calibration_dir: Any = None
    fails_after: int = 0
    """Observations after which the connection breaks; 0: never."""
    fault: str = "unplugged"
    """How it breaks: ``unplugged``, ``io`` (its port fails), ``bug`` (of the driver), ``stale`` (old numbers), ``send``
    (it can only be observed), ``hang`` (it answers ``hang_s`` later), ``gone`` (it answers, but is not connected),
    ``frozen`` (always the same numbers), ``lacks``, ``array`` and ``none`` (of a number, or of all), or ``mute``
    (commands are not answered)."""
    hang_s: float = 2.0
    """How long it hangs."""
    stamp: str = ""
    """Time stamp of its numbers: none, ``fresh``, ``old``, ``future``, ``nan`` or ``wall`` (another clock)."""
    disconnect_fails: bool = False
    """Whether the connection cannot be closed."""
    pose_deg: list[float] = field(default_factory=lambda: [*HOME_DEG])
    """Where it is, in the policy's counting."""
    gripper: float = 100.0
    """What the gripper reads, open: percent or m."""
    follow: float = 10.0
    """Share of the way to its targets that it moves per second."""
    journal: str | None = None
    """File for all commands, JSON lines."""


class ToyArm:
    """The arm. Positions are in degrees, the gripper from 0 (closed) to 100 (open)."""

    config_class = ToyConfig
    name = "toy_arm"

    def __init__(self, config: ToyConfig) -> None:
        self.config = config
        self._open = False
        self.observations = 0
        self.sent: list[dict[str, float]] = []
        home = zip(NAMES, SIGNS, OFFSETS_DEG, config.pose_deg, strict=True)
        self._now = {f"{name}.pos": (at - offset) / sign for name, sign, offset, at in home}
        self._now["gripper.pos"] = config.gripper
        self._target = dict(self._now)
        self._at_s = time.monotonic()

    @property
    def observation_features(self) -> dict[str, Any]:
        return dict.fromkeys([*reversed(self._now), "cube_x", "goal[0]", "goal[1]", "goal[2]"], float)

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(self._now, float)

    @property
    def is_connected(self) -> bool:
        return self._open

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        self._open = True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        self.observations += 1
        if self.config.fails_after and self.observations > self.config.fails_after:
            if self.config.fault == "stale":
                return self._observed() | {"timestamp": time.monotonic() - 3.0}
            wrong = {"lacks": {"elbow.pos": None}, "array": {"elbow.pos": [1.0, 2.0]}}
            if self.config.fault in ("send", "mute", "frozen", *wrong):
                return self._observed() | wrong.get(self.config.fault, {})
            if self.config.fault == "none":
                return None  # type: ignore[return-value]
            if self.config.fault == "gone":
                self._open = False
                return self._observed()
            if self.config.fault == "hang":
                self.config.fails_after = 0
                time.sleep(self.config.hang_s)
                return self._observed()
            self._open = self.config.fault != "unplugged"
            raise {"io": OSError("the port of the toy arm failed"), "bug": KeyError("joint9")}.get(
                self.config.fault, ConnectionError("the toy arm was unplugged")
            )
        passed_s, self._at_s = time.monotonic() - self._at_s, time.monotonic()
        for name, target in self._target.items():
            self._now[name] += (target - self._now[name]) * min(1.0, self.config.follow * passed_s)
        return self._observed()

    def _observed(self) -> dict[str, Any]:
        now_s = time.monotonic()
        stamps = {"fresh": now_s, "old": now_s - 1.0, "future": now_s + 1.0, "nan": float("nan"), "wall": time.time()}
        stamp = {"timestamp": stamps[self.config.stamp]} if self.config.stamp else {}
        measured = dict(reversed(self._now.items())) | stamp
        return measured | {"cube_x": 1.0, "goal[0]": 0.5, "goal[1]": 0.1, "goal[2]": 0.3}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        if self.config.fault == "send" and self.observations > self.config.fails_after > 0:
            raise OSError("the toy arm takes no command")
        self._target = {name: float(action[name]) for name in self._now}
        self.sent.append(self._target)
        if self.config.journal is not None:
            with open(self.config.journal, "a") as file:
                file.write(json.dumps(self._target) + "\n")
        muted = self.config.fault == "mute" and self.observations > self.config.fails_after
        return None if muted else dict(self._target)  # type: ignore[return-value]

    def disconnect(self) -> None:
        self._open = False
        if self.config.disconnect_fails:
            raise OSError("the toy arm cannot be disconnected")
