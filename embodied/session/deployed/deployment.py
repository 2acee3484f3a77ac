"""The life of a deployment: its phases, and whatever goes wrong in them.

    episodes ──► way home ──► hold after an emergency ──► disconnect ──► report ──► result, or the first error

Every episode is written as it ends. An error ends its phase, and the phases after it still take place.
"""

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embodied.core.errors import UserError, describe_error
from embodied.core.words import word
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import RobotHangs
from embodied.deployment.control.site import EmergencyKey, Site, ask, move_home
from embodied.deployment.options import DeployOptions
from embodied.deployment.report import EPISODES, PAGE, Deployment, save_episode, write_report
from embodied.deployment.robots.base import Unusable
from embodied.session.command import Failed, Stopped, stop_on_signals

FILM, FILM_FPS = "video.mp4", 10


class EmergencyStop(Exception):
    """A person pressed the emergency key."""


class StoppedOnTheWayHome(EmergencyStop):
    """A person pressed the emergency key while the robot moved home."""


class DeploymentRun:
    """The phases of a deployment on a connected robot, and what went wrong in them."""

    def __init__(self, options: DeployOptions, loop: ControlLoop, site: Site, deployment: Deployment) -> None:
        self.options, self.loop, self.site, self.deployment, self.key = options, loop, site, deployment, EmergencyKey()
        self.errors: list[BaseException] = []
        self.signalled = threading.Event()
        self.stays = False  # an episode was refused before its first control step, or a way home did not end there
        loop.stop = self.stop

    def stop(self) -> bool:
        """Return whether the emergency key was pressed. KeyboardInterrupt if a signal came.

        The loop asks between calls of the driver, so the first signal does not interrupt one. A second signal does.
        """
        signalled = self.signalled.is_set()
        with suppress(ConnectionError) if signalled else nullcontext():  # the terminal may be gone
            if self.key.pressed():
                return True
        if signalled:
            raise KeyboardInterrupt
        return False

    def attempt(self, phase: Callable[[], object]) -> None:
        """Run a phase and keep its error, so that the next phase takes place anyway. The first error counts."""
        try:
            phase()
        except (KeyboardInterrupt, Exception) as error:  # of a bug too: what was recorded must not be lost
            self.errors.append(error)
            self.deployment.error = self.deployment.error or describe(error)

    def episodes(self) -> None:
        """Run all episodes, each from the default pose. EmergencyStop if the key was pressed."""
        for index in range(self.options.episodes):
            if index and not self.site.resets and not self.go_home():
                raise KeyboardInterrupt
            self.episode(index)
            if index == 0 and self.options.report is not None and self.options.video:
                self.site.film()

    def episode(self, index: int) -> None:
        """Run one episode, keep its record however it ends, and judge it."""
        options, loop, key, records = self.options, self.loop, self.key, self.deployment.records
        instruction, before = self.site.begin(options.seed, index), loop.record
        try:
            with ExitStack() as watched:
                if loop.confirm is None:  # who is asked before every action stops by an answer
                    watched.enter_context(key)
                    self.signalled = watched.enter_context(stop_on_signals("stopping; once more: at once"))
                if key.watching:
                    print("press any key to stop the robot at once", file=sys.stderr, flush=True)
                loop.run(options.instruction or instruction, seed=options.seed * 1_000_003 + index)
            self.site.ended()
        except Exception as error:
            self.stays = isinstance(error, UserError) and (loop.record is before or not loop.record.steps)
            if key.pressed():
                raise EmergencyStop(f"emergency key, but the robot may not hold: {describe(error)}") from error
            raise
        finally:
            if loop.record is not before:
                records.append(loop.record)
                with suppress(Exception):  # must not hide an error under way; the next ``save`` says what is wrong
                    self.save()
        if key.pressed():
            raise EmergencyStop("emergency key")
        if self.signalled.is_set():  # in the last tick
            raise KeyboardInterrupt
        record = records[-1]
        record.success = self.site.judge()
        self.save()
        solved = {True: "solved", False: "not solved", None: "not judged"}[record.success]
        note = f"{record.missed_deadlines} missed deadlines, {sum(record.interventions.values())} interventions"
        head = f"episode {index + 1} of {options.episodes}: {solved}, {record.reason}"
        print(f"{head}, {record.control_steps_hz:.1f} control steps/s, {note}", file=sys.stderr)

    def go_home(self) -> bool:
        """Move the robot home if a policy has moved it. False if a signal stopped it; StoppedOnTheWayHome by the key.

        The robot stays where it is after the emergency key, after the driver crashed or did not answer, and if an
        episode was refused before the first control step: the mapping may read another pose. A person who is asked
        before every action is asked before the way home too. UserError if the way home is not possible, or does not end
        there.
        """
        robot, key, first = self.site.robot, self.key, self.errors[0] if self.errors else None
        known = isinstance(first, KeyboardInterrupt | OSError | UserError | None) and not isinstance(first, RobotHangs)
        moved = any(record.steps for record in self.deployment.records)
        if not (self.options.home and known and moved):
            return True
        if self.stays:
            print("the robot stays where it is", file=sys.stderr)
            return True
        unknown = isinstance(first, Unusable) and first.kind in ("frozen", "jump")
        if unknown or not robot.is_connected:
            why = "its pose is not known" if unknown else "it is not connected"
            raise UserError(f"the robot does not move home: {why}")
        if self.options.confirm and not ask("move home?"):
            print("the robot stays where it is", file=sys.stderr)
            return True
        self.stays = True  # if it does not arrive
        try:
            with stop_on_signals("stopping the robot on its way home") as signalled, key:
                how = "press any key" if key.watching else "Ctrl-C"
                print(f"moving home; {how} to stop the robot at once", file=sys.stderr, flush=True)
                arms, safety = self.loop.bundle.arms, self.loop.safety
                reached = move_home(robot, arms, safety, self.site.clock, lambda: signalled.is_set() or key.pressed())
        except (OSError, UserError) as error:
            print("the robot stays where it is", file=sys.stderr)
            if str(error) == str(first):
                return True
            raise
        if key.pressed():
            raise StoppedOnTheWayHome("emergency key on the way home")
        self.stays = not reached
        if signalled.is_set() and not reached:
            print("the robot holds where it is", file=sys.stderr)
        elif not reached:
            raise UserError("the robot did not reach its default pose in time: it holds where it is")
        return reached and not signalled.is_set()

    def keep_holding(self) -> None:
        """Keep the connection after the emergency key until a person says so."""
        if any(isinstance(error, EmergencyStop) for error in self.errors):
            note = "the robot still holds; once more: disconnect"
            with stop_on_signals(note, [signal.SIGINT]):  # which people press, too
                self.site.keep_holding()

    def save(self, video: str | None = None) -> None:
        """Write the last episode, and the page about all of them."""
        if self.options.report is None:
            return
        folder, records = Path(self.options.report), self.deployment.records
        try:
            if records:
                save_episode(folder / EPISODES, records[-1], len(records) - 1)
            write_report(self.deployment, folder, asdict(self.options), video)
        except OSError as error:
            raise UserError(f"report={folder} cannot be written: {error.strerror or error}") from error

    def report(self) -> None:
        """Complete the report: the data set, and the film if there is one."""
        if self.options.report is None:
            return
        folder, frames = Path(self.options.report), self.site.frames
        with stop_on_signals("writing the report; once more: at once, without"):
            self.save()
            write_data(folder, self.deployment)
            if frames is not None and len(frames):
                from embodied.report.video import open_mp4

                with open_mp4(folder / FILM, FILM_FPS) as write:
                    for frame in frames:
                        write(frame)
                self.save(FILM)

    def outcome(self) -> dict[str, Any]:
        """Return the command's result. Stopped or Failed with it, by the first error."""
        result = self.deployment.result()
        if self.options.report is not None:
            result["report"] = str(Path(self.options.report) / PAGE)
        if not self.errors:
            return result
        first, *others = self.errors
        for error in others:
            print(f"after that: {describe(error)}", file=sys.stderr)
        on_the_way = any(isinstance(error, StoppedOnTheWayHome) for error in self.errors)
        if on_the_way and isinstance(first, KeyboardInterrupt | StoppedOnTheWayHome):
            raise Failed("emergency key on the way home", result, code=1)
        if isinstance(first, KeyboardInterrupt | EmergencyStop):
            print(describe(first), file=sys.stderr)
            raise Stopped(result)
        if isinstance(first, OSError | UserError):
            raise Failed(str(first), result)
        traceback.print_exception(first)
        raise Failed(describe(first), result, code=1)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Make the directory of a report, for one deployment alone; remove it if it stays empty. UserError if it exists."""
    try:
        path.mkdir(parents=True)
    except OSError as error:
        why = "exists; give a new directory" if path.exists() else f"cannot be made: {error.strerror or error}"
        raise UserError(f"report={path} {why}") from error
    try:
        yield
    finally:
        with suppress(OSError):  # it has a report
            path.rmdir()


def describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, EmergencyStop | OSError | UserError) else describe_error(error)


def write_data(folder: Path, deployment: Deployment) -> None:
    """Write the data set of the episodes that were solved.

    On a robot's computer, which lacks the libraries, print how to make it elsewhere.
    """
    convert = f"python -m embodied.convert {word('source', str(folder / EPISODES))} bundle=<bundle dir> out=<new dir>"
    try:
        from embodied.data import write
        from embodied.session.deployed.robot_dataset import episodes_of
    except ImportError as error:
        cure = f"where all of embodied-rl is installed, '{convert}' makes one of the episodes"
        print(f"{error}, so there is no data set; {cure}", file=sys.stderr)
    else:
        episodes = episodes_of(deployment.records, deployment.bundle)
        if solved := [episode for episode in episodes if bool(episode.success_L[-1])]:
            write(folder / "data", solved, deployment.bundle.env_spec)
        elif episodes:
            cure = f"'{convert} keep_failures=true' makes one of all episodes"
            print(f"no episode was judged solved, so there is no data set; {cure}", file=sys.stderr)
