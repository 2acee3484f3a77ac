"""A user's own packages called envs or policies are not touched by ours, which are below ``embodied``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_packages_of_a_user_are_their_own(root: Path, tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    for name in ("envs/__init__.py", "envs/mine.py", "policies.py"):
        (tmp_path / name).write_text("mine = True")
    code = "import embodied.envs, envs.mine, policies\nassert envs.mine.mine and policies.mine"
    code = f"import sys\nsys.path.insert(1, {str(root)!r})\nimport embodied\nsys.path.remove({str(root)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
