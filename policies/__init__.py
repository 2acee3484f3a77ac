"""Policies: torch modules that act and compute the likelihood of their decisions. Imports only embodied.core."""

from collections.abc import Callable

from embodied.core.policy import Policy
from embodied.core.registry import Registry
from embodied.core.spec import EnvSpec
from embodied.policies.categorical import CategoricalConfig, CategoricalPolicy
from embodied.policies.dsrl import DSRLConfig, DSRLPolicy
from embodied.policies.flow import FlowConfig, FlowPolicy
from embodied.policies.gaussian import GaussianConfig, GaussianPolicy
from embodied.policies.vla.config import VLAConfig

POLICIES: Registry[Callable[..., Policy]] = Registry("policy")
"""Builders, called as ``build(spec, config)`` with an EnvSpec and an instance of the entry's config dataclass."""


def build_vla(spec: EnvSpec, config: VLAConfig) -> Policy:
    """Build a VLAPolicy. transformers is imported only here, because importing it takes seconds."""
    from embodied.policies.vla.policy import VLAPolicy

    return VLAPolicy(spec, config)


POLICIES.register("gaussian", config=GaussianConfig)(GaussianPolicy)
POLICIES.register("flow", config=FlowConfig)(FlowPolicy)
POLICIES.register("dsrl", config=DSRLConfig)(DSRLPolicy)
POLICIES.register("categorical", config=CategoricalConfig)(CategoricalPolicy)
POLICIES.register("vla", config=VLAConfig)(build_vla)
POLICIES.register("vla_tiny", config=VLAConfig)(build_vla)

__all__ = [
    "POLICIES", "CategoricalConfig", "CategoricalPolicy", "DSRLConfig", "DSRLPolicy", "FlowConfig", "FlowPolicy",
    "GaussianConfig", "GaussianPolicy", "VLAConfig",
]  # fmt: skip
