"""Certify a run: ``python -m embodied.audit <run dir>``

Shows again, on the last checkpoint and this machine, what the training claims (docs/runs.md, The certificate of a
run). The result is also written as certificate.json into the run directory, with the hashes of configuration and
checkpoint. If they have changed since an earlier certificate, or its checkpoint is gone, nothing else is examined.

Last line of stdout: {"run", "passed", "open", "checks": {<check>: {"passed", "value", "tolerance", "reason"}}, ...}; a
check that there was no time for is open, its "passed" is null. Exit code 1 if a check fails or a file has changed.
"""

import sys
import tempfile
import time
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from embodied.core.options import config_dataclass
from embodied.report.metrics import write_json
from embodied.runtime.checkpoint_names import newest, steps_of
from embodied.session.command import Failed, command
from embodied.session.config import read_run
from embodied.session.files import CERTIFICATE_FILE, check_run_dir, hashes, read_certificate


@config_dataclass
class AuditConfig:
    run: str


@command(first="run")
def main(options: AuditConfig) -> dict[str, Any]:
    """Examine a run; return its certificate. UserError for bad input, Failed with exit code 1 if a check fails."""
    run_dir = Path(options.run)
    check_run_dir(run_dir)
    last, (before, doubt, changed) = newest(run_dir), read_certificate(run_dir)
    of = str(before.get("checkpoint"))[len("step_") :]
    if doubt and of.isdecimal() and int(of) < steps_of(last):  # the run was trained further
        print(f"{doubt}, which is examined now", file=sys.stderr)
    elif doubt:
        result = {"run": str(run_dir), "passed": False, "open": [], "checks": {}, "changed": changed}
        raise Failed(
            f"{doubt}; remove {run_dir / CERTIFICATE_FILE} to examine the last checkpoint anew", result, code=1
        )
    certificate = certify(run_dir)
    if not certificate["passed"]:
        raise Failed(f"{run_dir} does not hold what it claims", certificate, code=1)
    return certificate


def certify(run_dir: Path, seconds: float = inf) -> dict[str, Any]:
    """Examine the last checkpoint of a run, tell the results on stderr; write and return the certificate.

    seconds: time for all checks. UserError if the run has no checkpoint, or one that cannot be read.
    """
    from embodied.runtime import checkpoint  # these import torch
    from embodied.session.results.machine import commit, machine
    from embodied.trainers.audit import CHECKS, Audit, examine, on_this_machine

    console, began = Console(stderr=True, highlight=False, soft_wrap=True), time.monotonic()
    config, found, checks = read_run(run_dir), checkpoint.load_last(run_dir), dict[str, Any]()
    files = hashes(run_dir, found.path)  # a training that goes on may replace the checkpoint meanwhile
    with tempfile.TemporaryDirectory() as folder:
        audit = Audit(on_this_machine(config), run_dir, found, Path(folder), seconds)
        for check in CHECKS:
            name, result = check.__name__.removeprefix("check_"), examine(audit, check)
            checks[name] = result._asdict()
            word = {True: "passes", False: "FAILED", None: "open"}[result.passed]
            value = "" if result.value is None else f"{result.value:.3g} "
            style = "bold red" if result.passed is False else ""
            console.print(Text(f"{name:18} {word:7} {value}{result.reason}", style))
    certificate = {
        "run": str(run_dir), "passed": all(result["passed"] is not False for result in checks.values()),
        "open": [name for name, result in checks.items() if result["passed"] is None], "checks": checks,
        "checkpoint": found.path.name, "files": files, "seconds": round(time.monotonic() - began, 1),
        "commit": commit(), "machine": machine(),
    }  # fmt: skip
    write_json(run_dir / CERTIFICATE_FILE, certificate)
    return certificate


if __name__ == "__main__":
    sys.exit(main())
