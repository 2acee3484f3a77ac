"""What the policy of a run observes and commands, in words beside its weights: an environment of others can change."""

from pathlib import Path

from embodied.core.errors import UserError
from embodied.core.spec import Box, EnvSpec
from embodied.report.metrics import write_json
from embodied.session.files import read_json

INTERFACE_FILE = "interface.json"


def interface(spec: EnvSpec) -> dict[str, str]:
    """Return the size of each term of the state, and the range or the choices of each entry of an action, by name."""
    parts = {f"state '{term.name}'": f"{term.size} numbers" for term in spec.state}
    if isinstance(spec.action, Box):
        ranges = {term.name: (term.offset - term.scale, term.offset + term.scale) for term in spec.action.terms}
        return parts | {f"action '{name}'": f"{low:g} to {high:g}" for name, (low, high) in ranges.items()}
    choices = zip(spec.action.entry_names, spec.action.counts, strict=True)
    return parts | {f"action '{name}'": f"{count} choices" for name, count in choices}


def keep_interface(run_dir: Path, spec: EnvSpec) -> None:
    """Write the interface of a run that has none yet."""
    if not (run_dir / INTERFACE_FILE).exists():
        write_json(run_dir / INTERFACE_FILE, interface(spec))


def changed(run_dir: Path, spec: EnvSpec) -> str:
    """Return how a task differs from when the run began, in one part; empty if it does not.

    Runs of earlier versions have not kept that.
    """
    then, now = read_json(run_dir / INTERFACE_FILE), interface(spec)
    for name in then | now if then else ():
        if then.get(name) != now.get(name):
            return f"{name} was {then.get(name, 'not there')}, is {now.get(name, 'not there')}"
    return ""


def check_interface(run_dir: Path, spec: EnvSpec) -> None:
    """Raise UserError unless a task is as when the run began."""
    if change := changed(run_dir, spec):
        raise UserError(f"task {spec.task} has changed since {run_dir} began: {change}; train anew, or undo it")
