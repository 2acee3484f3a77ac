"""The control loop: one episode of a bundle's policy on a robot, tick by tick.

    tick            clock ──► observation ──► safety ──► robot            rate_hz, a multiple of the control rate
    control step    schedule ──► action ──► controller ──► targets        1 / control_dt_s
    inference       inputs ──► planner, in a thread of its own ──► schedule

Deadlines are absolute, so errors do not add up; where the robot waits for a chunk, they wait too. In real-time chunking
a chunk that arrives between two ticks takes effect at once. A tick that begins after the next one should have begun is
a missed deadline; the ticks in between are dropped, and the robot keeps its last targets meanwhile. It also keeps them
while a measurement is old, not finite, or far outside of what training saw. If the first one is outside, its unit or
order is wrong, and the episode does not begin. A robot that does not answer for a second ends it
(embodied.deployment.control.watchdog).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.deployment.bundle.format import Bundle
from embodied.deployment.bundle.runner import InputSpec
from embodied.deployment.control.chunks import Chunks, StepStart
from embodied.deployment.control.controller import ArmController
from embodied.deployment.control.inference import Clock, Inference
from embodied.deployment.control.observation import OutOfRange, StateBuilder, Unusable
from embodied.deployment.control.safety import Safety
from embodied.deployment.control.schedule import DelayEstimate, Schedule
from embodied.deployment.control.watchdog import Watchdog
from embodied.deployment.report.record import EpisodeRecord, Step
from embodied.deployment.robots.base import GRIPPER, Observation, Robot, age, joint_names

Array = NDArray[np.float64]
MAX_TICKS_PER_STEP = 1000
SENT_TOLERANCE = 1e-3
"""Largest difference (rad, m) of a target from what the robot says that it sent on."""


class ControlLoop:
    """Drive a robot by a policy. UserError for a rate that does not fit the policy's.

    rate_hz: ticks per second, a whole multiple of the control rate. interpolation: ``hold`` sends the targets of a
    control step in all its ticks, as training does; ``linear`` moves to them over the control step. confirm: asked
    before every action; False ends the episode. stop: asked in every tick; True ends it, and the robot holds its
    measured position.
    """

    def __init__(
        self,
        bundle: Bundle,
        robot: Robot,
        inference: Inference,
        safety: Safety,
        clock: Clock,
        *,
        schedule: str = "synchronous",
        execute: int | None = None,
        rate_hz: float | None = None,
        interpolation: str = "hold",
        noise: str = "zero",
        confirm: Callable[[str], bool] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.ticks_per_step = ticks_per_step(bundle, rate_hz)
        if interpolation not in ("hold", "linear"):
            raise UserError(f"interpolation: got '{interpolation}', allowed: hold, linear")
        self.bundle, self.robot, self.inference, self.safety, self.clock = bundle, robot, inference, safety, clock
        self.period_s = bundle.control_dt_s / self.ticks_per_step
        self.interpolation, self.noise, self.confirm, self.stop = interpolation, noise, confirm, stop
        self.schedule_kind, self.execute = schedule, bundle.execute if execute is None else execute
        self.controller, self.builder = ArmController(bundle.arm, bundle.action), StateBuilder(bundle)
        self.inputs, self.delay = InputSpec(bundle), DelayEstimate(bundle.control_dt_s)
        self.record = EpisodeRecord()
        """Record of the last episode."""
        self.episodes, self.joints = 0, joint_names(bundle.arm)

    def run(self, instruction: str | None = None, seed: int = 0, steps: int | None = None) -> EpisodeRecord:
        """Run one episode of at most ``steps`` control steps (None: as in training); return what happened.

        seed: of the noise, if it is ``seeded``. If the robot or the planner fails, or somebody interrupts, the error is
        raised again; ``record`` then has what happened until then, and the reason. The first reason counts: that of a
        person who stopped a robot stays, whatever the robot does then.
        """
        self.episodes += 1
        episode = Episode(self, self.bundle.instruction_index(instruction) if self.bundle.instructions else 0, seed)
        self.record = episode.record
        try:
            episode.run(self.bundle.max_episode_steps if steps is None else steps)
        except Exception as error:  # of a driver or a bug: the record says why it ended
            if self.record.reason != "stopped":
                self.record.reason = str(error) or type(error).__name__
            raise
        except KeyboardInterrupt:
            self.record.reason = "interrupted"
            raise
        finally:
            episode.finish()
        return episode.record


def ticks_per_step(bundle: Bundle, rate_hz: float | None) -> int:
    """Return the commands per control step at a rate; None is the policy's. UserError if it is no whole number."""
    control_hz = 1.0 / bundle.control_dt_s
    rate = control_hz if rate_hz is None else rate_hz
    ticks = round(rate / control_hz)
    if ticks < 1 or abs(ticks * control_hz - rate) > 1e-6 * rate:
        raise UserError(f"rate_hz: got {rate:g}, allowed: whole multiples of the policy's {control_hz:g}")
    if ticks > MAX_TICKS_PER_STEP:
        raise UserError(f"rate_hz: got {rate:g}, allowed: at most {MAX_TICKS_PER_STEP * control_hz:g}")
    return ticks


class Episode:
    """State of one episode of a ``ControlLoop``."""

    def __init__(self, loop: ControlLoop, instruction: int, seed: int) -> None:
        bundle = loop.bundle
        self.loop, self.bundle = loop, bundle
        texts = bundle.instructions
        self.record = EpisodeRecord(instruction=texts[instruction].text if texts else "")
        self.schedule = Schedule(
            loop.schedule_kind, bundle.horizon, loop.execute, bundle.action_dim, bundle.control_dt_s, bundle.max_delay,
            delay=loop.delay,
        )  # fmt: skip
        self.chunks = Chunks(bundle, loop.inference, self.schedule, instruction, loop.noise, seed)
        self.start: StepStart | None = None  # of the present control step
        self.finger_m = bundle.arm.gripper.open_m
        self.step, self.phase = 0, 0  # control step, and tick within it
        self.first_latency = len(loop.inference.latencies_s)
        self.safety_counts = dict(loop.safety.counts)
        self.watchdog = Watchdog(loop.clock, loop.safety, loop.period_s)
        observation = self._observe()
        self.began_s = loop.clock.now()
        qpos = loop.builder.qpos(observation)
        during = f"episode {loop.episodes}"
        loop.safety.start(qpos, self.finger_m, self.began_s, during, age(observation, self.began_s))
        self.goal = self.previous = loop.safety.hold()[0]

    def run(self, steps: int) -> None:
        """Run ticks until ``steps`` control steps are done, or somebody stops the episode."""
        loop, record, tick = self.loop, self.record, 0
        record.reason = "time limit"
        while self.step < steps:
            due_s = self.began_s + self.chunks.waited_s + tick * loop.period_s
            self._pass_time(due_s)
            late_s = loop.clock.now() - due_s
            if late_s >= loop.period_s:
                dropped = int(late_s / loop.period_s)
                record.missed_deadlines += dropped
                loop.safety.missed(late_s, loop.clock.now())
                tick += dropped
            if loop.stop is not None and loop.stop():
                record.reason = "stopped"
                self._halt()
                return
            if not self._tick(due_s):
                record.reason = "refused"
                return
            record.ticks += 1
            tick += 1

    def finish(self) -> None:
        """Complete the record."""
        loop, record = self.loop, self.record
        record.duration_s = loop.clock.now() - self.began_s
        record.latencies_s = loop.inference.latencies_s[self.first_latency :]
        counts = {kind: count - self.safety_counts.get(kind, 0) for kind, count in loop.safety.counts.items()}
        record.interventions = {kind: count for kind, count in counts.items() if count}
        record.padded_steps, record.beyond_max_delay = self.schedule.padded, self.schedule.beyond_max_delay
        loop.inference.drop()  # waits, so it comes last

    def _tick(self, due_s: float) -> bool:
        """Observe, choose targets and send them; False if a person refused the action."""
        loop, record = self.loop, self.record
        observation = self._observe()
        now_s = loop.clock.now()
        action: NDArray[np.float32] | None = None
        try:
            loop.safety.limits.check_age(age(observation, now_s))
            qpos, qvel = loop.builder.qpos(observation), loop.builder.qvel(observation)
            state = loop.builder.state(observation, self.finger_m) if self.phase == 0 else None
            if state is not None:
                loop.inputs.check_range(state[None])
        except Unusable as error:
            if isinstance(error, OutOfRange) and not record.steps:
                raise
            record.waited_ticks += 1
            self._command(*loop.safety.hold_blind(error, now_s), now_s)
            return True
        if state is not None:
            self.start = StepStart(self.step, now_s, observation, state, qpos, self.finger_m)
            action = self.chunks.action(self.start, due_s + 0.9 * loop.period_s)
            if action is None:
                record.waited_ticks += 1
                self._send(*loop.safety.hold(), qpos, qvel, now_s, observation)
                return True
            if loop.confirm is not None:
                if not loop.confirm(self._in_words(action)):
                    return False
                self.watchdog.restart()
            self.previous = self.goal
            self.goal, self.finger_m = loop.controller.targets(action, qpos, self.finger_m)
        self.phase += 1
        sent = self._send(self._targets(), self.finger_m, qpos, qvel, now_s, observation)
        if action is None:
            record.steps[-1].target = sent
        else:
            assert state is not None
            images = {camera.name: np.array(observation[camera.name]) for camera in self.bundle.cameras}
            record.steps.append(Step(now_s - self.began_s, state, images, np.asarray(action, np.float32), qpos, sent))
        if self.phase == loop.ticks_per_step:
            self.phase, self.step = 0, self.step + 1
        return True

    def _observe(self) -> Observation:
        """Return the newest measurements. RobotHangs if they took too long."""
        observation = self.loop.robot.get_observation()
        self.watchdog.answered("get_observation")
        return observation

    def _halt(self) -> None:
        """Command the measured position, where the robot stays, or its last targets if it is not known."""
        loop = self.loop
        loop.safety.report("stopped", "a person stopped the robot", loop.clock.now())
        observation = loop.robot.get_observation()
        now_s = loop.clock.now()
        try:
            loop.safety.limits.check_age(age(observation, now_s))
            qpos, qvel = loop.builder.qpos(observation), loop.builder.qvel(observation)
        except Unusable:
            self._command(*loop.safety.hold(), now_s)
            return
        self._send(qpos, loop.safety.hold()[1], qpos, qvel, now_s, observation)

    def _pass_time(self, due_s: float) -> None:
        """Let time pass until ``due_s``. A chunk that arrives meanwhile commands the rest of the control step.

        Not while the robot waits or is blind, and not where a person confirms every action.
        """
        loop, schedule = self.loop, self.schedule
        acting = schedule.pending and not schedule.waits and not loop.safety.blind and loop.confirm is None
        if acting and self.chunks.arrive(due_s - loop.clock.now()) and loop.clock.now() < due_s - 1e-9:
            self._revise()
        loop.clock.sleep_until(due_s)

    def _revise(self) -> None:
        """Command the rest of the present control step by the chunk that has just arrived.

        In the first half of the step the chunk counts as if it had been there at the beginning: the record has its
        action, and if the next chunk is due, it is planned at once.
        """
        loop, start = self.loop, self.start
        assert start is not None
        action = self.schedule.action(start.step)
        self.goal, self.finger_m = loop.controller.targets(action, start.qpos, start.finger_m)
        observation, now_s = self._observe(), loop.clock.now()
        with suppress(Unusable):  # the next tick holds the robot
            qpos, qvel = loop.builder.qpos(observation), loop.builder.qvel(observation)
            sent = self._send(self._targets(), self.finger_m, qpos, qvel, now_s, observation)
            self.record.steps[-1].target = sent
        if now_s - start.time_s < self.bundle.control_dt_s / 2:
            self.record.steps[-1].action = np.asarray(action, np.float32)
            self.chunks.request(start)

    def _targets(self) -> Array:
        """Return the targets of the last tick that began."""
        ticks = self.loop.ticks_per_step
        share = (self.phase or ticks) / ticks if self.loop.interpolation == "linear" else 1.0
        return self.previous + share * (self.goal - self.previous)

    def _send(
        self, targets: Array, finger_m: float, qpos: Array, qvel: Array, now_s: float, observation: Observation
    ) -> Array:
        """Send targets through the safety; return those that the robot sent on."""
        loop = self.loop
        safe, finger = loop.safety.filter(targets, finger_m, qpos, qvel, now_s, age(observation, now_s))
        return self._command(safe, finger, now_s)

    def _command(self, safe: Array, finger_m: float, now_s: float) -> Array:
        """Command targets that have left the safety; return those that the robot sent on."""
        loop = self.loop
        returned = loop.robot.send_action({**dict(zip(loop.joints, map(float, safe), strict=True)), GRIPPER: finger_m})
        self.watchdog.answered("send_action")
        sent = np.array([float(returned[name]) for name in loop.joints])
        i = int(np.argmax(np.abs(sent - safe)))
        if abs(sent[i] - safe[i]) > SENT_TOLERANCE:
            loop.safety.report("robot", f"it sent {loop.joints[i]} {sent[i]:.4f} in place of {safe[i]:.4f}", now_s)
        return sent

    def _in_words(self, action: NDArray[np.float32]) -> str:
        """Return an action with the names and units of its entries."""
        parts = zip(self.bundle.action, action.tolist(), strict=True)
        return ", ".join(f"{term.name} {value:+.4f} {term.unit}" for term, value in parts)
