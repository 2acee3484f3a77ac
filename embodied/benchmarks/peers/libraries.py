"""PPO of other libraries on our environments, each in its own training loop, which the meter ends."""

import math
from typing import Any

import torch
from rsl_rl.runners import OnPolicyRunner
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import VecNormV2
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from embodied.benchmarks.peers.meter import PPOSettings, rsl_rl_settings
from embodied.core.spec import Box, Discrete, EnvSpec
from embodied.envs.views.rsl_rl import RslRlVecEnv
from embodied.envs.views.sb3 import Sb3VecEnv
from embodied.envs.views.stepper import Stepper


def sb3(stepper: Stepper, settings: PPOSettings) -> None:
    hidden = list(settings.hidden)
    network: dict[str, Any] = {"net_arch": {"pi": hidden, "vf": hidden}, "activation_fn": nn.ReLU}
    if isinstance(stepper.spec.action, Box):
        network["log_std_init"] = math.log(settings.init_std)
    trainer = PPO(
        "MlpPolicy", VecNormalize(Sb3VecEnv(stepper), norm_reward=False), n_steps=settings.decisions,
        batch_size=settings.num_envs * settings.decisions // settings.num_minibatches, n_epochs=settings.epochs,
        learning_rate=settings.learning_rate, gamma=settings.gamma, gae_lambda=settings.gae_lambda,
        clip_range=settings.clip_range, vf_coef=settings.value_coef, ent_coef=settings.entropy_coef,
        max_grad_norm=settings.max_grad_norm, policy_kwargs=network, seed=settings.seed, device="cpu",
    )  # fmt: skip
    trainer.learn(10**12)


def rsl_rl(stepper: Stepper, settings: PPOSettings) -> None:
    """Train with rsl_rl, which has no discrete actions and bootstraps a truncation with the value before it."""
    torch.manual_seed(settings.seed)
    parts = rsl_rl_settings(settings)
    parts["algorithm"] |= {"class_name": "PPO"}
    parts |= {"num_steps_per_env": settings.decisions, "save_interval": 10**9}
    critic = ["policy", "privileged"] if stepper.spec.privileged else ["policy"]  # as ours
    parts |= {"obs_groups": {"actor": ["policy"], "critic": critic}}
    OnPolicyRunner(RslRlVecEnv(stepper), parts).learn(10**9)


def torchrl(stepper: Stepper, settings: PPOSettings) -> None:
    """Train with torchrl's parts: its env, collector, advantage and loss, in the loop of its documentation."""
    torch.manual_seed(settings.seed)
    batch = settings.num_envs * settings.decisions
    env = TransformedEnv(TorchRLEnv(stepper), VecNormV2(["observation"], decay=1.0, reduce_batch_dims=True))
    actor = _actor(stepper.spec, settings)
    critic = ValueOperator(_network(stepper.spec, settings, 1), in_keys=["observation"])
    advantage = GAE(gamma=settings.gamma, lmbda=settings.gae_lambda, value_network=critic)
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=settings.clip_range, entropy_bonus=settings.entropy_coef > 0,
        entropy_coeff=settings.entropy_coef, critic_coeff=settings.value_coef, loss_critic_type="l2",
        normalize_advantage=True,
    )  # fmt: skip
    optimizer = torch.optim.Adam(loss.parameters(), lr=settings.learning_rate, eps=1e-5)
    for data in Collector(env, actor, frames_per_batch=batch, total_frames=-1):
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


def _actor(spec: EnvSpec, settings: PPOSettings) -> ProbabilisticActor:
    if isinstance(spec.action, Box):
        log_std = AddStateIndependentNormalScale(spec.action_dim, init_value=math.log(settings.init_std))
        network: nn.Module = nn.Sequential(_network(spec, settings, spec.action_dim), log_std)
        keys, distribution = ["loc", "scale"], IndependentNormal
    else:
        assert isinstance(spec.action, Discrete)
        network, keys, distribution = _network(spec, settings, spec.action.n), ["logits"], Categorical
    module = TensorDictModule(network, in_keys=["observation"], out_keys=keys)
    return ProbabilisticActor(module, in_keys=keys, distribution_class=distribution, return_log_prob=True)


def _network(spec: EnvSpec, settings: PPOSettings, outputs: int) -> nn.Module:
    network: nn.Module = MLP(spec.state_dim, outputs, num_cells=list(settings.hidden), activation_class=nn.ReLU)
    return network


class TorchRLEnv(EnvBase):
    """torchrl's view of N envs: a step shows last observations, and a reset of ended rows those that follow."""

    def __init__(self, stepper: Stepper) -> None:
        num, spec = stepper.num_envs, stepper.spec
        super().__init__(device="cpu", batch_size=[num])
        self.stepper, self.following = stepper, torch.empty(0)
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
            self.following = self.stepper.reset()["state"]
        return self._result(self.following, torch.zeros(2, self.stepper.num_envs, dtype=torch.bool))

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        step = self.stepper.step(tensordict["action"])
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


LIBRARIES = {"sb3": sb3, "rsl_rl": rsl_rl, "torchrl": torchrl}
