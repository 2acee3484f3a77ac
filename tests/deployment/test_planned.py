"""A bundle as a policy of an evaluation."""

from __future__ import annotations

import torch

from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.robots.base import Unusable
from embodied.session.deployed.exporting import record
from embodied.session.deployed.planned import PlannedPolicy
from tests.deployment.exports import flow_bundle, random_policy, small_config


def test_arm_and_fingers_hold_where_an_observation_is_refused() -> None:
    runner, refuses = PolicyRunner(flow_bundle()), False

    class Planner:
        bundle = runner.bundle

        def plan(self, inputs):
            if refuses:
                raise Unusable("range", "a joint is out of its range")
            return runner.plan(inputs)

    config = small_config("pick_place", "flow", **{"policy.head_hidden": [16]})
    obs = {key: value[:3] for key, value in record(config, random_policy(config), 4).items()}
    policy = PlannedPolicy(Planner())
    planned, refuses = policy.plan(obs), True
    for _ in range(2):
        held = policy.plan(obs)
        assert not held[..., :-1].any()
        assert torch.equal(held[..., -1], planned[:, policy.execute - 1, -1:].expand(-1, policy.horizon))
