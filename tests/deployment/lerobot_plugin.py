"""Drive a simulated arm as LeRobot's commands drive a robot, in LeRobot's environment: ``python lerobot_plugin.py``.

``lerobot.processor`` needs torchvision, which has no build for a CPU; the base class takes two type names from it.
"""

from __future__ import annotations

import json
import sys
import time
import types

processor = types.ModuleType("lerobot.processor")
processor.RobotAction = processor.RobotObservation = dict  # type: ignore[attr-defined]
sys.modules["lerobot.processor"] = processor

import draccus  # type: ignore[import-not-found]  # noqa: E402
from lerobot.robots import Robot, RobotConfig, make_robot_from_config  # type: ignore[import-not-found]  # noqa: E402
from lerobot.utils.import_utils import register_third_party_plugins  # type: ignore[import-not-found]  # noqa: E402


def made(**options: object) -> Robot:
    """Return a robot from the options ``--robot.<option>`` of LeRobot's commands."""
    return make_robot_from_config(draccus.decode(RobotConfig, {"type": "embodied", **options}))


def numbers(observation: dict[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in observation.items() if name.endswith(".pos")}


def driven(robot: Robot) -> dict[str, object]:
    """Turn the arm and open the gripper, wait for the next episode, and return what was seen."""
    with robot:
        first = robot.get_observation()
        wanted = numbers(first) | {"shoulder_pan.pos": 20.0, "gripper.pos": 40.0}
        for _ in range(30):
            robot.get_observation()
            sent = robot.send_action(wanted)
            time.sleep(1 / 30)
        moved = robot.get_observation()
        time.sleep(robot.config.new_episode_after_s + 0.1)
        again = robot.get_observation()
    return {
        "features": {name: str(kind) for name, kind in robot.observation_features.items()},
        "image": [str(moved["front"].dtype), *moved["front"].shape, float(moved["front"].std())],
        "first": numbers(first), "sent": sent == wanted, "moved": numbers(moved), "again": numbers(again),
        "connected": robot.is_connected, "calibrated": robot.is_calibrated, "type": robot.config.type,
    }  # fmt: skip


def main() -> None:
    register_third_party_plugins()
    common = {"seed": 3, "new_episode_after_s": 0.5}
    seen = driven(made(**common, cameras=["front"], width=32, height=24))
    share = made(**common, use_degrees=False)
    with share:
        seen["share"] = numbers(share.get_observation())
    both = made(**common, task="lift_bar")
    with both:
        seen["both"] = numbers(both.get_observation())
        seen["sent_both"] = both.send_action(seen["both"])
    try:
        made(robot="so10")
    except ValueError as error:
        seen["error"] = str(error)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
