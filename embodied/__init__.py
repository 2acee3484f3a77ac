"""Asynchronous reinforcement learning of robot policies: the platform's commands and runtime.

This is the import package of the distribution ``embodied-rl``. Another project on PyPI is called ``embodied`` and
installs the same import name; pip merges the two silently. Every command first checks ``__distribution__``. It
stops with a message unless it imported this package alone (``embodied.session.command.check_installation``).

The imports of a command take seconds. Python imports this package before it, and while it looks for ``python -m
embodied.<command>``, ``sys.argv`` is ``-m``. Ctrl-C then ends the process quietly until the command begins.

Torch's threads wait for each other without yielding, which slows them where another program has their cores. OpenMP
reads how long when torch is imported, so it is set here, unless the user has set it (docs/architecture.md, Threads).
"""

import os
import sys

from embodied.core.process.interrupts import end_on_interrupt

__distribution__ = "embodied-rl"

if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"
if sys.argv[:1] == ["-m"]:
    end_on_interrupt()
