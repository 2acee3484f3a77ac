"""Process that renders images with ``mujoco.Renderer``, for the comparison in ``embodied.benchmarks.camera``.

    MUJOCO_GL=egl python -m embodied.benchmarks.opengl <directory with model.mjb and states.npz> <settings, JSON>

It prints ``ready``. Then each line on stdin is a number of images to render, and it prints the processor time of that
rendering, seconds. The renderer is built once, warmed up, and draws without any effect that can be switched off.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

WARM_UP = 3  # images


def make_renderer(scene: Path, settings: dict[str, Any]) -> Callable[[int], NDArray[np.uint8]]:
    """Return a function that renders a number of images, one per state in turn, and returns the last, [size, size, 3].

    settings: size, pixels; lookat, distance, azimuth, elevation and fovy of a free camera; quality: fields of
    ``model.vis.quality``.
    """
    model, states = mujoco.MjModel.from_binary_path(str(scene / "model.mjb")), dict(np.load(scene / "states.npz"))
    for name, value in {"offsamples": 0, **settings["quality"]}.items():
        setattr(model.vis.quality, name, value)
    model.vis.global_.offwidth = model.vis.global_.offheight = settings["size"]
    model.vis.global_.fovy = settings["fovy"]
    camera, option, data = mujoco.MjvCamera(), mujoco.MjvOption(), mujoco.MjData(model)
    for name in ("lookat", "distance", "azimuth", "elevation"):
        setattr(camera, name, settings[name])
    option.geomgroup[:] = 1
    renderer = mujoco.Renderer(model, settings["size"], settings["size"])
    order = cycle(range(len(states["qpos"])))

    def render(count: int) -> NDArray[np.uint8]:
        for sim in (next(order) for _ in range(count)):
            for field, values in states.items():
                getattr(data, field)[:] = values[sim]
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            mujoco.mj_camlight(model, data)
            renderer.update_scene(data, camera, option)
            renderer.scene.flags[:] = 0
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_CULL_FACE] = 1
            image: NDArray[np.uint8] = renderer.render()
        return image

    render(WARM_UP)
    return render


def main(scene: str, settings: str) -> None:
    render = make_renderer(Path(scene), json.loads(settings))
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.process_time()
        render(int(line))
        print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # OSMesa's bindings complain when the interpreter ends
