"""Speed of policies' cameras: images per second by ray casting on the pool's threads, compared with OpenGL on the CPU.

    raycast_over_egl, raycast_over_osmesa                 ray casting / ``mujoco.Renderer`` in a process per core
    raycast_over_egl_coarse, raycast_over_osmesa_coarse   the same, with fewer facets per geom and a finite floor

Both render 64 x 64 images of the same model with all its geoms from the same pose. OpenGL renders the initial states
again and again. Ray casting renders the states of a running pool, one decision later each time, as in training. OpenGL
draws no shadows, reflections, haze, sky box or multisampling, into a buffer of the image's size. The coarse scene is
the fastest that we found for OpenGL. Ratios are of wall-clock time; rows also give the processor time per image. More
rows measure other cameras: with depth and segmentation, randomised, with every ray cast, 128 x 128, and on the wrist.
A backend that is not installed is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO, Any

import mujoco
import numpy as np
import torch

from embodied.benchmarks.measure import Report, in_turns, note, paired, timed
from embodied.envs import MujocoPool, make_pool, make_sampler
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.pool import coarse_of
from embodied.envs.rendering.camera_randomization import CameraRandomization
from embodied.envs.rendering.vision import CameraRig, find_camera
from embodied.runtime import threads

TASK = "pick_place"
DECISION = 4  # control steps
BACKENDS = {
    "egl": "Debian: apt install libegl1 libegl-mesa0 libgl1-mesa-dri",
    "osmesa": "Debian: apt install libosmesa6",
}
COARSE = {"numslices": 12, "numstacks": 6}  # facets of round geoms; 28 and 16 by default
COARSE_FLOOR_M = 8.0  # half size
RANDOMIZATION = CameraRandomization(0.03, 0.005, 0.03, 3.0, 0.1, 0.1, 0.1, 0.2, 0.2)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the benchmark."""

    num_envs: int = 256
    """Envs of the pool."""
    preroll: int = 10
    """Decisions before the first measure."""
    opengl: int = 100
    """Images that each OpenGL process renders per measure."""
    rounds: int = 9
    """Rounds that count, see measure.py."""


def measure(short: bool) -> Report:
    """Measure all ratios and rows; ``short`` only shows that it works."""
    sizes = Sizes(num_envs=4, preroll=1, opengl=2, rounds=2) if short else Sizes()
    report = Report("camera")
    threads.use(1)  # as an env worker does
    pool = make_pool(TASK, {}, num_envs=sizes.num_envs, num_threads=threads.available_cores())
    pool.reset(make_sampler(pool, stagger=True))
    for _ in range(sizes.preroll):
        wander(pool)
    front = Rays(pool)
    against_opengl(report, sizes, front)
    variants(report, sizes, front)
    return report


def wander(pool: MujocoPool) -> None:
    """Execute one random decision in every env."""
    pool.step(2 * torch.rand(pool.num_envs, DECISION, pool.spec.action_dim) - 1)


class Rays:
    """A camera rig on a pool. cpu_s: processor time per image, seconds, one entry per measure."""

    def __init__(
        self, pool: MujocoPool, name: str = "front", size: int = 64, more: bool = False, **options: Any
    ) -> None:
        self.pool, self.camera = pool, replace(find_camera(name), width=size, height=size)
        self.rig = CameraRig(pool.batch, pool.task.scene(), coarse_of(pool.task.robot), [self.camera], **options)
        everyone = np.arange(pool.num_envs)
        self.rig.start(everyone, EpisodeRng(everyone, np.zeros(pool.num_envs)))
        pool.batch.forward()
        self.more = more
        self.cpu_s: list[float] = []

    def speed(self) -> float:
        """Return images per second, after one random decision."""
        wander(self.pool)
        began = time.process_time()
        seconds = timed(lambda: self.rig.render(depth=self.more, segmentation=self.more))
        self.cpu_s.append((time.process_time() - began) / self.pool.num_envs)
        return self.pool.num_envs / seconds


class OpenGL:
    """Processes that render the camera of ``rays`` with ``mujoco.Renderer``, ``count`` images each per measure.

    scene: see ``write_scene``. quality: of the model's geoms. stack: ends the processes. OSError if the backend fails.
    cpu_s: processor time per image, seconds, one entry per measure.
    """

    def __init__(
        self, backend: str, scene: Path, quality: dict[str, int], rays: Rays, count: int, stack: ExitStack
    ) -> None:
        self.count = count
        self.cpu_s: list[float] = []
        settings = json.dumps(_free_camera(rays) | {"quality": quality})
        words = [sys.executable, "-m", "embodied.benchmarks.opengl", str(scene), settings]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        environment = os.environ | {"MUJOCO_GL": backend}
        self.processes = [
            stack.enter_context(subprocess.Popen(words, text=True, env=environment, **pipes))
            for _ in range(threads.available_cores())
        ]
        for process in self.processes:
            stack.callback(process.kill)
        if any(_pipe(process.stdout).readline().strip() != "ready" for process in self.processes):
            raise OSError(backend)

    def speed(self) -> float:
        """Return images per second, of all processes together."""
        return self.count * len(self.processes) / timed(self._take)

    def _take(self) -> None:
        for process in self.processes:
            print(self.count, file=_pipe(process.stdin), flush=True)
        spent = sum(float(_pipe(process.stdout).readline()) for process in self.processes)
        self.cpu_s.append(spent / (self.count * len(self.processes)))


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _free_camera(rays: Rays) -> dict[str, Any]:
    """Return the pose of a fixed camera as that of a free camera of MuJoCo."""
    camera = rays.camera
    assert camera.pos is not None
    assert camera.lookat is not None
    forward = np.subtract(camera.lookat, camera.pos)
    distance = float(np.linalg.norm(forward))
    return {
        "size": camera.width, "fovy": camera.fovy_deg, "lookat": camera.lookat, "distance": distance,
        "azimuth": float(np.rad2deg(np.arctan2(forward[1], forward[0]))),
        "elevation": float(np.rad2deg(np.arcsin(forward[2] / distance))),
    }  # fmt: skip


def against_opengl(report: Report, sizes: Sizes, rays: Rays) -> None:
    """Measure both ratios for each backend that works."""
    with tempfile.TemporaryDirectory() as folder:
        full, coarse = Path(folder, "full"), Path(folder, "coarse")
        write_scene(full, rays)
        write_scene(coarse, rays, COARSE_FLOOR_M)
        for backend, remedy in BACKENDS.items():
            with ExitStack() as stack:
                try:
                    peers = {
                        backend: OpenGL(backend, full, {}, rays, sizes.opengl, stack),
                        f"{backend}_coarse": OpenGL(backend, coarse, COARSE, rays, sizes.opengl, stack),
                    }
                except OSError:
                    note(f"mujoco.Renderer does not work with MUJOCO_GL={backend}: left out ({remedy})")
                    continue
                compare(report, sizes, rays, peers)


def write_scene(scene: Path, rays: Rays, floor_m: float = 0.0) -> None:
    """Write the rig's model and the present states of the pool. floor_m: half size of the floor; 0 is infinite."""
    scene.mkdir()
    np.savez(scene / "states.npz", **{name: rays.pool.batch.bind(name) for name in ("qpos", "mocap_pos", "mocap_quat")})
    path = str(scene / "model.mjb")
    mujoco.mj_saveModel(rays.rig.model, path)
    if floor_m:
        model = mujoco.MjModel.from_binary_path(path)
        model.geom("floor").size[:2] = floor_m
        mujoco.mj_saveModel(model, path)


def compare(report: Report, sizes: Sizes, rays: Rays, peers: dict[str, OpenGL]) -> None:
    """Measure ray casting and ``peers`` in turns."""
    measures: dict[str, Callable[[], float]] = {name: peer.speed for name, peer in peers.items()}
    results = in_turns({"raycast": rays.speed, **measures}, sizes.rounds)
    for name, peer in peers.items():
        extent = _settings(rays) | {"processes": len(peer.processes), "pictures": peer.count, "rounds": sizes.rounds}
        add_rows(report, name, results[name], peer.cpu_s, extent)
        report.ratio(f"raycast_over_{name}", paired(results["raycast"], results[name]))


def variants(report: Report, sizes: Sizes, front: Rays) -> None:
    """Measure cameras with other options, in turns."""
    pool = front.pool
    rays = {
        "front_64": front,
        "front_64_depth_segmentation": Rays(pool, more=True),
        "front_64_randomised": Rays(pool, randomization=RANDOMIZATION),
        "front_64_every_ray": Rays(pool, cull=False),
        "front_128": Rays(pool, size=128),
        "wrist_64": Rays(pool, "wrist"),
        "wrist_128": Rays(pool, "wrist", size=128),
    }
    front.cpu_s.clear()
    results = in_turns({name: one.speed for name, one in rays.items()}, sizes.rounds)
    for name, one in rays.items():
        add_rows(report, f"raycast_{name}", results[name], one.cpu_s, _settings(one) | {"rounds": sizes.rounds})


def add_rows(report: Report, name: str, speeds: list[float], cpu_s: list[float], settings: dict[str, Any]) -> None:
    """Add the medians of images per second and of processor time per image."""
    report.add(name, median(speeds), "images/s", **settings)
    report.add(f"{name}_cpu", 1e6 * median(cpu_s[-len(speeds) :]), "us/image", **settings)


def _settings(rays: Rays) -> dict[str, Any]:
    camera = rays.camera
    return {
        "task": TASK, "num_envs": rays.pool.num_envs, "num_threads": rays.pool.batch.nthread, "camera": camera.name,
        "size": [camera.height, camera.width], "geoms": rays.rig.model.ngeom,
    }  # fmt: skip
