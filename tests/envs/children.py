"""Objects in child processes, for tests of ``embodied.core.process.child``."""

from __future__ import annotations

import os
import signal
from typing import Any

from embodied.core.errors import UserError


class Answers:
    """Answers, refuses and crashes as asked."""

    def double(self, number: int) -> int:
        print("a print goes nowhere near the parent's output")
        return 2 * number

    def refuse(self) -> None:
        raise UserError("key: got\n1")

    def fail(self) -> None:
        raise RuntimeError("out of luck")

    def describe(self, _: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)
