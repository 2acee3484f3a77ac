"""PPO of torchrl's parts: its env, collector, advantage and loss, in the loop of its documentation."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import VecNormV2
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from embodied.benchmarks.peers.meter import Finished, MeteredEnv, PPOSettings
from embodied.core.spec import Box, Discrete, EnvSpec


class TorchRLEnv(EnvBase):
    """torchrl's view of N envs: a step shows last observations, and a reset of ended rows those that follow."""

    def __init__(self, env: MeteredEnv) -> None:
        num, spec = env.num_envs, env.spec
        super().__init__(device="cpu", batch_size=[num])
        self.env, self.following = env, torch.empty(0)
        seen = Unbounded((num, spec.state_dim), dtype=torch.float32)
        self.observation_spec = Composite(observation=seen, shape=[num])
        self.reward_spec = Unbounded((num, 1), dtype=torch.float32)
        flags = {name: Binary(1, shape=(num, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        self.done_spec = Composite(**flags, shape=[num])
        if isinstance(spec.action, Box):
            self.action_spec = Bounded(-1.0, 1.0, (num, spec.action_dim), dtype=torch.float32)
        else:
            assert isinstance(spec.action, Discrete)
            self.action_spec = CategoricalSpec(spec.action.n, shape=(num,))

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        if not len(self.following):
            self.following = self.env.reset()["state"]
        return self._result(self.following, torch.zeros(2, self.env.num_envs, dtype=torch.bool))

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        step = self.env.step(tensordict["action"].reshape(self.env.num_envs, -1))
        self.following, last = step.obs["state"], step.obs["state"]
        if len(step.final_ids):
            last = last.clone()
            last[step.final_ids] = step.final_obs["state"]
        result = self._result(last, torch.stack([step.terminated_N, step.truncated_N]))
        return result.set("reward", step.reward_N.unsqueeze(-1))

    def _result(self, state: Tensor, ends_2N: Tensor) -> TensorDict:
        terminated, truncated = ends_2N.unsqueeze(-1)
        rows = {"observation": state, "terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        return TensorDict(rows, batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        """Nothing: the sampler has the seed."""


def train(env: MeteredEnv, settings: PPOSettings) -> None:
    """Train until the meter ends it."""
    torch.manual_seed(settings.seed)
    spec, batch = env.spec, settings.num_envs * settings.decisions
    normalizer = VecNormV2(in_keys=["observation"], decay=1.0, reduce_batch_dims=True)
    world = TransformedEnv(TorchRLEnv(env), normalizer)
    actor = _actor(spec, settings)
    critic = ValueOperator(_network(spec.state_dim, settings, 1), in_keys=["observation"])
    advantage = GAE(gamma=settings.gamma, lmbda=settings.gae_lambda, value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=settings.clip_range,
        entropy_bonus=settings.entropy_coef > 0,
        entropy_coeff=settings.entropy_coef,
        critic_coeff=settings.value_coef,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=settings.learning_rate, eps=1e-5)
    with contextlib.suppress(Finished):
        for data in Collector(world, actor, frames_per_batch=batch, total_frames=-1):
            with torch.no_grad():
                advantage(data)
            rows = data.reshape(-1)
            for _ in range(settings.epochs):
                for index in torch.randperm(batch).chunk(settings.num_minibatches):
                    losses = loss(rows[index])
                    total = sum(value for name, value in losses.items() if name.startswith("loss_"))
                    optimizer.zero_grad()
                    total.backward()
                    torch.nn.utils.clip_grad_norm_(loss.parameters(), settings.max_grad_norm)
                    optimizer.step()


def _network(inputs: int, settings: PPOSettings, outputs: int) -> nn.Sequential:
    """Build hidden layers with ReLU, and a linear output."""
    layers: list[nn.Module] = []
    for width in settings.hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class _Gaussian(nn.Module):
    """A mean, and a standard deviation that does not depend on the state."""

    def __init__(self, network: nn.Module, actions: int, std: float) -> None:
        super().__init__()
        self.network = network
        self.log_std = nn.Parameter(torch.full((actions,), math.log(std)))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.network(state)
        return mean, self.log_std.exp().expand_as(mean)


def _actor(spec: EnvSpec, settings: PPOSettings) -> ProbabilisticActor:
    """Build the actor for the task's actions."""
    if isinstance(spec.action, Box):
        network: nn.Module = _Gaussian(
            _network(spec.state_dim, settings, spec.action_dim), spec.action_dim, settings.init_std
        )
        keys, distribution = ["loc", "scale"], IndependentNormal
    else:
        assert isinstance(spec.action, Discrete)
        network, keys, distribution = _network(spec.state_dim, settings, spec.action.n), ["logits"], Categorical
    module = TensorDictModule(network, in_keys=["observation"], out_keys=keys)
    return ProbabilisticActor(module, in_keys=keys, distribution_class=distribution, return_log_prob=True)
