"""Libraries in virtual environments of their own (``make peers``): they need other versions than ours."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.envs.mujoco.pool import MujocoPool


def interpreter(package: str) -> str:
    """Return the Python of a library's environment; UserError if there is none."""
    python = Path(sys.prefix) / "peers" / package / "bin" / "python"
    if not python.exists():
        raise UserError(f"{package} is not installed in {python.parents[1]}: make peers VENV={sys.prefix}")
    return str(python)


class PeerBatch:
    """A batch of ``mjbatch`` or ``mjbatch-uni``, which every replay builds in a process of its own (``replay.py``).

    It has the model of a pool's task and the pool's number of threads.
    """

    def __init__(self, package: str, pool: MujocoPool) -> None:
        self._python, self._numbers = interpreter(package), [str(pool.batch.nthread), str(pool.substeps)]
        self._folder = TemporaryDirectory()
        self.folder = Path(self._folder.name)
        # ``pos`` is an actuator's default input; earlier versions of MuJoCo do not know the attribute.
        xml = pool.task.scene().to_xml().replace(' input="pos"', "")
        (self.folder / "model.xml").write_text(xml, encoding="utf-8")
        self.mujoco = self._run("-c", "import mujoco; print(mujoco.__version__)").strip()

    def replay(self, start: NDArray[np.float64], controls: NDArray[np.float64]) -> float:
        """Step from ``start`` [N, S] with ``controls`` [T, N, U]; return the seconds."""
        np.save(self.folder / "start.npy", start)
        np.save(self.folder / "controls.npy", controls)
        return float(self._run(str(Path(__file__).with_name("replay.py")), str(self.folder), *self._numbers))

    def _run(self, *words: str) -> str:
        return subprocess.check_output([self._python, "-I", *words], text=True)
