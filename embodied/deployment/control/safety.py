"""Limits on what leaves for a robot. No target reaches a robot except through ``Safety.filter``.

    not finite, out of range, old or missing observation, or one that jumps ─► hold the last targets
    emergency key                          ─► hold the measured position
    far ahead of the measured position     ─► nearer: within max_lead, less while ramping in
    beyond joint limits                    ─► at the limit
    tool outside of the workspace          ─► hold

A position controller with gains kp and kd that is commanded a distance ahead of the measured position approaches
the speed distance * kp / kd. So ``max_lead = max_velocity * kd / kp`` keeps the joints below their largest speed.
Targets that add to the last ones lead further: they bear the arm's weight, and move on while the joints accelerate.
Limits come from the bundle. Options can only tighten them, and nothing from a network reaches this file.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodied.core.arm import Array, Chain
from embodied.core.errors import UserError
from embodied.core.spec import Arms, joints_of
from embodied.deployment.control.inference import Clock
from embodied.deployment.robots.base import Unusable

LOG = logging.getLogger("embodied.deployment")
LOGGED = 100_000  # interventions that are kept; the counts go on
MARGIN_M = 0.03  # how far outside of the box of training the tool's target may be: its position lags and swings
RAMP_START = 0.1  # share of max_lead at the beginning
LEADS, LEADS_START = 2.0, 0.3  # of targets that add to the last ones: factor of max_lead, and RAMP_START
MAX_AGE_S = 0.2  # of an observation; an older one is stale
FUTURE_S = 0.02  # how far ahead of this computer's clock a time stamp may be
BLIND_S = 1.0  # longest time without an observation that can be used
FROZEN_S = 1.0  # longest time in which joints do not change although their targets are this far away, rad or m:
FROZEN_LEAD, FROZEN_LEADS = 0.03, 0.15  # the latter for targets that add to the last ones; half of max_lead if less
JUMP, JUMP_SLACK = 2.0, 0.05  # farthest that joints move between two measurements, at so many times their largest speed
HANGS_S = 1.0  # longest time between two answers of the robot, beyond the period of the loop


@dataclass(frozen=True)
class Limits:
    """Limits of one arm, or of two of a kind. Arrays by joint have all joints."""

    low_J: Array
    high_J: Array
    """Lowest and highest position target."""
    max_lead_J: Array
    """Largest distance of a target from the measured position."""
    max_velocity_J: Array
    """Largest measured speed; above it the robot is told to hold."""
    workspace_low_m: Array
    workspace_high_m: Array
    """Corners of the box for the tool of each arm, base frame, [arms, 3]."""
    finger_low_m: float
    finger_high_m: float
    """Lowest and highest finger target; below 0 squeezes."""
    ramp_s: float = 0.5
    """Seconds in which ``max_lead`` grows to its full value."""
    ramp_start: float = RAMP_START
    """Share of ``max_lead`` at the beginning."""

    @classmethod
    def of(cls, arms: Arms, speed: float = 1.0) -> Limits:
        """Return the limits of the arms. UserError for a ``speed``, share of the largest speed and lead, above 1."""
        if not 0 < speed <= 1:
            raise UserError(f"speed: got {speed}, allowed: above 0 and at most 1; limits can only be tightened")
        low, high, velocity, kd, kp = (
            np.array([getattr(joint, name) for joint in joints_of(arms).values()])
            for name in ("low", "high", "max_velocity", "damping", "stiffness")
        )
        boxes = [(arm.workspace_low_m, arm.workspace_high_m) for arm in arms.values()]
        low_m, high_m = np.array(boxes).swapaxes(0, 1)
        arm = next(iter(arms.values()))
        fingers = min(arm.gripper.open_m, arm.gripper.closed_m), arm.gripper.max_position_m
        leads, start = (LEADS, LEADS_START) if arm.from_target else (1.0, RAMP_START)
        speeds, box = speed * velocity, (low_m - MARGIN_M, high_m + MARGIN_M)
        return cls(low, high, leads * speeds * (kd / kp), speeds, *box, *fingers, ramp_start=start)


def check_age(age_s: float) -> None:
    """Raise Unusable for a measurement of this age: too old, in the future, or NaN."""
    if age_s < -FUTURE_S:
        ahead = f"{-age_s:.3f} s in the future: it must be of time.monotonic()"
        raise Unusable("stale", f"the observation's time stamp is {ahead}")
    if not age_s <= MAX_AGE_S:
        raise Unusable("stale", f"the observation is {age_s:.3f} s old")


@dataclass(frozen=True, slots=True)
class Intervention:
    """One change that the safety made to a command."""

    during: str
    """``episode 1``, ``episode 2``, ... or ``the way home``."""
    time_s: float
    """When, s since then began."""
    kind: str
    """``lead``, ``position``, ``gripper``, ``workspace``, ``velocity``, ``stale``, ``not finite``, ``lacking`` (there
    is no such number or image), ``frozen`` (joints do not change), ``jump`` (they change faster than they can move),
    ``range`` (far from what training saw), ``missed``, ``hung`` (nobody answered), ``stopped`` (a person did),
    ``robot`` (it sent other targets on)."""
    detail: str


class Safety:
    """Filter targets of one episode, and log what was changed. One filter serves one robot, of one arm or two.

    What is wrong with one arm makes both hold. That two arms do not touch each other is not watched.

    speed: share of the largest speed and lead of the arm's joints. UserError if it is above 1.
    """

    def __init__(self, arms: Arms, speed: float = 1.0) -> None:
        self.limits, self.chains = Limits.of(arms, speed), [Chain(arm) for arm in arms.values()]
        self.counts: Counter[str] = Counter()  # an intervention that lasts for several commands counts once
        self.log: deque[Intervention] = deque(maxlen=LOGGED)
        joints, arm = joints_of(arms), next(iter(arms.values()))
        self._sides = [side.replace("_", " ") for side in arms]
        self._names, self._units = [*joints], ["m" if joint.kind == "slide" else "rad" for joint in joints.values()]
        self._during, self._began_s, self._now_s = "", 0.0, 0.0
        self._paused_s = 0.0  # since then, and not part of the first half second
        self._sent: tuple[Array, Array] | None = None
        self._before, self._kinds = set[str](), set[str]()  # of interventions in the command before, and in this one
        self._blind_since_s: float | None = None
        self._push_J = np.minimum(FROZEN_LEADS if arm.from_target else FROZEN_LEAD, self.limits.max_lead_J / 2)
        self._fastest_J = JUMP * np.array([joint.max_velocity for joint in joints.values()])
        self._seen_J: Array | None = None
        self._seen_s_G = np.zeros(len(arms))  # last joints that did not jump, and when those of each arm last changed
        self._pushed_s_G = np.full(len(arms), np.nan)
        """Since when the joints of each arm have not changed although their targets are far away; NaN: they have."""

    def start(self, qpos_J: Array, fingers_m: Array, now_s: float, during: str = "episode", age_s: float = 0.0) -> None:
        """Begin an episode at a pose measured ``age_s`` seconds ago, which becomes the pose to hold.

        during: name of what begins, for the log. UserError if it is not possible. A pose outside of the joint limits
        means that units, signs or offsets are wrong; an old one may be far from where the arm is.
        """
        limits = self.limits
        check_age(age_s)
        if not np.isfinite(qpos_J).all():
            raise UserError("the robot's joint positions are not finite")
        slack = 0.05 * (limits.high_J - limits.low_J)
        outside = (qpos_J < limits.low_J - slack) | (qpos_J > limits.high_J + slack)
        if outside.any():
            i = int(np.argmax(outside))
            ends = f"{limits.low_J[i]:.4g} to {limits.high_J[i]:.4g} {self._units[i]}"
            where = f"{self._names[i]} is at {qpos_J[i]:.4g}, outside of its limits {ends}"
            raise UserError(f"{where}: are these degrees, or is its sign or offset wrong?")
        self._during, self._began_s, self._paused_s, self._blind_since_s = during, now_s, 0.0, None
        self._kinds, self._seen_J = set(), None
        self._pushed_s_G[:] = np.nan
        self._commit(self._within_limits(qpos_J), self._within_stroke(fingers_m))

    @property
    def blind(self) -> bool:
        """Whether the last observation could not be used."""
        return self._blind_since_s is not None

    def hold(self) -> tuple[Array, Array]:
        """Return the last targets that left."""
        assert self._sent is not None, "start() comes first"
        return self._sent

    def check_moves(self, qpos_J: Array, now_s: float) -> None:
        """Raise Unusable for an arm whose joints measure the same, to the last digit, for FROZEN_S, far from targets.

        Unusable too for a position that a joint cannot have reached since the measurement before: a wrong number.
        """
        arms, seen_J = len(self.chains), self._seen_J
        same_G = np.full(arms, False) if seen_J is None else (qpos_J == seen_J).reshape(arms, -1).all(1)
        passed_J = np.minimum(now_s - self._seen_s_G, MAX_AGE_S).repeat(len(qpos_J) // arms)
        self._seen_s_G = np.where(same_G, self._seen_s_G, now_s)  # a robot may measure less often than it is asked
        if seen_J is not None:
            beyond_J = np.abs(qpos_J - seen_J) - self._fastest_J * passed_J - JUMP_SLACK
            if (beyond_J > 0).any():
                i = int(np.argmax(beyond_J))
                moved = f"{self._names[i]} moved by {qpos_J[i] - seen_J[i]:+.3f} {self._units[i]}"
                raise Unusable("jump", f"{moved} in {passed_J[i]:.3f} s, which it cannot")
        self._seen_J = qpos_J
        far_G = (np.abs(self.hold()[0] - qpos_J) > self._push_J).reshape(arms, -1).any(1)
        since_G = np.where(np.isnan(self._pushed_s_G), now_s, self._pushed_s_G)
        self._pushed_s_G = np.where(same_G & far_G, since_G, np.nan)
        if (now_s - self._pushed_s_G > FROZEN_S).any():
            raise Unusable("frozen", "the measured joints stay the same, to the last digit, far from their targets")

    def paused(self, passed_s: float) -> None:
        """Take no account of the time in which a person was asked, after an observation that could be used."""
        self._seen_J = self._blind_since_s = None
        self._pushed_s_G[:] = np.nan
        self._before = set()
        self._paused_s += passed_s

    def hold_blind(self, error: Unusable, now_s: float) -> tuple[Array, Array]:
        """Return the last targets for an observation that cannot be used. Unusable after BLIND_S of such ones."""
        self._now_s = now_s
        self._blind_since_s = now_s if self._blind_since_s is None else self._blind_since_s
        if now_s - self._blind_since_s > BLIND_S:
            raise Unusable(error.kind, f"{error}, for {BLIND_S:g} s")
        self.intervene(error.kind, str(error))
        return self._commit(*self.hold())

    def filter(
        self, targets_J: Array, fingers_m: Array, qpos_J: Array, qvel_J: Array, now_s: float, age_s: float = 0.0
    ) -> tuple[Array, Array]:
        """Return targets within the limits. fingers: of each arm. qpos, qvel: as measured ``age_s`` seconds ago.

        UserError after BLIND_S of measurements that are old or not finite.
        """
        self._now_s, limits = now_s, self.limits
        held, held_fingers_m = self.hold()
        wanted = np.asarray(targets_J, np.float64)
        if not (np.isfinite(wanted).all() and np.isfinite(fingers_m).all()):
            self.intervene("not finite", "the command")
            wanted, fingers_m = held, held_fingers_m
        try:
            check_age(age_s)
            if not (np.isfinite(qpos_J).all() and np.isfinite(qvel_J).all()):
                raise Unusable("not finite", "the measured joints are not finite")
        except Unusable as error:
            return self.hold_blind(error, now_s)
        self._blind_since_s = None
        if (np.abs(qvel_J) > limits.max_velocity_J).any():
            i = int(np.argmax(np.abs(qvel_J) / limits.max_velocity_J))
            self.intervene("velocity", f"{self._names[i]} moves at {qvel_J[i]:.3g} {self._units[i]}/s")
            wanted = np.where(self._of_arms(np.abs(qvel_J) > limits.max_velocity_J), qpos_J, held)
        passed = (now_s - self._began_s - self._paused_s) / limits.ramp_s if limits.ramp_s > 0 else 1.0
        ramp = min(1.0, limits.ramp_start + (1 - limits.ramp_start) * passed)
        lead = limits.max_lead_J * ramp
        near = np.clip(wanted, qpos_J - lead, qpos_J + lead)
        if ramp >= 1.0 and not np.allclose(near, wanted, atol=1e-9):
            self.intervene("lead", self._largest(wanted - near))
        inside = self._within_limits(near)
        if not np.allclose(inside, near, atol=1e-9):
            self.intervene("position", self._largest(near - inside))
        outside_m = self._outside_m(inside)
        further_m = outside_m - np.maximum(self._outside_m(self._within_limits(qpos_J)), 1e-9)
        if (further_m > 0).any():
            arm = int(np.argmax(further_m))
            self.intervene("workspace", f"the {self._sides[arm]}tool would be {1e3 * outside_m[arm]:.1f} mm outside")
            inside = self._within_limits(np.clip(held, qpos_J - lead, qpos_J + lead))
            lost_J = (self._outside_m(inside) > 0).repeat(len(inside) // len(outside_m))
            inside = np.where(lost_J, self._within_limits(qpos_J), inside)
        fingers = self._within_stroke(fingers_m)
        if (np.abs(fingers - fingers_m) > 1e-9).any():
            self.intervene("gripper", ", ".join(f"{finger_m:.4f} m" for finger_m in fingers_m))
        return self._commit(inside, fingers)

    def report(self, kind: str, detail: str, now_s: float) -> None:
        """Count and log an intervention."""
        self.counts[kind] += 1
        self.log.append(Intervention(self._during, round(now_s - self._began_s, 4), kind, detail))
        LOG.warning("safety: %s: %s", kind, detail)

    def _of_arms(self, found_J: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return for each joint whether something was found in a joint of its arm."""
        arms = len(self.chains)
        return found_J.reshape(arms, -1).any(1).repeat(len(found_J) // arms)

    def _within_limits(self, qpos_J: Array) -> Array:
        return qpos_J.clip(self.limits.low_J, self.limits.high_J)

    def _within_stroke(self, fingers_m: Array) -> Array:
        return fingers_m.clip(self.limits.finger_low_m, self.limits.finger_high_m)

    def _outside_m(self, qpos_J: Array) -> Array:
        """Return how far each tool is outside of its workspace at joint positions [J], m, [arms]; 0 inside."""
        each = zip(self.chains, np.split(qpos_J, len(self.chains)), strict=True)
        tools = np.stack([chain.tool(qpos)[0] for chain, qpos in each])
        limits = self.limits
        beyond: Array = np.maximum(limits.workspace_low_m - tools, tools - limits.workspace_high_m).clip(0).max(1)
        return beyond

    def _largest(self, excess_J: Array) -> str:
        i = int(np.argmax(np.abs(excess_J)))
        return f"{self._names[i]} by {excess_J[i]:+.4f} {self._units[i]}"

    def intervene(self, kind: str, detail: str) -> None:
        """Report an intervention in this command, unless it goes on from the command before."""
        self._kinds.add(kind)
        if kind not in self._before:
            self.report(kind, detail, self._now_s)

    def _commit(self, targets_J: Array, fingers_m: Array) -> tuple[Array, Array]:
        """Let targets leave for the robot."""
        self._before, self._kinds = self._kinds, set()
        self._sent = targets_J, fingers_m
        return self._sent


class RobotHangs(ConnectionError):
    """The robot did not answer for too long. A person next to an arm that stood still does not expect it to move."""


class Watchdog:
    """Measure the time between answers of a robot, ``period_s`` apart: its driver may hang, or this computer sleep."""

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
