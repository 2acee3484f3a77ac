"""Asynchronous reinforcement learning of robot policies: the platform's commands and runtime.

This is the import package of the distribution ``embodied-rl``. Another project on PyPI is called ``embodied`` and
installs the same import name; pip merges the two silently. Every command first checks ``__distribution__``. It
stops with a message unless it imported this package alone (``embodied.run.command.check_installation``).
"""

__distribution__ = "embodied-rl"
