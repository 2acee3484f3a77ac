"""Policies: torch modules that act and compute the likelihood of their decisions. Imports only embodied.core."""

from embodied.policies.config import POLICIES

__all__ = ["POLICIES"]
