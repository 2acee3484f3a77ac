"""Drive a robot on LeRobot's own base class, in LeRobot's environment: ``python lerobot_arm.py <bundle> <mapping>``.

``lerobot.processor`` needs torchvision, which has no build for a CPU; the base class takes two type names from it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import types
from pathlib import Path

import toy_arm  # beside this file

processor = types.ModuleType("lerobot.processor")
processor.RobotAction = processor.RobotObservation = dict  # type: ignore[attr-defined]
sys.modules["lerobot.processor"] = processor

from lerobot.robots.config import RobotConfig  # type: ignore[import-not-found]  # noqa: E402
from lerobot.robots.robot import Robot  # type: ignore[import-not-found]  # noqa: E402

from embodied.deployment.bundle.runner import PolicyRunner  # noqa: E402
from embodied.deployment.control.inference import Clock, Inference  # noqa: E402
from embodied.deployment.control.loop import ControlLoop  # noqa: E402
from embodied.deployment.control.safety import Safety  # noqa: E402
from embodied.deployment.robots.mapping import MappedRobot, read_mapping  # noqa: E402
from embodied.deployment.robots.setup import check_confirmed  # noqa: E402


@RobotConfig.register_subclass("toy_arm")
class Config(toy_arm.ToyConfig, RobotConfig): ...


class Arm(toy_arm.ToyArm, Robot):
    config_class = Config

    def __init__(self, config: Config) -> None:
        Robot.__init__(self, config)
        toy_arm.ToyArm.__init__(self, config)


def main(bundle: Path, mapping_file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arm = Arm(Config(id="a", calibration_dir=Path(folder)))
        mapping = read_mapping(mapping_file)
        runner, clock = PolicyRunner(bundle), Clock()
        robot = MappedRobot(arm, mapping, runner.bundle.arms)
        check_confirmed(robot)
        arm.connect()
        inference = Inference(runner, clock)
        loop = ControlLoop(runner.bundle, robot, inference, Safety(runner.bundle.arms), schedule="rtc")
        record = loop.run(steps=20)
        inference.close()
        arm.disconnect()
        result = {
            "steps": len(record.steps),
            "sent": len(arm.sent),
            "names": sorted(arm.sent[-1]),
            "torch": "torch" in sys.modules,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
