"""Replay recorded controls in a batch of the library ``mjbatch``, which needs another version of MuJoCo than ours.

<its own python> -I replay.py <folder> <threads> <substeps>     prints the seconds of the second of two replays

The folder has model.xml, start.npy [N, S] and controls.npy [T, N, U], and gets end.npy [N, S].
"""

import sys
import time
from pathlib import Path

import mujoco
import numpy as np
from mjbatch import Batch

if __name__ == "__main__":
    folder, num_threads, substeps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    start, controls = np.load(folder / "start.npy"), np.load(folder / "controls.npy")
    batch = Batch(mujoco.MjModel.from_xml_path(str(folder / "model.xml")), len(start), num_threads)
    state, ctrl, force = map(batch.bind, ("state", "ctrl", "xfrc_applied"))
    for _ in range(2):
        state[:], force[:] = start, 0  # no weights that the pool applies: this model has gravity
        began_s = time.perf_counter()
        for control in controls:
            ctrl[:] = control
            batch.step(nstep=substeps)
        seconds = time.perf_counter() - began_s
    np.save(folder / "end.npy", state)
    print(seconds)
