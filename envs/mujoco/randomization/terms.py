"""Terms of domain randomisation: which quantity varies, by how much, and when it is drawn.

The options are named as in Isaac Lab's and mjlab's event terms. Every draw is a function of the episode's plan and the
control step.
"""

from functools import cache
from typing import Annotated, Literal

import numpy as np

from embodied.core.errors import UserError
from embodied.core.options import Positive, config_dataclass, one_of
from embodied.envs.episodes.seeding import EpisodeRng

OBJECT_OF_PREFIX = {"geom": "geom", "body": "body", "actuator": "actuator", "dof": "joint", "jnt": "joint"}
"""Kind of the objects that a model field belongs to, by the prefix of its name."""


QUANTITIES: dict[str, float | None] = {
    "action_delay": 0.0,  # time from a command to its effect, s; rounded to steps of the physics
    "joint_friction": 0.0,  # dry friction of the arm's joints, N m, or N of a slide
    "backlash": 0.0,  # play between motor and joint, rad: a joint follows once its motor is half of it ahead
    "encoder_offset": None,  # constant error of the joints' encoders, rad
    "joint_noise": 0.0,  # standard deviation of measured joint positions, rad
    "velocity_noise": 0.0,  # standard deviation of measured joint velocities, rad/s
    "joint_delay": 0.0,  # age of the joints' and the fingers' measurements, s
    "object_noise": 0.0,  # standard deviation of positions from perception, m
    "object_offset": None,  # constant error of positions from perception along each axis, m
    "object_delay": 0.0,  # age of what comes from perception, s
    "object_size": 0.5,  # factor of the size of every object, whose mass does not change
    "object_push": 0.0,  # horizontal velocity that an object gains in a random direction, m/s; at intervals only
    "arm_push": 0.0,  # velocity that each joint of the arm gains, either way, rad/s; at intervals only
}
"""Smallest allowed value (None: none) of each quantity of the robot or its perception that is no field of the model."""


@cache
def fields() -> list[str]:
    """Return the quantities and the fields of the model that can be randomised. Imports MuJoCo."""
    from mujoco.batch import MODEL_FIELDS

    return [*QUANTITIES, *(name for name in MODEL_FIELDS if name.split("_")[0] in OBJECT_OF_PREFIX)]


@config_dataclass
class RandomizationTerm:
    """One randomised field. Draw one number per env for all entries of the field, or one number per entry.

    Dependent values are adjusted: a body's inertia with its ``body_mass`` (as if its density had changed), and a
    position actuator's bias with its stiffness, ``actuator_gainprm`` column 0. Terms are applied in order, each to the
    model's own value of the named entries.
    """

    field: Annotated[str, one_of(fields)]
    """MjModel field that ``Batch.expand`` supports, such as geom_friction, body_mass, actuator_gainprm; or one of
    ``QUANTITIES``."""
    range: tuple[float, float]
    """(low, high) of uniform and log_uniform, (mean, standard deviation) of gaussian."""
    names: tuple[str, ...] = ()
    """Geoms, bodies, actuators or joints that the term of a model field applies to, or the groups ``arm``, ``fingers``
    and ``objects``; where a group has no member, the term does nothing."""
    mode: Literal["startup", "reset", "interval"] = "reset"
    """startup: once per env seed. reset: when an episode begins. interval: also at a random step of every interval."""
    distribution: Literal["uniform", "log_uniform", "gaussian"] = "uniform"
    """How the number is drawn."""
    operation: Literal["scale", "add", "abs"] = "scale"
    """scale multiplies the model's own value by the number, add adds the number, abs replaces the value."""
    column: int | None = None
    """Index along the field's last axis; null: all."""
    each: bool = False
    """Draw a number for every name, joint, object or axis; otherwise all of them get the same one."""
    interval_s: Positive | None = None
    """Mean time between two draws of mode ``interval``, s."""

    def __post_init__(self) -> None:
        low, high = self.range
        if self.distribution == "gaussian":
            if high < 0:
                raise UserError(f"range: got {list(self.range)}, which has a negative standard deviation")
        elif low > high:
            raise UserError(f"range: got {list(self.range)}, which has low above high")
        elif self.distribution == "log_uniform" and low <= 0:
            raise UserError(f"range: got {list(self.range)}, which for log_uniform must be above 0")
        if self.interval_s is None and self.mode == "interval":
            raise UserError("interval_s: got null, needed with mode=interval: the mean time between two draws, s")
        if self.interval_s is not None and self.mode != "interval":
            raise UserError(f"interval_s: got {self.interval_s:g} with mode={self.mode}, allowed with mode=interval")
        if self.field not in QUANTITIES:
            if not self.names:
                raise UserError(f"names: got none, needed: those that {self.field} varies for")
            return
        if self.names or self.column is not None or self.operation != "scale":
            given = "names" if self.names else "column" if self.column is not None else "operation"
            raise UserError(f"{given}: {self.field} has no {given}, allowed: only with a field of MjModel")
        if self.field in ("object_push", "arm_push") and self.mode != "interval":
            raise UserError(f"mode: got {self.mode}, {self.field} happens with mode=interval alone")
        if self.field == "object_size" and self.mode == "interval":
            raise UserError("mode: got interval, allowed for object_size: startup, reset")
        least = QUANTITIES[self.field]
        if least is not None and (self.distribution == "gaussian" or low < least):
            allowed = f"uniform or log_uniform, at least {least:g}"
            raise UserError(f"range: got {list(self.range)} ({self.distribution}), allowed for {self.field}: {allowed}")

    def draw(self, rng: EpisodeRng, stream: str, size: int = 1, number_n: np.ndarray | None = None) -> np.ndarray:
        """Draw ``size`` numbers per env, [n, size]. number: count of the episodes' earlier draws, int [n]."""
        low, high = self.range
        block_n = np.zeros(len(rng), np.int64) if number_n is None else number_n
        if self.distribution == "gaussian":
            u = rng.block(stream, block_n, 2 * size).reshape(len(rng), size, 2)
            return np.asarray(low + high * np.sqrt(-2 * np.log1p(-u[..., 0])) * np.cos(2 * np.pi * u[..., 1]))
        u = rng.block(stream, block_n, size)
        if self.distribution == "log_uniform":
            return np.asarray(np.exp(np.log(low) + (np.log(high) - np.log(low)) * u))
        return np.asarray(low + (high - low) * u)
