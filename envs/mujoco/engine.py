"""Work that the engine can leave out: timers, compensated gravity of an arm, data that simulations keep or clear."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import mujoco
import numpy as np
from mujoco.batch import Batch

BEGINS_WITH = ("qpos0", "body_pos", "body_quat", "eq_active0")  # fields of the model that a reset reads


@cache
def _clock() -> tuple[ctypes.c_void_p, int | None] | None:
    """Return the variable that holds the engine's clock, with its value; None where it is not found.

    MuJoCo's Python package installs a clock, and its API can replace the clock but not remove it.
    """
    try:
        clock = ctypes.c_void_p.in_dll(ctypes.CDLL(sys.modules["mujoco._functions"].__file__), "mjcb_time")
    except (KeyError, OSError, ValueError):  # another platform or version: the timers stay
        return None
    return clock, clock.value


def stop_timers() -> None:
    """Stop the engine's timers (``MjData.timer``) in this process; reading the clock costs 7% of a step."""
    if (found := _clock()) is not None:
        found[0].value = None


@contextmanager
def timers() -> Iterator[None]:
    """Run the engine's timers inside the block, as every program with MuJoCo does by default."""
    if (found := _clock()) is not None:
        found[0].value = found[1]
    yield
    stop_timers()


class Weights:
    """The weights of objects as applied forces, in a model without gravity, where the engine would compensate an arm's.

    Compensation computes the Jacobian of every body of the arm, 8% of a step. The states differ by some 1e-15 a step.
    """

    def __init__(self, batch: Batch, gravity_3: np.ndarray | None) -> None:
        """gravity: that of ``take_gravity``."""
        self.batch, self.gravity_3 = batch, gravity_3
        self.force_NB6 = batch.bind("xfrc_applied")
        self.moving_B1 = (batch.model.body_weldid > 0)[:, None]

    def apply(self, ids: np.ndarray) -> None:
        """Write the forces of simulations ``ids`` [n]. They follow the masses, and a reset of the state clears them."""
        if self.gravity_3 is not None:
            mass_nB, compensated_nB = self._present("body_mass", ids), self._present("body_gravcomp", ids)
            self.force_NB6[ids, :, :3] = (mass_nB * (1 - compensated_nB))[..., None] * self.moving_B1 * self.gravity_3

    def _present(self, name: str, ids: np.ndarray) -> np.ndarray:
        values: np.ndarray | None = self.batch.expanded(name)
        return np.asarray(getattr(self.batch.model, name)) if values is None else values[ids]


class Beginning:
    """The state of simulations that begin: writing it is many times as fast as a reset, which clears all data.

    So data that are no state and that the stage of positions does not compute, such as ``cvel`` and ``qacc``, are those
    of another step until the first control step: what a task observes must be of positions, a state, or a sensor.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.state_S: np.ndarray = batch.state[0].copy()

    def restore(self, ids: np.ndarray) -> None:
        """Write it to simulations ``ids`` [n]. Nothing is computed."""
        if self.batch.persistent or any(self.batch.expanded(name) is not None for name in BEGINS_WITH):
            self.batch.reset(ids, stage=int(mujoco.mjtStage.mjSTAGE_NONE))
        else:
            self.batch.state[ids] = self.state_S


def needs_own_data(model: mujoco.MjModel) -> bool:
    """Return whether simulations must keep data beside their state: of forces, of sleeping bodies, of IPC, of plugins.

    Otherwise each thread has one MjData, which stays in its cache. States and sensors are the same, bit for bit.
    """
    of_forces = (model.sensor_needstage > int(mujoco.mjtStage.mjSTAGE_VEL)).any()
    flags = int(mujoco.mjtEnableBit.mjENBL_SLEEP) | int(mujoco.mjtEnableBit.mjENBL_IPC)
    return bool(of_forces or model.opt.enableflags & flags or model.nplugin)


def last_stage(model: mujoco.MjModel) -> int:
    """Return the engine's stage to run after a control step: of positions, or of velocities for sensors that need it.

    The stage of velocities is 2% of a step. Tasks read velocities of joints and free bodies, which are states.
    """
    positions, velocities = int(mujoco.mjtStage.mjSTAGE_POS), int(mujoco.mjtStage.mjSTAGE_VEL)
    return velocities if (model.sensor_needstage > positions).any() else positions


def take_gravity(model: mujoco.MjModel) -> np.ndarray | None:
    """Set the gravity of a model to 0 and return what it was, [3]; None if the engine must simulate it.

    It must where most bodies have a weight, and where sensors of forces or sleeping bodies would notice.
    """
    moving_B, compensated_B = model.body_weldid > 0, model.body_gravcomp == 1
    few_compensated = (moving_B & ~compensated_B).sum() >= (moving_B & compensated_B).sum()
    if few_compensated or needs_own_data(model) or model.jnt_actgravcomp.any():
        return None
    gravity_3: np.ndarray = model.opt.gravity.copy()
    model.opt.gravity[:] = 0
    return gravity_3
