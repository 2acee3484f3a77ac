"""Replay recorded controls in a batch of the library ``mjbatch``, which needs another version of MuJoCo than ours.

    <its own python> -I replay.py <folder with model.xml> <simulations> <threads> <substeps>
    stdin     a line for each replay, before which the folder has start.npy [N, S] and controls.npy [T, N, U]
    stdout    MuJoCo's version, then the seconds of each replay, after which the folder has end.npy [N, S]
"""

import sys
import time
from pathlib import Path

import mujoco
import numpy as np
from mjbatch import Batch

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    num_sims, num_threads, substeps = map(int, sys.argv[2:])
    batch = Batch(mujoco.MjModel.from_xml_path(str(folder / "model.xml")), num_sims, num_threads)
    state, ctrl, force = map(batch.bind, ("state", "ctrl", "xfrc_applied"))
    print(mujoco.__version__, flush=True)
    for _ in sys.stdin:
        state[:] = np.load(folder / "start.npy")
        force[:] = 0  # the weights that the pool applies; this model has gravity
        controls = np.load(folder / "controls.npy")
        began_s = time.perf_counter()
        for control in controls:
            ctrl[:] = control
            batch.step(nstep=substeps)
        seconds = time.perf_counter() - began_s
        np.save(folder / "end.npy", state)
        print(seconds, flush=True)
