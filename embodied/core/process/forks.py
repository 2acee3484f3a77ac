"""Simulators with threads or processes, which a forked process lacks or shares with its parent."""

import os

from embodied.core.errors import UserError


class Builder:
    """The process that built environments, which alone may step them unless ``can_fork``."""

    def __init__(self, can_fork: bool = False) -> None:
        self._process, self._can_fork = os.getpid(), can_fork

    @property
    def here(self) -> bool:
        """Whether it is the present process."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise UserError in a process that was forked from it: a step would hang, or step the parent's envs."""
        if not (self.here or self._can_fork):
            raise UserError(
                f"process {self._process} built these environments and was forked: their threads and processes stayed "
                "there. Build them in the process that steps them, or start it by multiprocessing's method 'spawn'"
            )
