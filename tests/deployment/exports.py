"""Bundles of small policies with random weights, exported as the command does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import nn

from embodied.deployment.bundle.description import Bundle, Origin
from embodied.session.config import RunConfig, compose_run
from embodied.session.deployed.exporting import bundle_source, export_bundle, record
from embodied.session.factories import make_policy, make_spec

SMALL = {"policy.critic_hidden": [16], "num_envs": 4, "total_steps": 100, "device": "cpu"}
NETWORKS = {"policy.actor_hidden": [32, 32]}
ORIGIN = Origin("task", "policy", "runs/x", "step_1", 1, 0.5, {})


def small_config(task: str, policy: str, **options: object) -> RunConfig:
    """Return the configuration of a run with a small policy."""
    networks = {} if policy.startswith("vla") else NETWORKS
    chunk = {"policy.denoise_steps": 4, "policy.horizon": 4, "policy.execute": 4} if policy == "flow" else {}
    return compose_run({"task": task, "policy": policy, **SMALL, **networks, **chunk, **options})


def random_policy(config: RunConfig) -> nn.Module:
    """Return a policy with random weights and a fitted normaliser, which acts differently in different states."""
    torch.manual_seed(1)
    policy = make_policy(config, make_spec(config))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    state = record(config, policy, 4)["state"]
    policy.fit_normalizer({"state": state + 0.2 * torch.randn_like(state)})  # no feature is constant
    return policy


def write_small(path: Path, config: RunConfig, layout: str = "onnx") -> tuple[Bundle, nn.Module]:
    """Write the bundle of a random policy; return its description and the policy."""
    policy = random_policy(config)
    path.mkdir(parents=True, exist_ok=True)
    return export_bundle(path, bundle_source(config, policy, ORIGIN, 4), layout), policy


@cache
def flow_bundle() -> Path:
    """Return the bundle of a small flow policy for pick_place. Read-only: copy it to change it."""
    path = Path(mkdtemp(prefix="bundle-"))
    write_small(path, small_config("pick_place", "flow", **{"policy.head_hidden": [16]}))
    return path
