"""Makes three pictures: ``python docs/images/deployment.py bundle=<bundle> report=<report>``

    mapping.png     poses that a mapping means, with mistakes in it and without
    report.png      the page of a deployment in a real browser (chromium)
    deployment.png  six moments of its film

The report is one of ``embodied.deploy bundle=… lockstep=true episodes=10 latency_ms=20 perturbation=real report=…``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from PIL import Image, ImageDraw

from embodied.core.config import parse_overrides
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.robots.setup import draw_poses, poses

HERE = Path(__file__).parent
MOMENTS, GAP = 6, 2
PAGE = (900, 1500)  # pixels


def mapping(bundle: Bundle) -> Image.Image:
    """Rows as ``propose_mapping`` draws them: mistakes of a mapping in both poses, and all joints right."""
    default, second = poses(bundle.arms).values()
    flipped = np.where(np.arange(len(default)) == 0, -1, 1)
    turned = np.where(np.arange(len(default)) == 6, 1.0, 0.0)
    drawings = {
        "joint1 has the wrong sign, and the default pose looks right": (default * flipped, default),
        "the second pose shows it: blue, the robot as the mapping reads it, is not where the robot is (red)":
            (second * flipped, second),
        "joint7 is off by 1 rad: the hand points elsewhere": (second + turned, second),
        "all right": (second + 0.01, second),
    }  # fmt: skip
    rows = []
    for text, (now, wanted) in drawings.items():
        drawn = Image.fromarray(draw_poses(bundle.arms, {"now": now, "wanted": wanted}))
        row = Image.new("RGB", (drawn.width, drawn.height + 18), "white")
        ImageDraw.Draw(row).text((6, 3), text, fill="black")
        row.paste(drawn, (0, 18))
        rows.append(np.asarray(row))
    return Image.fromarray(np.concatenate(rows))


def film(video: Path) -> Image.Image:
    """MOMENTS frames of a video, side by side in two rows."""
    reader: Any = imageio_ffmpeg.read_frames(str(video))
    width, height = next(reader)["size"]
    frames = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    chosen = [frames[i] for i in np.linspace(0, len(frames) - 1, MOMENTS).round().astype(int)]
    tiles = [np.pad(frame, ((GAP, GAP), (GAP, GAP), (0, 0)), constant_values=255) for frame in chosen]
    half = MOMENTS // 2
    return Image.fromarray(np.concatenate([np.concatenate(tiles[:half], 1), np.concatenate(tiles[half:], 1)]))


def page(report: Path) -> Image.Image:
    """The page in a browser, to the end of its last picture."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        size = f"--window-size={PAGE[0]},{PAGE[1]}"
        address = (report / "report.html").resolve().as_uri()
        wait = "--timeout=20000"  # ms, for the film to load
        words = ["--headless", "--no-sandbox", "--hide-scrollbars", wait, size, f"--screenshot={picture}", address]
        subprocess.run(["chromium", *words], check=True, capture_output=True, timeout=300)
        return Image.open(picture).convert("RGB")


def main() -> None:
    options = parse_overrides(sys.argv[1:])
    bundle, report = read_bundle(Path(options["bundle"])), Path(options["report"])
    mapping(bundle).save(HERE / "mapping.png", optimize=True)
    film(report / "video.mp4").save(HERE / "deployment.png", optimize=True)
    page(report).quantize(64).save(HERE / "report.png", optimize=True)


if __name__ == "__main__":
    main()
