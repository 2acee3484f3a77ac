"""Libraries in virtual environments of their own, ``make peers``: they pin other versions than ours."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from mujoco import MjSpec
from numpy.typing import NDArray

from embodied.core.errors import UserError


def interpreter(package: str) -> str:
    """Return the Python of a library's environment; UserError if ``make peers`` has not built it."""
    python = Path(sys.prefix) / "peers" / package / "bin" / "python"
    if not python.exists():
        raise UserError(f"{package} is not installed in {python.parent.parent}: make peers VENV={sys.prefix}")
    return str(python)


class PeerBatch:
    """A batch of ``mjbatch`` or ``mjbatch-uni`` in a process of its own; see ``replay.py``."""

    def __init__(self, package: str, scene: MjSpec, num_sims: int, num_threads: int, substeps: int) -> None:
        python = interpreter(package)
        self._folder = TemporaryDirectory()
        self.folder = Path(self._folder.name)
        # ``pos`` is the default input of an actuator; earlier versions of MuJoCo do not know the attribute.
        (self.folder / "model.xml").write_text(scene.to_xml().replace(' input="pos"', ""))
        script, numbers = Path(__file__).with_name("replay.py"), map(str, (num_sims, num_threads, substeps))
        self._process = subprocess.Popen(
            [python, "-I", script, self.folder, *numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.mujoco = self._read()

    def replay(self, start: NDArray[np.float64], controls: NDArray[np.float64]) -> float:
        """Step from ``start`` [N, S] with ``controls`` [T, N, U]; return the seconds."""
        np.save(self.folder / "start.npy", start)
        np.save(self.folder / "controls.npy", controls)
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!s} ended")
        return line.strip()

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()
