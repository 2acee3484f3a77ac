"""Check the shapes of what a task returns, once for each task."""

from typing import Any

from torch import Tensor

from embodied.core.errors import UserError
from embodied.envs.tasks.base import Task


def check_shapes(task: Task, num_envs: int) -> None:
    """Raise UserError for what a task returns in a shape that the pool cannot use. Does nothing after the first call.

    The task is reset already. Shapes never change later, so control steps do not check them.
    """
    if task.shapes_checked:
        return

    def check(what: str, value: Any, *rest: int) -> None:
        if not isinstance(value, Tensor) or value.shape != (num_envs, *rest):
            got = f"shape {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
            needed = ", ".join(map(str, ("N", *rest)))
            raise UserError(f"task {task.name}: {what}: got {got}, needed: [{needed}] with N = {num_envs}")

    success_N, failure_N = task.success(), task.failure()
    check("success()", success_N)
    if failure_N is not None:
        check("failure()", failure_N)
    for method, returned in (("rewards", task.rewards(success_N)), ("outcomes", task.outcomes())):
        for name, value in returned.items():
            check(f"{method}()['{name}']", value)
    read = task.observe() | task.privileged()
    for term in (quantity.term for quantity in (*task.observed(), *task.observed_by_critic())):
        check(f"Quantity '{term.name}'", read[term.name], term.size)
    task.shapes_checked = True
