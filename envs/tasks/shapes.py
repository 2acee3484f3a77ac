"""Check shapes and kinds of what a task returns, once for each task, and that its numbers are finite, always."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.tasks.base import Task


def check_shapes(task: Task, num_envs: int) -> None:
    """Raise UserError for what a task returns that the pool cannot use. Does nothing after the first call.

    The task is reset already. Shapes and kinds never change later, so control steps do not check them.
    """
    if task.shapes_checked:
        return

    def check(what: str, value: Any, *rest: int, truth: bool = False) -> None:
        if not isinstance(value, Tensor) or value.shape != (num_envs, *rest):
            got = f"shape {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
            needed = ", ".join(map(str, ("N", *rest)))
            raise UserError(f"task {task.name}: {what}: got {got}, needed: [{needed}] with N = {num_envs}")
        if truth and value.dtype != torch.bool:
            raise UserError(f"task {task.name}: {what}: got numbers, needed: true or false (torch.bool)")
        if not torch.isfinite(value).all():
            raise UserError(f"task {task.name}: {what}: not finite at the start of an episode")

    success_N, failure_N = task.success(), task.failure()
    check("success()", success_N, truth=True)
    if failure_N is not None:
        check("failure()", failure_N, truth=True)
    for name, value in task.outcomes().items():
        check(f"outcomes()['{name}']", value, truth=True)
    rewards = task.rewards(success_N)
    if not isinstance(rewards, Mapping) or not rewards:
        got = "nothing" if isinstance(rewards, Mapping) else type(rewards).__name__
        raise UserError(f"task {task.name}: rewards(): got {got}, needed: a dictionary of at least one term")
    for name, value in rewards.items():
        check(f"rewards()['{name}']", value)
    read = task.observe() | task.privileged()
    for term in (quantity.term for quantity in (*task.observed(), *task.observed_by_critic())):
        check(f"Quantity '{term.name}'", read[term.name], term.size)
    task.shapes_checked = True


def check_finite(task: Task, values: Tensor) -> None:
    """Raise UserError that names what the task computed, if not all of ``values``, which follow from it, are finite."""
    if math.isfinite(values.sum()):
        return
    quantities = {f"Quantity '{name}'": value for name, value in (task.observe() | task.privileged()).items()}
    rewards = {f"rewards()['{name}']": value for name, value in task.rewards(task.success()).items()}
    for name, value in (quantities | rewards).items():
        broken_N = ~torch.isfinite(value).view(len(value), -1).all(1)
        if broken_N.any():
            envs = broken_N.nonzero()[:5, 0].tolist()
            raise UserError(f"task {task.name}: {name}: not finite in {int(broken_N.sum())} envs, such as {envs}")
