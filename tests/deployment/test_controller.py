"""The runner's control law and state vector are those of the simulated arm that policies were trained with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.arm import Chain
from embodied.core.errors import UserError
from embodied.core.spec import SUCCESS, Difference, Term
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.control.arm import ArmController, StateBuilder
from embodied.deployment.robots.base import joint_names
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.tasks.base import Quantity
from tests.deployment.exports import flow_bundle

CONTROLS = [{}, {"rotation": True}, {"mode": "joint_delta"}]


def wandering_pool(task: str, control: dict[str, object], num_envs: int = 6) -> MujocoPool:
    """Return a pool after some random actions."""
    pool = make_pool(task, {"control": control}, num_envs=num_envs)
    pool.reset(make_sampler(pool, seed=3))
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        pool.step(2 * torch.rand(num_envs, 1, pool.spec.action_dim, generator=generator) - 1)
    return pool


@pytest.mark.parametrize("control", CONTROLS)
def test_targets_are_those_of_training(control: dict[str, object]) -> None:
    pool = wandering_pool("pick_place", control)
    arm, action = pool.spec.arm, pool.spec.action
    assert arm is not None
    controller = ArmController(arm, action.terms)
    scale, offset = (np.array([getattr(term, name) for term in action.terms]) for name in ("scale", "offset"))
    chosen = 2 * torch.rand(6, pool.spec.action_dim, generator=torch.Generator().manual_seed(1)).double().numpy() - 1
    joints = len(arm.joints)
    qpos, before = pool.arm.qpos[:, :joints].copy(), pool.arm.ctrl.copy()
    pool.arm.apply(chosen, None)
    for n in range(6):
        targets, finger = controller.targets(chosen[n] * scale + offset, qpos[n], before[n, joints])
        np.testing.assert_allclose(targets, pool.arm.ctrl[n, :joints], atol=1e-9)
        np.testing.assert_allclose(finger, pool.arm.ctrl[n, joints], atol=1e-12)


def test_forward_kinematics_and_jacobian_are_those_of_the_engine() -> None:
    pool = wandering_pool("reach", {})
    assert pool.spec.arm is not None
    chain = Chain(pool.spec.arm)
    for n in range(6):
        position, rotation, jacobian = chain.tool(pool.arm.qpos[n, :7])
        np.testing.assert_allclose(position, pool.view.tcp_pos[n], atol=1e-12)
        np.testing.assert_allclose(rotation.ravel(), pool.view.tcp_mat[n], atol=1e-12)
        np.testing.assert_allclose(jacobian, pool.arm.jacobian()[..., n], atol=1e-12)


@pytest.mark.parametrize("task", ["reach", "detour", "push", "lift", "pick_place", "stack", "tabletop"])
def test_differences_of_terms_are_what_the_task_observes(task: str) -> None:
    pool = wandering_pool(task, {})
    obs = pool.observe()["state"].double()
    assert SUCCESS in pool.spec.outcomes
    parts, first = {}, 0
    for term in pool.spec.state:
        parts[term.name] = obs[:, first : first + term.size] / term.scale
        first += term.size
    found = [term for term in pool.spec.state if term.difference is not None]
    assert found
    for term in found:
        padded = [
            torch.nn.functional.pad(value, (0, 3 - value.shape[1]))
            for value in (parts[term.difference.of], parts[term.difference.minus])
        ]
        offset = torch.tensor([*term.difference.offset, 0, 0, 0][:3])
        torch.testing.assert_close(
            (padded[0] + offset - padded[1])[:, : term.size], parts[term.name], atol=1e-6, rtol=0
        )


def test_missing_entries_of_an_offset_are_zeros_in_the_simulator_and_on_a_robot() -> None:
    term = Term("gap", 3, "m", source="external", difference=Difference("a", "b", (0.1,)))
    parts = {"a": np.zeros((2, 3)), "b": np.ones((2, 3))}
    tensors = {name: torch.from_numpy(part) for name, part in parts.items()}
    ours = Quantity(term).derive(tensors, wandering_pool("reach", {}).view)
    np.testing.assert_allclose(ours.numpy(), term.derive(parts))
    np.testing.assert_allclose(ours[0], [-0.9, -1, -1])


def observation_of(pool: MujocoPool, n: int) -> dict[str, float]:
    """Return what a robot would report of env n, by the names of embodied.deployment.robots.base."""
    arms = pool.spec.arms
    measured = zip(
        [*joint_names(arms), *joint_names(arms, "vel")],
        [*pool.arm.joint_pos[n].tolist(), *pool.arm.joint_vel[n].tolist()],
        strict=True,
    )
    observation = dict(measured) | {"gripper.pos": float(pool.arm.finger_qpos[n].mean())}
    quantities = pool.task.observe()
    for term in pool.spec.state:
        if term.source == "external" and term.difference is None:
            observation |= dict(zip(term.entry_names, quantities[term.name][n].tolist(), strict=True))
    return observation


def test_the_state_of_a_robot_is_that_of_the_simulation() -> None:
    bundle = read_bundle(flow_bundle())
    pool = wandering_pool("pick_place", {})
    builder = StateBuilder(bundle)
    scale = np.array([term.scale for term in bundle.state for _ in range(term.size)])
    obs = pool.observe()["state"].numpy()
    for n in range(6):
        observation = observation_of(pool, n)
        assert set(builder.needed) == set(observation)
        state = builder.state(observation, float(pool.arm.finger_targets[n, 0])) * scale
        same = [name not in ("fingers[0]", "fingers[1]") for name in pool.spec.state_names]
        np.testing.assert_allclose(state[same], obs[n][same], atol=2e-6)
        np.testing.assert_allclose(
            builder.chains[""].tool(builder.qpos(observation))[0], pool.view.tcp_pos[n], atol=1e-9
        )


def test_a_missing_or_bad_measurement_is_named() -> None:
    builder = StateBuilder(read_bundle(flow_bundle()))
    observation = observation_of(wandering_pool("pick_place", {}), 0)
    with pytest.raises(UserError, match=r"not finite in joint3.vel"):
        builder.state(observation | {"joint3.vel": float("nan")}, 0.04)
    del observation["joint2.pos"]
    with pytest.raises(UserError, match=r"lacks joint2.pos"):
        builder.state(observation, 0.04)
