"""Damage to a file of a checkpoint, by default the policy's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def cut(folder: Path, file: str = "policy.pt") -> None:
    """Cut it short."""
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: len(data) // 2])


def flip(folder: Path, file: str = "policy.pt") -> None:
    """Flip one of its bits; its size stays."""
    data = bytearray((folder / file).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / file).write_bytes(data)


def remove(folder: Path, file: str = "policy.pt") -> None:
    (folder / file).unlink()


def replace(folder: Path, data: bytes, file: str = "policy.pt") -> None:
    """Replace it and its entry in the manifest, so that only its content is wrong."""
    (folder / file).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
