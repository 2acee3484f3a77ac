"""Options of the command ``deploy``: ``key=value`` words to a plain dataclass, by the standard library alone."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from embodied.core.errors import UserError, unknown_name
from embodied.deployment.bundle.files import from_json
from embodied.deployment.bundle.format import Bundle
from embodied.deployment.control.inference import TIMEOUT_S
from embodied.deployment.control.loop import ticks_per_step
from embodied.deployment.control.schedule import Schedule
from embodied.deployment.robots.sim import PERTURBATIONS

T = TypeVar("T")


@dataclass(frozen=True)
class DeployOptions:
    """Options of the command; see the top of embodied/deploy.py."""

    bundle: str
    robot: str = "sim"
    episodes: int = 1
    seed: int = 0
    schedule: str = "synchronous"
    execute: int | None = None
    rate_hz: float | None = None
    interpolation: str = "hold"
    instruction: str | None = None
    server: str | None = None
    api_key_file: str | None = None
    noise: str | None = None
    latency_ms: float = 0.0
    plan_timeout_s: float = TIMEOUT_S
    speed: float = 1.0
    confirm: bool = False
    home: bool = True
    mapping: str | None = None
    propose_mapping: bool = False
    confirm_mapping: str | None = None
    robot_options: str = "{}"
    perturbation: str = "none"
    lockstep: bool = False
    report: str | None = None
    video: bool = True
    num_threads: int = 1

    def check_fits(self, bundle: Bundle) -> None:
        """Raise UserError for values that do not fit a policy, before a robot is connected."""
        ticks_per_step(bundle, self.rate_hz)
        execute = bundle.execute if self.execute is None else self.execute
        Schedule(self.schedule, bundle.horizon, execute, bundle.action_dim, bundle.control_dt_s)

    def check(self) -> None:
        """Raise UserError for values that are not allowed."""
        for name, low in (("episodes", 1), ("seed", 0), ("num_threads", 1)):
            if getattr(self, name) < low:
                raise UserError(f"{name}: got {getattr(self, name)}, allowed: at least {low}")
        if not 0 <= self.latency_ms <= 1e4:
            raise UserError(f"latency_ms: got {self.latency_ms}, allowed: 0 to 10000")
        if not 0 < self.plan_timeout_s <= 600:
            raise UserError(f"plan_timeout_s: got {self.plan_timeout_s}, allowed: above 0, at most 600")
        if self.robot != "sim" and ":" not in self.robot:
            raise unknown_name("robot", self.robot, ["sim", "<module>:<Class>"])
        if self.robot != "sim" and self.mapping is None:
            raise UserError(f"robot={self.robot} needs mapping=<file>; propose_mapping=true writes a first draft")
        if self.robot != "sim" and self.lockstep:
            raise UserError("lockstep=true is for robot=sim: the time of a real robot passes by itself")
        if self.robot == "sim" and (self.propose_mapping or (self.mapping, self.confirm_mapping) != (None, None)):
            raise UserError("mapping: robot=sim has the names and units of its bundle, and needs none")
        if self.propose_mapping and self.confirm_mapping is not None:
            raise UserError("propose_mapping and confirm_mapping: give one; between them a person looks at the picture")
        if self.perturbation not in PERTURBATIONS:
            raise unknown_name("perturbation", self.perturbation, PERTURBATIONS)
        if self.noise not in (None, "zero", "seeded"):
            raise UserError(f"noise: got '{self.noise}', allowed: zero, seeded")
        if self.report is not None and Path(self.report).exists():
            raise UserError(f"report={self.report} exists; give a new directory")


def parse_words(cls: type[T], words: Sequence[str]) -> T:
    """Build a dataclass from ``key=value`` words by its annotations: text, numbers, true, false and null.

    UserError for an unknown or missing key, or a value of another type.
    """
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"'{word}' is not key=value: write for instance episodes=10, without spaces around '='")
        if key not in names:
            raise unknown_name("key", key, names)
        is_text = str in (hints[key], *typing.get_args(hints[key]))
        given[key] = text if is_text and text != "null" else _value(text)
    defaults = {field.name: field.default for field in fields(cls) if field.default is not MISSING}  # type: ignore[arg-type]
    missing = [name for name in names if name not in given and name not in defaults]
    if missing:
        raise UserError(f"{missing[0]}= is missing")
    made = from_json(cls, defaults | given, "options")
    check = getattr(made, "check", None)
    if check is not None:
        check()
    return made


def as_mapping(options: Any) -> dict[str, Any]:
    """Return the options as a mapping."""
    return asdict(options)


def _value(text: str) -> Any:
    """Return a number, true, false or null; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
