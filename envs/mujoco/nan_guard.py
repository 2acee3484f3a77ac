"""The NaN guard: it writes the state of a diverged simulation to a file and ends its episode; other envs continue."""

import logging
import time
from pathlib import Path

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

_WARNINGS = slice(int(mujoco.mjtWarning.mjWARN_BADQPOS), int(mujoco.mjtWarning.mjWARN_BADQACC) + 1)
# Under full random actions joints of the Panda reach 10 rad/s and objects 50 rad/s. Far above that, contacts are
# missed, and observations spoil a policy's normaliser. The engine warns only at 1e10.
MAX_SPEED = 1_000.0  # of any degree of freedom, m/s or rad/s
MAX_DUMPS = 100  # of one pool: limits what an env that diverges repeatedly writes to the disk
log = logging.getLogger(__name__)


class StateDumps:
    """Write the states of envs whose simulation diverged to files."""

    def __init__(self, dump_dir: Path) -> None:
        self.dump_dir, self.dumps = dump_dir, 0

    def dump(self, ids: np.ndarray, before_nS: np.ndarray, after_nS: np.ndarray) -> None:
        """Write ``ids`` [n] and their states before and after the step, [n, S], as an ``.npz`` file."""
        path, self.dumps = self.dump_dir / f"nan_{time.time_ns()}.npz", self.dumps + 1
        written = f"no dump after {MAX_DUMPS}"
        try:
            if self.dumps <= MAX_DUMPS:
                self.dump_dir.mkdir(parents=True, exist_ok=True)
                np.savez(path, ids=ids, state_before=before_nS, state=after_nS)
                written = f"state written to {path}"
        except OSError as error:
            written = f"no dump: {error}"
        log.warning("simulation diverged in env %s, they start anew; %s", ids[:5].tolist(), written)


class NanGuard(StateDumps):
    """Find envs whose simulation diverged: the engine raised or warned, or a velocity exceeds ``MAX_SPEED`` or is NaN.

    The model has the engine's own autoreset disabled. The state of a broken env before and after the step is written to
    a file: rows of ``Batch.state``. Then the env is set to the model's initial state, so that observations are finite.
    """

    def __init__(self, batch: Batch, dump_dir: Path) -> None:
        super().__init__(dump_dir)
        self.batch, self.before = batch, batch.state.copy()
        self.qvel = batch.bind("qvel")

    def remember(self) -> None:
        """Copy the state that the next step starts from."""
        np.copyto(self.before, self.batch.state)

    def check(self, raised: np.ndarray | None = None) -> Tensor | None:
        """Write and reset the envs that broke in the last step; return their ids, int64 [n], or None if none did.

        raised: ids of the envs in which the engine raised an error.
        """
        counts, speed = self.batch.warning[:, _WARNINGS, 1], np.abs(self.qvel)
        if raised is None and speed.max() <= MAX_SPEED and not counts.any():
            return None
        broken = counts.any(axis=1) | ~(speed <= MAX_SPEED).all(axis=1)  # a comparison with NaN is false
        if raised is not None:
            broken[raised] = True
        ids = np.flatnonzero(broken)
        self.dump(ids, self.before[ids], self.batch.state[ids])
        self.batch.warning[ids] = 0
        self.batch.reset(ids)
        return torch.from_numpy(ids)
