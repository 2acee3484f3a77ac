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

COMMANDS = ("train", "eval", "status", "tasks", "collect", "convert", "export", "deploy", "serve", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. argv: None is ``sys.argv[1:]``."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["help"]
    if name in ("help", "-h", "--help"):
        listed = "\n".join([__doc__, *(f"  {command:10}{_purpose(command)}" for command in COMMANDS)])
        return run_command(lambda _: {}, listed, ["--help"])
    if name not in COMMANDS:
        print(f"error: {unknown_name('command', name, COMMANDS)}", file=sys.stderr)
        return 2
    end_on_interrupt()
    code: int = importlib.import_module(f"embodied.{name}").main(words)
    return code


def _purpose(command: str) -> str:
    """Return what a command does, the start of its module's docstring, without importing it."""
    source = (Path(__file__).parent / f"{command}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition(":")[0]


if __name__ == "__main__":
    sys.exit(main())
