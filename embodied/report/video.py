"""Videos on disk: H.264 MP4 through ffmpeg, which appear whole or not at all; captions above images."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageText

from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans
from embodied.core.execution import EvalRollout
from embodied.core.policy import Policy
from embodied.core.spec import SUCCESS

Pixels = NDArray[np.uint8]
LINES = 2  # of a caption in the largest font
BACKGROUND, INK = (32, 36, 44), (255, 255, 255)


def record(
    env: VecEnv, policy: Policy, path: Path, render: Callable[[], Pixels], plans: EpisodePlans, *,
    seeded: bool = False, watch: Callable[[float], None] = lambda share: None,
) -> int:  # fmt: skip
    """Film the policy as it is deployed, all envs in a grid; return the number of frames.

    render: returns images [N, h, w, 3] of the present states of all envs. It is called at the start of episodes and
    after every control step. plans: the episodes; their number must be a multiple of the number of envs. seeded: see
    ``EvalRollout``. watch: receives the fraction of frames that are written, relative to full-length episodes. The film
    is in real time, and the file appears when it is complete.
    """
    assert len(plans) % env.num_envs == 0, f"{len(plans)} episodes in {env.num_envs} envs"
    frames, most = 0, len(plans) // env.num_envs * (env.spec.max_episode_steps + 1)
    with open_mp4(path, 1.0 / env.spec.control_dt_s) as write:

        def film(_: object = None) -> None:
            nonlocal frames
            write(grid(render()))
            frames += 1
            watch(frames / most)

        env.on_control_step = film
        try:
            for first in range(0, len(plans), env.num_envs):
                rollout = EvalRollout(policy, env, plans.rows(slice(first, first + env.num_envs)), seeded)
                film()
                ended = np.zeros(env.num_envs, bool)
                while not ended.all():
                    step = rollout.step()
                    ended |= (step.terminated_N | step.truncated_N).numpy()
        finally:
            env.on_control_step = None
    return frames


def record_each(
    env: VecEnv,
    policy: Policy,
    render: Callable[[], Pixels],
    plans: EpisodePlans,
    folder: Path,
    *,
    seeded: bool = False,
) -> list[tuple[Path, bool | None]]:
    """Film as many episodes as there are envs, each to its end, as one video; see ``record``.

    Return the videos, and whether the episodes ended with success (None: the task reports none).
    """
    paths = [folder / f"{i}.mp4" for i in range(env.num_envs)]
    solved: list[bool | None] = [None] * env.num_envs
    frames: list[Pixels] = []
    env.on_control_step = lambda _: frames.append(render())
    with ExitStack() as stack:
        writes = [stack.enter_context(open_mp4(path, 1.0 / env.spec.control_dt_s)) for path in paths]
        rollout = EvalRollout(policy, env, plans, seeded)
        for write, image in zip(writes, render(), strict=True):
            write(image)
        running = set(range(env.num_envs))
        while running:
            frames.clear()
            step = rollout.step()
            for i in running:
                for images in frames[: int(step.num_steps_N[i])]:
                    writes[i](images[i])
            ended = step.episodes.env_id_M.tolist()
            for i, success in zip(ended, step.episodes.at_end.get(SUCCESS, [None] * len(ended)), strict=True):
                if i in running:
                    solved[i] = None if success is None else bool(success)
            running -= {*ended}
    env.on_control_step = None
    return list(zip(paths, solved, strict=True))


def grid(rgb_nhw3: Pixels) -> Pixels:
    """Tile images [n, h, w, 3] into one, as square as possible, row by row; empty tiles are black."""
    n, height, width, _ = rgb_nhw3.shape
    columns = int(np.ceil(np.sqrt(n)))
    rows = -(-n // columns)
    tiles = np.zeros((rows * columns, height, width, 3), np.uint8)
    tiles[:n] = rgb_nhw3
    return tiles.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)


@contextmanager
def open_mp4(path: Path, fps: float) -> Iterator[Callable[[Pixels], None]]:
    """Yield a function that appends frames [h, w, 3] (even h and w, equal for all) to an H.264 video.

    The file gets its name at the end of the block. If the block raises, nothing is left. ValueError for a wrong frame.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.mp4")
    shape: tuple[int, ...] | None = None
    stream: Any = None

    def write(frame: Pixels) -> None:
        nonlocal shape, stream
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.shape[0] % 2 or frame.shape[1] % 2:
            raise ValueError(f"video frame: got shape {frame.shape}, needed [h, w, 3] with even h and w")
        if shape is None:
            shape = frame.shape
            stream = imageio_ffmpeg.write_frames(
                str(partial), (shape[1], shape[0]), fps=fps, codec="libx264", quality=7, macro_block_size=2,
                output_params=["-movflags", "+faststart"],
            )  # fmt: skip
            stream.send(None)
        elif frame.shape != shape:
            raise ValueError(f"video frame: got shape {frame.shape}, the first one had {shape}")
        stream.send(np.ascontiguousarray(frame))

    try:
        yield write
        if stream is None:
            raise ValueError(f"video {path}: no frame was written")
        stream.close()
        partial.replace(path)
    finally:
        if stream is not None:
            stream.close()
        partial.unlink(missing_ok=True)


def caption(rgb_nhw3: Pixels, texts: Sequence[str]) -> Pixels:
    """Put n texts above images [n, h, w, 3]; return [n, h + s, w, 3].

    The height s of the strip depends on h alone and is even. A text is wrapped, in the largest font that fits.
    """
    n, height, width, _ = rgb_nhw3.shape
    size = max(8, height // 16)
    strips = np.zeros((n, 2 * round(0.7 * LINES * size), width, 3), np.uint8)
    for strip, text in zip(strips, texts, strict=True):
        image = Image.new("RGB", (width, len(strip)), BACKGROUND)
        words = ImageText.Text(text, ImageFont.load_default(size), spacing=size // 6)
        with suppress(ValueError):  # a text that fits in no size is cut off
            words.wrap(width - size, len(strip) - size // 2, scaling="shrink")
        ImageDraw.Draw(image).text((width / 2, len(strip) / 2), words, INK, anchor="mm", align="center")
        strip[:] = image
    return np.concatenate([strips, rgb_nhw3], axis=1)
