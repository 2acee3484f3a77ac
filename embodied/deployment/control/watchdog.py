"""Detect that a robot did not answer: its driver hung, or this computer slept. Standard library alone."""

from __future__ import annotations

from embodied.deployment.control.inference import Clock
from embodied.deployment.control.safety import Safety

HANGS_S = 1.0
"""Longest time between two answers of the robot, beyond the period of the loop."""


class RobotHangs(ConnectionError):
    """The robot did not answer for too long. A person next to an arm that stood still does not expect it to move."""


class Watchdog:
    """Measure the time between the answers of a robot.

    period_s: time that passes between two answers of a robot that answers at once.
    """

    def __init__(self, clock: Clock, safety: Safety, period_s: float) -> None:
        self.clock, self.safety, self.longest_s = clock, safety, HANGS_S + period_s
        self.restart()

    def restart(self) -> None:
        """Forget the time that has passed, as after a question to a person."""
        self._answered_s = self.clock.now()

    def answered(self, call: str) -> None:
        """Note that the robot has answered ``call``. RobotHangs, and an intervention, if it took too long."""
        before_s = self._answered_s
        self.restart()
        if self._answered_s - before_s > self.longest_s:
            detail = f"the robot did not answer for {self._answered_s - before_s:.1f} s ({call})"
            self.safety.report("hung", detail, self._answered_s)
            raise RobotHangs(detail)
