"""Machine and software that a figure was measured with."""

import os
import platform
import re
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import embodied
from embodied.runtime import threads

PACKAGES = ("mujoco", "torch", "gymnasium", "envpool", "numpy", "transformers", "onnxruntime")


def machine() -> dict[str, Any]:
    """Describe machine and software. load_1min: mean number of busy processes in the last minute."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": threads.available_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES if find_spec(package)},
    }


def commit() -> str | None:
    """Return the commit of this code, with ``-dirty`` if files were changed since; None outside its repository."""
    found = ""
    for words in ("ls-files --error-unmatch __init__.py", "describe --always --dirty --abbrev=40 --exclude=*"):
        command = ["git", "-C", str(Path(embodied.__file__).parent), *words.split()]
        try:
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None
    return found
