"""The control loop: one episode of a bundle's policy on a robot.

    every tick            get_observation ──► plan ──► apply_action          rate_hz, a multiple of the control rate
    every control step    plan: schedule ──► action ──► controller ──► targets               1 / control_dt_s
    in a thread           inputs ──► planner ──► schedule

Deadlines are absolute; time spent waiting for a chunk shifts all later ones. Ticks that begin too late are dropped. The
robot holds its last targets after a missed tick, and while a measurement is old, not finite, or far outside of what
training saw. If the first measurement is outside, its unit or order is wrong, and the episode does not begin.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.runner import InputSpec
from embodied.deployment.control.arm import Controller, Measurement, StateBuilder
from embodied.deployment.control.inference import Inference
from embodied.deployment.control.safety import Safety, Watchdog, check_age
from embodied.deployment.control.schedule import PlanRequest, Schedule, ticks_per_step
from embodied.deployment.report import EpisodeRecord, Step
from embodied.deployment.robots.base import Robot, Unusable, action_names, age

Array = NDArray[np.float64]
PATIENCE = 0.9  # share of its period that a tick may wait for its chunk
SENT_TOLERANCE = 1e-3  # largest difference (rad, m) of a target from what the robot says that it sent on,
SENT_STROKE = 0.01  # and of a finger's, as a share of its stroke


class ControlLoop:
    """Drive a robot by a policy, on the clock of ``inference``. UserError for a rate that does not fit the policy's.

    rate_hz: ticks per second, a whole multiple of the control rate. interpolation: ``hold`` sends the targets of a
    control step in all its ticks, as training does; ``linear`` moves to them over the control step. confirm: asked
    before every action; False ends the episode. stop: asked in every tick; True ends it, and the robot holds its
    measured position.
    """

    def __init__(
        self, bundle: Bundle, robot: Robot, inference: Inference, safety: Safety, *,
        schedule: str = "synchronous", execute: int | None = None, rate_hz: float | None = None,
        interpolation: Literal["hold", "linear"] = "hold", noise: str = "zero",
        confirm: Callable[[str], bool] | None = None, stop: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        self.ticks_per_step = ticks_per_step(bundle, rate_hz)
        self.bundle, self.robot, self.inference, self.safety = bundle, robot, inference, safety
        self.period_s = bundle.control_dt_s / self.ticks_per_step
        self.interpolation, self.noise, self.confirm, self.stop = interpolation, noise, confirm, stop
        self.schedule = Schedule(
            schedule, bundle.horizon, bundle.execute if execute is None else execute, bundle.action_dim,
            bundle.control_dt_s, bundle.max_delay,
        )  # fmt: skip
        self.controller, self.builder = Controller(bundle.arms, bundle.action), StateBuilder(bundle)
        self.inputs, self.record = InputSpec(bundle), EpisodeRecord()
        """Record of the last episode."""
        self.episodes, self.commanded = 0, action_names(bundle.arms)
        stroke = safety.limits.finger_high_m - safety.limits.finger_low_m
        grippers = len(bundle.arms)
        self.tolerances = np.repeat([SENT_TOLERANCE, SENT_STROKE * stroke], [len(self.commanded) - grippers, grippers])

    def run(self, instruction: str | None = None, seed: int = 0, steps: int | None = None) -> EpisodeRecord:
        """Run one episode of at most ``steps`` control steps (None: as in training); return what happened.

        seed: of the noise, if it is ``seeded``. If the robot or the planner fails, or somebody interrupts, the error is
        raised again; ``record`` then has what happened until then, and the reason. A later error never
        replaces the reason of a person who stopped the robot.
        """
        self.episodes += 1
        self.inference.drop()  # a plan of the episode before, which may be under way
        episode = EpisodeRun(self, self.bundle.instruction_index(instruction) if self.bundle.instructions else 0, seed)
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


@dataclass(frozen=True, slots=True)
class StepStart:
    """Measurements at the start of a control step, from which its action is planned."""

    step: int
    measured: Measurement
    state: NDArray[np.float32]
    images: dict[str, NDArray[np.uint8]]
    """What the robot measured, and what the policy sees of it: [S], and [height, width, 3] by camera."""
    fingers_m: Array
    target_J: Array
    """Finger target of each arm and joint targets of the step before."""


class EpisodeRun:
    """One episode of a ``ControlLoop`` under way."""

    def __init__(self, loop: ControlLoop, instruction: int, seed: int) -> None:
        bundle, texts = loop.bundle, loop.bundle.instructions
        self.loop, self.safety, self.clock = loop, loop.safety, loop.inference.clock
        self.record = EpisodeRecord(instruction=texts[instruction].text if texts else "")
        self.schedule = loop.schedule
        self.schedule.restart()
        self.instruction, self.random = instruction, np.random.Generator(np.random.Philox(key=seed))
        self.waited_s = 0.0  # by which control steps began later because the robot waited for a chunk, or for a person
        self.start: StepStart | None = None  # of the present control step
        self.fingers_m = np.full(len(bundle.arms), bundle.arm.gripper.open_m)
        self.step, self.phase = 0, 0  # control step, and tick within it
        self.first_latency = len(loop.inference.latencies_s)
        self.interventions_before = self.safety.counts.copy()
        self.watchdog = Watchdog(self.clock, self.safety, loop.period_s)
        measured = self._observe()
        self.began_s = measured.time_s
        during = f"episode {loop.episodes}"
        self.safety.start(measured.qpos, self.fingers_m, self.began_s, during, measured.age_s)
        self.goal = self.previous = self.safety.hold()[0]  # targets at the end of this control step, and before it

    def run(self, steps: int) -> None:
        """Run ticks until ``steps`` control steps have passed, or somebody stops the episode."""
        loop, record, tick = self.loop, self.record, 0
        record.reason = "time limit"
        while self.step < steps:
            due_s = self.began_s + self.waited_s + tick * loop.period_s
            self._pass_time(due_s)
            late_s = self.clock.now() - due_s
            if late_s >= loop.period_s:
                self.safety.report("missed", f"{late_s * 1e3:.0f} ms late", self.clock.now())
                missed = int(late_s / loop.period_s)
                record.missed_deadlines += missed
                tick += missed
            if loop.stop is not None and loop.stop():
                record.reason = "stopped"
                self._halt()
                return
            if not self._tick(due_s + PATIENCE * loop.period_s):
                record.reason = "refused"
                return
            record.ticks += 1
            tick += 1
        self.clock.sleep_until(self.began_s + self.waited_s + tick * loop.period_s)

    def finish(self) -> None:
        loop, record = self.loop, self.record
        record.duration_s = self.clock.now() - self.began_s
        record.latencies_s = loop.inference.latencies_s[self.first_latency :]
        record.interventions = dict(self.safety.counts - self.interventions_before)
        record.padded_steps, record.beyond_max_delay = len(self.schedule.padded), self.schedule.beyond_max_delay

    def _tick(self, until_s: float) -> bool:
        """Observe, plan and command, with a chunk or without by ``until_s``. False if a person refused the action."""
        loop, record, start, action = self.loop, self.record, None, None
        try:
            measured = self._observe()
            self.safety.check_moves(measured.qpos, measured.time_s)
            if self.phase == 0:
                target_J = self.safety.hold()[0]
                images = loop.builder.images(measured.observation)
                state = loop.builder.state(measured.observation, self.fingers_m, target_J)
                loop.inputs.check_range(state[None])
                start = StepStart(self.step, measured, state, images, self.fingers_m, target_J)
        except Unusable as error:
            if error.kind in ("range", "lacking") and not record.steps:
                raise
            self._wait(error)
            return True
        if start is not None:
            self.start = start
            action = self._action(start, until_s)
            if action is None:
                record.waited_ticks += 1
                self._apply(*self.safety.hold(), measured)
                return True
            if loop.confirm is not None:
                asked_s, parts = self.clock.now(), zip(loop.bundle.action, action.tolist(), strict=True)
                allowed = loop.confirm(", ".join(f"{term.name} {value:+.4f} {term.unit}" for term, value in parts))
                passed_s = self.clock.now() - asked_s
                self.watchdog.restart()
                self.safety.paused(passed_s)
                self.waited_s += passed_s
                if not allowed:
                    return False
                try:  # the arm may be elsewhere by now
                    measured = self._observe()
                except Unusable as error:
                    self._wait(error)
                    return True
                self.start = start = replace(start, measured=measured)
            self.previous = self.goal
            self._aim(action, start)
        self.phase += 1
        target = self._apply(self._targets(), self.fingers_m, measured)
        if start is not None and action is not None:
            began_s = measured.time_s - self.began_s
            record.steps.append(Step(began_s, start.state, start.images, action, measured.qpos, target))
        record.steps[-1].target = target
        if self.phase == loop.ticks_per_step:
            self.phase, self.step = 0, self.step + 1
        return True

    def _wait(self, error: Unusable) -> None:
        """Hold the last targets for a tick, because of a measurement that cannot be used."""
        self.record.waited_ticks += 1
        self._send(*self.safety.hold_blind(error, self.clock.now()))

    def _action(self, start: StepStart, until_s: float) -> NDArray[np.float32] | None:
        """Return the action of a control step; None if the robot has to wait for its chunk beyond ``until_s``."""
        self._arrive()
        self._request(start)
        if self.schedule.pending and self.schedule.waits:
            began_s = self.clock.now()
            if not self._arrive(until_s - began_s):
                return None
            self.waited_s += self.clock.now() - began_s
        return self.schedule.action(start.step)

    def _request(self, start: StepStart) -> None:
        """Plan from the observation of a control step, if a chunk is due."""
        request = self.schedule.request(start.step, self.clock.now() - start.measured.time_s)
        if request is not None:
            self.loop.inference.submit(self._inputs(request, start))
            self._arrive()

    def _arrive(self, wait_s: float = 0.0) -> bool:
        """Hand the pending chunk to the schedule if it arrives within ``wait_s``; return whether it did."""
        found = self.loop.inference.take(max(0.0, wait_s))
        if found is not None:
            self.schedule.arrive(*found)
        return found is not None

    def _inputs(self, request: PlanRequest, start: StepStart) -> dict[str, NDArray[Any]]:
        shape, seeded = self.loop.bundle.noise_shape, self.loop.noise == "seeded"
        noise = self.random.standard_normal(shape, np.float32) if seeded else np.zeros(shape, np.float32)
        known: dict[str, NDArray[Any]] = {
            "state": start.state, "noise": noise, "instruction": np.array(self.instruction, np.int64),
            "prefix": request.prefix_DA, "delay": np.array(request.delay, np.int64),
            **{f"images.{name}": image for name, image in start.images.items()},
        }  # fmt: skip
        return {name: known[name][None] for name in self.loop.inputs.shapes}

    def _pass_time(self, due_s: float) -> None:
        """Let time pass until ``due_s``. A chunk that arrives meanwhile commands the rest of the control step."""
        schedule = self.schedule
        acting = schedule.pending and not schedule.waits and not self.safety.blind and self.loop.confirm is None
        if acting and self._arrive(due_s - self.clock.now()) and self.clock.now() < due_s - 1e-9:
            self._revise()
        self.clock.sleep_until(due_s)

    def _revise(self) -> None:
        """Command the rest of the present control step by the chunk that has just arrived.

        In the first half of the step the chunk's action is recorded as that of the step, and the next chunk is planned
        at once if it is due.
        """
        start, last, now_s = self.start, self.record.steps[-1], self.clock.now()
        assert start is not None
        action = self.schedule.action(start.step)
        self._aim(action, start)
        with suppress(Unusable):  # the next tick holds the robot
            measured = self._observe()
            self.safety.check_moves(measured.qpos, measured.time_s)
            last.target = self._apply(self._targets(), self.fingers_m, measured)
        if now_s - start.measured.time_s < self.loop.bundle.control_dt_s / 2:
            last.action = action
            self._request(start)

    def _observe(self, watched: bool = True) -> Measurement:
        """Return the newest observation. Unusable; ConnectionError for a robot that is gone, or late if ``watched``."""
        observation, builder = self.loop.robot.get_observation(), self.loop.builder
        if watched:
            self.watchdog.answered("get_observation")
        if not self.loop.robot.is_connected:
            raise ConnectionError("the robot is not connected any more")
        now_s = self.clock.now()
        check_age(age(observation, now_s))
        return Measurement(observation, now_s, builder.qpos(observation), builder.qvel(observation))

    def _aim(self, action: NDArray[np.float32], start: StepStart) -> None:
        """Set the targets of a control step by its action, relative to the pose or the targets at its start."""
        pose = start.target_J if self.loop.bundle.arm.from_target else start.measured.qpos
        self.goal, self.fingers_m = self.loop.controller.targets(action, pose, start.fingers_m)

    def _targets(self) -> Array:
        """Return the targets of the last tick that began; phase 0 means that the step has just ended."""
        ticks = self.loop.ticks_per_step
        share = (self.phase or ticks) / ticks if self.loop.interpolation == "linear" else 1.0
        return self.previous + share * (self.goal - self.previous)

    def _apply(self, targets: Array, fingers_m: Array, measured: Measurement) -> Array:
        """Command targets within the limits of the safety; return those that the robot sent on."""
        now_s = measured.time_s
        return self._send(*self.safety.filter(targets, fingers_m, measured.qpos, measured.qvel, now_s, measured.age_s))

    def _send(self, safe: Array, fingers_m: Array) -> Array:
        """Send targets that have left the safety; return those that the robot sent on."""
        names, wanted = self.loop.commanded, np.append(safe, fingers_m)
        returned = self.loop.robot.send_action(dict(zip(names, wanted.tolist(), strict=True)))
        self.watchdog.answered("send_action")
        sent = np.array([float(returned[name]) for name in names])
        changed = ~(np.abs(sent - wanted) <= self.loop.tolerances)  # NaN too
        if changed.any():
            i = int(np.argmax(changed))
            self.safety.intervene("robot", f"it sent {names[i]} {sent[i]:.4f} in place of {wanted[i]:.4f}")
        return np.where(np.isfinite(sent), sent, wanted)[: len(safe)]

    def _halt(self) -> None:
        """Command the measured position, where the robot stays, or its last targets if it is not known.

        The watchdog is not asked before the command: a robot that answers late must still be told to stay.
        """
        self.safety.report("stopped", "a person stopped the robot", self.clock.now())
        held, fingers_m = self.safety.hold()
        try:
            measured = self._observe(watched=False)
            self.safety.check_moves(measured.qpos, measured.time_s)
        except (Unusable, ConnectionError) as error:
            self._send(held, fingers_m)
            if isinstance(error, ConnectionError):
                raise
            return
        self._apply(measured.qpos, fingers_m, measured)
