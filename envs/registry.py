"""The registry of tasks. Import ``envs`` to have it filled."""

from embodied.core.registry import Registry
from envs.tasks.base import Task

TASKS: Registry[type[Task]] = Registry("task")
