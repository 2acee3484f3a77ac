"""Files of a run that other processes read: its lock and its state. Imports no torch.

training: lock_run, Journal ──► .lock, state.json, warnings.log ──► session/results/state.py: lock_owner, read_json
embodied.audit ──► certificate.json ──► read_certificate: is it of the last checkpoint?
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from embodied.core.config import GROUPS
from embodied.core.errors import UserError, one_line
from embodied.core.user_files import sha256
from embodied.report.metrics import write_json
from embodied.runtime.checkpoint_names import newest_first
from embodied.session.command import Stopped

CERTIFICATE_FILE = "certificate.json"
CHANGEABLE = ("total_steps", "max_minutes", "stop_at_success", "eval_episodes", "checkpoint_minutes")
"""Keys of a run that may change when it is resumed, as options of algo and runtime may."""
CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
STATE_FILE = "state.json"
WARNINGS_FILE = "warnings.log"
LOCK_PAUSES_S = (0.1, 0.1)  # between tries: a reader holds the lock for an instant (``lock_owner``)


def check_run_dir(run_dir: Path) -> None:
    """Raise UserError if a directory is not that of a run."""
    if not (run_dir / CONFIG_FILE).is_file():
        kind = "has no config.yaml, so it is not a run directory" if run_dir.is_dir() else "is not a directory"
        raise UserError(f"'{run_dir}' {kind}: give the directory that train wrote, such as runs/reach/flow-ppo-...")


def read_sections(run_dir: Path) -> dict[str, Any]:
    """Read the ``config.yaml`` of a run of any version; only its form is checked. UserError, in one line."""
    path = run_dir / CONFIG_FILE
    check_run_dir(run_dir)
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error
    config = {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
    parts = [config.get(group) for group in GROUPS if group == "task" or group in config]
    named = all(isinstance(part, dict) and isinstance(part.get("name"), str) for part in parts)
    limits = [config.get(key) for key in ("total_steps", "max_minutes")]
    if not named or not all(isinstance(limit, int | float | None) for limit in limits):
        raise UserError(f"{path} is not the configuration of a run")
    return config


def check_new_dir(path: Path, hint: str = "") -> None:
    """Raise UserError if ``out=path`` exists, which ``hint`` is added to, or cannot be made. Nothing is left behind."""
    try:
        if path.exists():
            raise UserError(f"out={path} exists; give a new directory{hint}")
        parent = next(folder for folder in path.parents if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=parent))
    except OSError as error:
        raise UserError(f"out={path} cannot be written: {error.strerror or error}") from error


def lock_run(run_dir: Path) -> TextIO:
    """Lock the directory for this training; closing the returned file, or the end of the process, unlocks it.

    UserError, which names the process and its machine, if another training holds the lock. The lock is advisory
    (flock), and has no effect on file systems that do not support it.
    """
    try:
        file = (run_dir / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write into the run directory {run_dir}: {error.strerror or error}") from error
    for pause_s in (*LOCK_PAUSES_S, None):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if pause_s is None:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise UserError(f"{run_dir} is being trained by {holder}: stop it, or wait for its end") from None
            time.sleep(pause_s)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # of a file system without locks
                raise
            break
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def lock_owner(run_dir: Path) -> str | None:
    """Return the process that trains in a directory, and its machine; None if there is none or it cannot be known."""
    with suppress(OSError), (run_dir / LOCK_FILE).open(encoding="utf-8") as file:  # no file, or no locks
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another process"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; {} if the file is missing or has no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_certificate(run_dir: Path) -> tuple[dict[str, Any], str | None, list[str]]:
    """Return the certificate of a run, {} without one; why it says nothing of the last checkpoint; what has changed.

    The reason is None if there is no certificate. The last are names of files that differ from those examined.
    """
    path = run_dir / CERTIFICATE_FILE
    content = read_json(path)
    if not all(isinstance(content.get(key), dict) for key in ("checks", "files")):
        return {}, f"{path} cannot be read" if path.exists() else None, []
    last = [*newest_first(run_dir / "checkpoints"), Path("missing")][0]
    if last.name != content.get("checkpoint"):
        return content, f"{path} is of {content.get('checkpoint')}, the last checkpoint is {last.name}", []
    changed = sorted({name for name, _ in hashes(run_dir, last).items() ^ content["files"].items()})
    return content, f"{', '.join(changed)} changed since {path} was written" if changed else None, changed


def hashes(run_dir: Path, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of what a certificate is about: the configuration and the files of a checkpoint.

    The lines of ``config.yaml`` that any resumed training may change, such as its limits, do not count.
    """
    lines = (run_dir / CONFIG_FILE).read_bytes().splitlines(keepends=True)
    kept = b"".join(line for line in lines if line.partition(b":")[0].decode() not in CHANGEABLE)
    files = {str(file.relative_to(run_dir)): sha256(file) for file in sorted(folder.iterdir())}
    return {CONFIG_FILE: hashlib.sha256(kept).hexdigest(), **files}


class Journal:
    """State of a session in ``state.json``, and the warnings of all parts in ``warnings.log``; a context manager.

    States: training, evaluating, and at the end finished, interrupted or failed. total_steps: where training ends.
    """

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        self._run_dir = run_dir
        self._entry: dict[str, Any] = {
            "state": None, "process": os.getpid(), "machine": socket.gethostname(), "began": _now(), "ended": None,
            "total_steps": total_steps, "error": None,
        }  # fmt: skip
        self._opened = ExitStack()

    def enter(self, state: str, **entries: Any) -> None:
        """Write that the session is in another state now, with further entries."""
        self._entry |= {"state": state, **entries}
        write_json(self._run_dir / STATE_FILE, self._entry)

    def __enter__(self) -> Self:
        self.enter("training")
        root = logging.getLogger()
        kept = logging.FileHandler(self._run_dir / WARNINGS_FILE, delay=True, encoding="utf-8")
        kept.setLevel(logging.WARNING)
        kept.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        shown = [] if root.handlers or logging.lastResort is None else [logging.lastResort]  # any handler replaces it
        for handler in (kept, *shown):
            root.addHandler(handler)
            self._opened.callback(root.removeHandler, handler)
        self._opened.callback(kept.close)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._opened.close()
        if error is None:
            self.enter("finished", ended=_now())
            return
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        message = None if stopped else f"{type(error).__name__}: {one_line(error)}"
        with suppress(OSError):  # a full disk, which ``error`` is about
            self.enter("interrupted" if stopped else "failed", ended=_now(), error=message)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
