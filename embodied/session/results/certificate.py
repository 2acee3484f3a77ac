"""The certificate of a run: the files that it is bound to, and whether it is of the last checkpoint. Imports no torch.

certificate.json, config.yaml, checkpoints/ ──► read_certificate ──► embodied.audit, the page of the run
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from embodied.deployment.bundle.format import sha256
from embodied.runtime.checkpoint import newest_first, steps_of
from embodied.session.config import CHANGEABLE
from embodied.session.files import CERTIFICATE_FILE, CONFIG_FILE, read_json


class Certificate(NamedTuple):
    """What ``certificate.json`` says. content: {} if there is none, or none that can be read."""

    content: dict[str, Any]
    doubt: str | None
    """Why it says nothing of the last checkpoint; None if it does, or if there is no file."""
    changed: list[str]
    """Files of the run that differ from those which were examined."""
    superseded: bool
    """Whether the run was trained further since."""


def read_certificate(run_dir: Path) -> Certificate:
    """Read a run's certificate and compare it with the run's files."""
    path = run_dir / CERTIFICATE_FILE
    content = read_json(path)
    if not all(isinstance(content.get(key), dict) for key in ("checks", "files")):
        return Certificate({}, f"{path} cannot be read" if path.exists() else None, [], False)
    folders, of = newest_first(run_dir / "checkpoints"), str(content.get("checkpoint"))
    if not folders or folders[0].name != of:
        last = folders[0].name if folders else "missing"
        superseded = bool(folders) and of[5:].isdecimal() and int(of[5:]) < steps_of(folders[0])
        return Certificate(content, f"{path} is of {of}, the last checkpoint is {last}", [], superseded)
    changed = sorted({name for name, _ in hashes(run_dir, folders[0]).items() ^ content["files"].items()})
    doubt = f"{', '.join(changed)} changed since {path} was written" if changed else None
    return Certificate(content, doubt, changed, False)


def hashes(run_dir: Path, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of what a certificate is about: the configuration and the files of a checkpoint.

    The lines of ``config.yaml`` that any resumed training may change, such as its limits, do not count.
    """
    lines = (run_dir / CONFIG_FILE).read_bytes().splitlines(keepends=True)
    kept = b"".join(line for line in lines if line.partition(b":")[0].decode() not in CHANGEABLE)
    files = {str(file.relative_to(run_dir)): sha256(file) for file in sorted(folder.iterdir())}
    return {CONFIG_FILE: hashlib.sha256(kept).hexdigest(), **files}
