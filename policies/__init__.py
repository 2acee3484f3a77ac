"""Policies: torch modules that act and compute the likelihood of their decisions. Imports only embodied.core."""

from typing import TYPE_CHECKING

from embodied.core.lazy import lazy_names
from embodied.policies.config import POLICIES, CategoricalConfig, DSRLConfig, FlowConfig, GaussianConfig, VLAConfig

if TYPE_CHECKING:
    from embodied.policies.categorical import CategoricalPolicy
    from embodied.policies.dsrl import DSRLPolicy
    from embodied.policies.flow.policy import FlowPolicy
    from embodied.policies.gaussian import GaussianPolicy
else:
    __getattr__ = lazy_names(
        __name__,
        {"CategoricalPolicy": "categorical", "DSRLPolicy": "dsrl", "FlowPolicy": "flow.policy",
         "GaussianPolicy": "gaussian"},
    )  # fmt: skip

__all__ = [
    "POLICIES", "CategoricalConfig", "CategoricalPolicy", "DSRLConfig", "DSRLPolicy", "FlowConfig", "FlowPolicy",
    "GaussianConfig", "GaussianPolicy", "VLAConfig",
]  # fmt: skip
