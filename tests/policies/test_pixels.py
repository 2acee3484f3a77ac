"""Policies with small networks that see: exact likelihoods, and what the convolutions compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec, Discrete, EnvSpec, Instruction
from embodied.core.types import Obs
from embodied.policies.categorical import CategoricalPolicy
from embodied.policies.config import CategoricalConfig, GaussianConfig
from embodied.policies.gaussian import GaussianPolicy
from embodied.policies.pixels import PixelEncoder
from tests.algos import fragments

NUM, SIZE = 64, 40
CAMERAS = (CameraSpec.square("left", SIZE), CameraSpec.square("right", SIZE))
ARM = replace(EnvSpec.of_sizes("arm", state=5, privileged=3, action=2), cameras=CAMERAS)
GAME = replace(ARM, action=Discrete(("a", "b", "c")))
Seeing = GaussianPolicy | CategoricalPolicy
both = pytest.mark.parametrize("name", ["gaussian", "categorical"])


def build(name: str, spec: EnvSpec | None = None, grey: bool = False) -> Seeing:
    torch.manual_seed(0)
    options = {"cameras": ("left", "right"), "image_size": SIZE, "grey": grey}
    widths = {"actor_hidden": (16,), "critic_hidden": (16,)}
    policy: Seeing
    if name == "gaussian":
        policy = GaussianPolicy(spec or ARM, GaussianConfig(**options, **widths))
    else:
        policy = CategoricalPolicy(spec or GAME, CategoricalConfig(**options, **widths))
    with torch.no_grad():
        policy.actor[-1].weight.normal_(0.0, 0.5)
    return policy


def observe(num: int = NUM) -> Obs:
    generator = torch.Generator().manual_seed(1)
    state, privileged = (torch.randn(num, size, generator=generator) for size in (5, 3))
    numbers = {"state": state, "privileged": privileged}
    return numbers | {
        f"images.{camera.name}": torch.randint(0, 256, (num, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)
        for camera in CAMERAS
    }


def noise(policy: Seeing, num: int) -> torch.Tensor:
    return torch.randn(num, *policy.noise_shape, generator=torch.Generator().manual_seed(2))


@both
@pytest.mark.parametrize("grey", [False, True])
def test_likelihood_and_value_depend_on_state_and_all_images(name: str, grey: bool) -> None:
    policy, obs = build(name, grey=grey), observe()
    sample = policy.act(obs, noise(policy, NUM))
    evaluation = policy.evaluate(obs, sample.chain)
    torch.testing.assert_close(evaluation.log_prob_B, sample.log_prob_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.value_B, sample.value_N, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(policy.value(obs), sample.value_N, atol=1e-6, rtol=1e-5)
    for key in ("state", "images.left", "images.right"):
        other = policy.evaluate(obs | {key: obs[key].flip(0)}, sample.chain)
        assert (other.log_prob_B - sample.log_prob_N).abs().max() > 1e-4, key
        assert (other.value_B - sample.value_N).abs().max() > 1e-4, key


@both
@pytest.mark.parametrize("grey", [False, True])
def test_inputs_are_the_state_and_convolutions_of_scaled_pixels(name: str, grey: bool) -> None:
    policy, obs = build(name, grey=grey), observe()
    assert policy.encoder is not None
    images = [obs[f"images.{camera.name}"] / 255 for camera in CAMERAS]
    pixels = torch.cat([image.mean(-1, keepdim=True) if grey else image for image in images], -1).movedim(-1, 1)
    pixels = F.pad(pixels, (0, 4, 0, 4))  # 44 is the next size that the strides cover
    for convolution in (layer for layer in policy.encoder.layers if isinstance(layer, torch.nn.Conv2d)):
        pixels = F.conv2d(pixels, convolution.weight, convolution.bias, convolution.stride).relu()
    expected = torch.cat((policy.normalized_state(obs), pixels.flatten(1)), -1)
    torch.testing.assert_close(policy.inputs(obs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [36, 37, 42, 43, 44, 64, 84])
def test_every_pixel_counts(size: int) -> None:
    """The strides leave none out at the right and the lower edge: the paddle of Pong is there."""
    encoder = PixelEncoder(GaussianConfig(cameras=("eye",), image_size=size))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (1, size, size, 3), dtype=torch.uint8, generator=generator)
    seen = encoder({"images.eye": images})
    assert seen.shape == (1, encoder.size)
    for row, column in ((size - 1, 0), (0, size - 1), (size - 1, size - 1), (size // 2, size - 1)):
        changed = images.clone()
        changed[0, row, column] = 255 - changed[0, row, column]
        assert (encoder({"images.eye": changed}) - seen).abs().max() > 0, (row, column)


@both
def test_policy_and_value_loss_both_train_the_convolutions(name: str) -> None:
    policy, obs = build(name), observe()
    assert policy.encoder is not None
    evaluation = policy.evaluate(obs, policy.act(obs, noise(policy, NUM)).chain)
    weights = list(policy.encoder.parameters())
    for loss in (evaluation.log_prob_B.sum(), evaluation.value_B.sum()):
        assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(loss, weights, retain_graph=True))


@both
def test_the_first_ratio_is_one(name: str) -> None:
    policy = build(name)
    algorithm = PPO(policy, PPOConfig(learning_rate=0.0, epochs=1), seed=0, device=torch.device("cpu"))
    metrics = algorithm.update([fragments.rollout(policy, seed=0, version=0, rows=observe())], 0)
    assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)


@both
def test_a_plan_needs_neither_critic_nor_what_is_privileged(name: str) -> None:
    policy, obs = build(name), observe()
    plan = policy.plan(obs)
    del policy.critic
    assert torch.equal(policy.plan({key: value for key, value in obs.items() if key != "privileged"}), plan)


def test_cameras_are_named_once() -> None:
    with pytest.raises(UserError, match=r"cameras: got \['left', 'left'\], allowed: each camera once"):
        CategoricalConfig(cameras=("left", "left"))


@both
def test_tasks_of_several_goals_need_a_policy_that_reads(name: str) -> None:
    goals = Instruction("red", goal="red"), Instruction("blue", goal="blue")
    spec = replace(ARM if name == "gaussian" else GAME, instructions=goals)
    with pytest.raises(UserError, match=r"instructions of task arm name one of several goals.* use policy=vla"):
        build(name, spec)
