"""Images of data sets: PNG files, and frames of a LeRobotDataset's videos.

``meta/episodes`` has, for each episode and camera, the file (``videos/<key>/chunk_index`` and ``file_index``) and the
times in it (``from_timestamp`` and ``to_timestamp``). A file holds one or more episodes, one after another, with one
frame of video per frame of data.
"""

import io
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from pyarrow.lib import ArrowException
from torch import Tensor

from embodied.core.errors import UserError, one_line

MAX_PIXELS = 4096 * 4096  # of one image: a small file may declare a size beyond memory
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Raise UserError, which names the data set and what was read, for a file that is missing or damaged."""
    try:
        yield
    except (ArrowException, OSError, LookupError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"data set {path}: cannot read {what}: {one_line(error)[:500]}") from error


def encode_png(rgb: NDArray[np.uint8]) -> bytes:
    """Encode an image [h, w, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG")
    return file.getvalue()


def decode_png(data: bytes) -> NDArray[np.uint8]:
    """Decode a PNG file of RGB to an image [h, w, 3]. ValueError for any other file, and above MAX_PIXELS."""
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if image.mode != "RGB":
                raise ValueError(f"the PNG file holds {image.mode}, needed is RGB, into which pillow converts")
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"the PNG file has {image.width} x {image.height} pixels, at most {MAX_PIXELS}")
            pixels: NDArray[np.uint8] = np.array(image)
            return pixels
    except UnidentifiedImageError:
        raise ValueError("it is not a PNG file; JPEG and others must be converted, for instance with pillow") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"the PNG file is too large: {error}") from error
    except (OSError, SyntaxError, EOFError, struct.error, zlib.error) as error:
        raise ValueError(f"the PNG file is damaged: {error}") from error


def center_crop(image: NDArray[np.uint8], size: int | None) -> NDArray[np.uint8]:
    """Return the square in the middle of an image, scaled to ``size`` x ``size`` pixels; None returns the image."""
    height, width, _ = image.shape
    if size is None or (height, width) == (size, size):
        return image
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    box = (left, top, left + side, top + side)
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BOX, box))


def read_videos(
    path: Path, info: Mapping[str, Any], key: str, episode_F: Tensor, time_F: Tensor | None, size: int | None = None
) -> Tensor:
    """Return the images of feature ``key`` of all frames, uint8 [F, h, w, 3], their ``center_crop`` of ``size``.

    info: of the data set. episode_F: episode of each frame, not decreasing. time_F: seconds of each frame since the
    beginning of its episode's video, as LeRobot reads it; None: a frame each 1/fps. UserError for other times, missing
    or damaged videos, videos that are too short, and several sizes.
    """
    places = _places(path, key)
    episodes, lengths = episode_F.unique_consecutive(return_counts=True)
    wanted: dict[Path, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # rows, by the frame of the video
    start = 0
    for episode, length in zip(episodes.tolist(), lengths.tolist(), strict=True):
        if episode not in places:
            raise UserError(f"data set {path}: meta/episodes does not say where {key} of episode {episode} is")
        place, fps = places[episode], float(info["fps"])
        with reading(path, f"where {key} of episode {episode} is"):
            file = path / str(info.get("video_path") or VIDEO_PATH).format(video_key=key, **place)
            first, last = (round(place[name] * fps) for name in ("from_timestamp", "to_timestamp"))
        frames = torch.arange(length)
        times = frames if time_F is None else (time_F[start : start + length] * fps).round()
        if first < 0 or bool((times != frames).any()):  # also if one is NaN
            rise = f"timestamps of episode {episode} must begin at 0 and rise by 1/{fps:g} s, a frame of its video each"
            raise UserError(f"data set {path}: {rise}")
        if last - first < length:
            raise UserError(f"data set {path}: {file} has {last - first} frames of episode {episode}, needed: {length}")
        for number in range(length):
            wanted[file][first + number].append(start + number)
        start += length
    images: NDArray[np.uint8] | None = None
    for file, rows_by_frame in wanted.items():
        count, needed = 0, max(rows_by_frame) + 1
        for count, whole in zip(range(1, needed + 1), _frames(file, path), strict=False):
            frame = center_crop(whole, size)
            if images is None:
                images = np.empty((len(episode_F), *frame.shape), np.uint8)
            if frame.shape != images.shape[1:]:
                raise UserError(f"data set {path}: {key} has videos of several sizes, the first of another in {file}")
            if count - 1 in rows_by_frame:
                images[rows_by_frame[count - 1]] = frame
        if count < needed:
            raise UserError(f"data set {path}: {file} has {count} frames, its episodes need {needed}")
    assert images is not None, "a data set has frames"
    return torch.from_numpy(images)


def _places(path: Path, key: str) -> dict[int, dict[str, Any]]:
    """Return chunk_index, file_index, from_timestamp (s) and to_timestamp (s) of the video of each episode."""
    prefix = f"videos/{key}/"
    names = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    columns = ["episode_index", *(prefix + name for name in names)]
    with reading(path, f"from meta/episodes where {key} is"):
        files = sorted((path / "meta" / "episodes").glob("*/*.parquet"))
        rows = pa.concat_tables([pq.read_table(file, columns=columns) for file in files]).select(columns).to_pylist()
    return {row["episode_index"]: {name.removeprefix(prefix): row[name] for name in columns} for row in rows}


def _frames(file: Path, path: Path) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames of a video as they are stored, none dropped or repeated, uint8 [h, w, 3]."""
    if not file.is_file():
        raise UserError(f"data set {path}: the video {file} is missing")
    decoder = imageio_ffmpeg.read_frames(str(file), pix_fmt="rgb24", output_params=["-fps_mode", "passthrough"])
    try:
        width, height = next(decoder)["size"]
        for frame in decoder:
            yield np.frombuffer(frame, np.uint8).reshape(height, width, 3)
    except (OSError, RuntimeError, StopIteration) as error:
        raise UserError(f"data set {path}: the video {file} cannot be decoded") from error
    finally:
        decoder.close()
