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
    env: VecEnv, render: Callable[[], Pixels], policy: Policy, plans: EpisodePlans, paths: Sequence[Path], *,
    seeded: bool = False, watch: Callable[[float], None] = lambda share: None,
) -> list[bool | None]:  # fmt: skip
    """Film the policy as it is deployed, an episode in each env: all in a grid, or each in its own video.

    A video ends with its episode. In a grid, an episode that has ended shows its last image until all have ended.

    render: returns images [N, h, w, 3] of the present states of all envs. It is called at the start of the episodes and
    after every control step. paths: one, or one for each env. seeded: see ``EvalRollout``. watch: receives the fraction
    of frames that are written, relative to full-length episodes. Return whether the episodes ended with success (None:
    the task reports none). The films are in real time, and the files appear when they are complete.
    """
    solved: list[bool | None] = [None] * env.num_envs
    running_N, frames, written = np.ones(env.num_envs, bool), list[Pixels](), 0
    with ExitStack() as stack:
        writes = [stack.enter_context(open_mp4(path, 1.0 / env.spec.control_dt_s)) for path in paths]

        def write(images: Pixels, shown_N: NDArray[np.bool_]) -> None:
            nonlocal written
            if len(writes) == 1:
                tiles[shown_N] = images[shown_N]
                writes[0](grid(tiles))
            else:
                for i in np.flatnonzero(shown_N):
                    writes[i](images[i])
            written += 1
            watch(written / (env.spec.max_episode_steps + 1))

        env.on_control_step = lambda _: frames.append(render())
        stack.callback(setattr, env, "on_control_step", None)
        rollout = EvalRollout(policy, env, plans, seeded)
        tiles = render().copy()
        write(tiles, running_N)
        while running_N.any():
            frames.clear()
            step = rollout.step()
            for k, images in enumerate(frames):
                write(images, running_N & (step.num_steps_N.numpy() > k))
            ended = step.episodes.env_id_M.tolist()
            for i, success in zip(ended, step.episodes.at_end.get(SUCCESS, [None] * len(ended)), strict=True):
                if running_N[i] and success is not None:
                    solved[i] = bool(success)
            running_N[ended] = False
    return solved


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
