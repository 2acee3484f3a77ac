"""Policies: torch modules that act and tell the likelihood of how they acted. Imports only embodied.core."""

from collections.abc import Callable

from embodied.core.protocols import Policy
from embodied.core.registry import Registry
from policies.dsrl import DSRLConfig, DSRLPolicy
from policies.flow import FlowConfig, FlowPolicy
from policies.gaussian import GaussianConfig, GaussianPolicy

POLICIES: Registry[Callable[..., Policy]] = Registry("policy")
"""Builders called as ``build(spec, config)``, spec an EnvSpec and config an instance of the entry's dataclass."""

POLICIES.register("gaussian", config=GaussianConfig)(GaussianPolicy)
POLICIES.register("flow", config=FlowConfig)(FlowPolicy)
POLICIES.register("dsrl", config=DSRLConfig)(DSRLPolicy)

__all__ = [
    "POLICIES",
    "DSRLConfig",
    "DSRLPolicy",
    "FlowConfig",
    "FlowPolicy",
    "GaussianConfig",
    "GaussianPolicy",
]
