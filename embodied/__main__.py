"""All commands: ``embodied <command> [words]``, which is ``python -m embodied.<command> [words]``

embodied                    this list
embodied train pick_place   a first word without = is the obvious key: here task=pick_place
embodied eval runs/a        run=runs/a
embodied <command> --help   options of a command
"""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from embodied.core.errors import unknown_name
from embodied.core.process.interrupts import end_on_interrupt
from embodied.session.command import run_command

COMMANDS = (
    "train", "eval", "compare", "replay", "audit", "status", "report", "tasks", "collect", "preflight",
    "convert", "export", "deploy", "serve", "bench",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. argv: None is ``sys.argv[1:]``."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["help"]
    if name in ("help", "-h", "--help"):
        purposes = {command: _docstring(command).partition(":")[0] for command in COMMANDS}
        listed = "\n".join([__doc__, *(f"  {command:10}{purpose}" for command, purpose in purposes.items())])
        return run_command(lambda _: {}, listed, ["--help"])
    if name not in COMMANDS:
        print(f"error: {unknown_name('command', name, COMMANDS)}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & {*words}:
        return run_command(lambda _: {}, _docstring(name), ["--help"])  # without the command's imports
    end_on_interrupt()
    code: int = importlib.import_module(f"embodied.{_module(name)}").main(words)
    return code


def _docstring(command: str) -> str:
    """Return the docstring of a command's module without importing it."""
    source = Path(__file__).parent.joinpath(*_module(command).split(".")).with_suffix(".py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def _module(command: str) -> str:
    return "report.__main__" if command == "report" else command  # embodied/report/ is a library too


if __name__ == "__main__":
    sys.exit(main())
