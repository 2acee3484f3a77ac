"""Each of five libraries learns ``reach`` in its own way, in some ten to twenty thousand control steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from torch import Tensor, nn

from embodied.envs.views.stepper import open_task
from tests.envs.views.toy import INSTALL

EASY: dict[str, Any] = {"max_episode_steps": 20, "success_m": 0.05, "num_threads": 1}
NUM_ENVS = 32
REACH = "embodied/Reach-v0"

pytestmark = [
    pytest.mark.slow(reason="trains a policy with another library"),
    pytest.mark.filterwarnings("ignore"),  # the libraries' own
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a directory of its own: some libraries write there."""
    monkeypatch.chdir(tmp_path)


def mean_return(policy: Callable[[Tensor], Tensor]) -> float:
    """Return the mean return of 64 episodes of a policy from state to action."""
    stepper = open_task("reach", 64, seed=1000, **EASY)
    obs, total = stepper.reset(), 0.0
    for _ in range(EASY["max_episode_steps"]):
        with torch.no_grad():
            step = stepper.step(policy(obs["state"]))
        obs, total = step.obs, total + float(step.reward_N.mean())
    stepper.close()
    return total


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Make a learning curve independent of the tests before it."""
    torch.manual_seed(0)


def check_learned(before: float, after: float) -> None:
    """An episode in which the gripper stays at the goal from the 7th step on returns 14 or more."""
    assert before < 3
    assert after > 6


def test_stable_baselines3_learns() -> None:
    pytest.importorskip("stable_baselines3", reason=INSTALL)
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy

    from embodied.envs.views import sb3

    env = sb3.make("reach", num_envs=NUM_ENVS, stagger=True, **EASY)
    model = PPO(
        "MlpPolicy", env, n_steps=16, batch_size=128, n_epochs=5, learning_rate=2e-3, gamma=0.9, gae_lambda=0.9,
        policy_kwargs={"log_std_init": -0.7}, seed=0, device="cpu",
    )  # fmt: skip
    held_out = sb3.make("reach", num_envs=64, seed=1000, **EASY)
    before, _ = evaluate_policy(model, held_out, 64)
    model.learn(20_000)
    after, _ = evaluate_policy(model, held_out, 64)
    check_learned(float(before), float(after))
    assert sum(model.ep_success_buffer) > 0  # from is_success of the infos


def test_rsl_rl_learns() -> None:
    pytest.importorskip("rsl_rl", reason=INSTALL)
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    from embodied.envs.views import rsl_rl

    env = rsl_rl.make("reach", num_envs=NUM_ENVS, **EASY)
    network = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh", "obs_normalization": True}
    config = {
        "num_steps_per_env": 16,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy", "privileged"]},
        "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.5}},
        "critic": dict(network),
        "algorithm": {
            "class_name": "PPO", "learning_rate": 2e-3, "schedule": "fixed", "gamma": 0.9, "lam": 0.9,
            "num_learning_epochs": 5, "num_mini_batches": 4, "entropy_coef": 0.0,
        },
    }  # fmt: skip
    runner = OnPolicyRunner(env, config, log_dir=None, device="cpu")

    def policy(state: Tensor) -> Tensor:
        return runner.get_inference_policy()(TensorDict({"policy": state}, [len(state)]))

    before = mean_return(policy)
    runner.learn(20, init_at_random_ep_len=True)
    check_learned(before, mean_return(policy))


def test_rl_games_learns() -> None:
    pytest.importorskip("rl_games", reason=INSTALL)
    from rl_games.torch_runner import Runner

    from embodied.envs.views import rl_games

    rl_games.register()
    gaussian = {
        "mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": -0.7}, "fixed_sigma": True,
    }  # fmt: skip
    units = {"units": [64, 64], "activation": "tanh", "initializer": {"name": "default"}}
    runner = Runner()
    runner.load({"params": {
        "seed": 1,
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": {"name": "actor_critic", "separate": True, "space": {"continuous": gaussian}, "mlp": units},
        "config": {
            "name": "reach", "env_name": "embodied", "env_config": {"task": "reach", "stagger": True, **EASY},
            "num_actors": NUM_ENVS, "device": "cpu", "device_name": "cpu", "max_epochs": 25, "horizon_length": 16,
            "minibatch_size": 128, "mini_epochs": 5, "learning_rate": 2e-3, "lr_schedule": None, "gamma": 0.9,
            "tau": 0.9, "e_clip": 0.2, "clip_value": False, "critic_coef": 1.0, "entropy_coef": 0.0,
            "bounds_loss_coef": 0.0, "truncate_grads": True, "grad_norm": 1.0, "value_bootstrap": True,
            "normalize_input": True, "normalize_value": False, "normalize_advantage": True,
            "reward_shaper": {"scale_value": 1.0}, "score_to_win": 1e9, "save_frequency": 0,
            "save_best_after": 10**9, "print_stats": False,
        },
    }})  # fmt: skip
    agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)

    def policy(state: Tensor) -> Tensor:
        agent.set_eval()
        return agent.model({"is_train": False, "prev_actions": None, "obs": state, "rnn_states": None})["mus"]

    before = mean_return(policy)
    agent.train()
    check_learned(before, mean_return(policy))


def test_skrl_learns_through_gymnasium() -> None:
    pytest.importorskip("skrl", reason=INSTALL)
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.trainers.torch import SequentialTrainer
    from skrl.utils.model_instantiators.torch import deterministic_model, gaussian_model

    env = wrap_env(gymnasium.make_vec(REACH, num_envs=NUM_ENVS, stagger=True, **EASY), verbose=False)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}
    layers = [{"name": "net", "input": "OBSERVATIONS", "layers": [64, 64], "activations": "tanh"}]
    models = {
        "policy": gaussian_model(**spaces, network=layers, output="ACTIONS", initial_log_std=-0.7),
        "value": deterministic_model(**spaces, network=layers, output="ONE"),
    }
    config = PPO_CFG(
        rollouts=16, learning_epochs=5, mini_batches=4, discount_factor=0.9, gae_lambda=0.9, learning_rate=2e-3,
        grad_norm_clip=1.0, value_clip=0.0, value_loss_scale=1.0, time_limit_bootstrap=True,
        observation_preprocessor=RunningStandardScaler,
        observation_preprocessor_kwargs={"size": env.observation_space, "device": "cpu"},
    )  # fmt: skip
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    memory = RandomMemory(memory_size=16, num_envs=NUM_ENVS, device="cpu")
    agent = PPO(models=models, memory=memory, cfg=config, state_space=env.state_space, **spaces)
    trained = {"timesteps": 16 * 30, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    trainer = SequentialTrainer(env=env, agents=agent, cfg=trained)

    def policy(state: Tensor) -> Tensor:
        return agent.act(state, None, timestep=0, timesteps=0)[-1]["mean_actions"]

    before = mean_return(policy)
    trainer.train()
    check_learned(before, mean_return(policy))


def test_torchrl_takes_one_environment_by_its_id() -> None:
    pytest.importorskip("torchrl", reason=INSTALL)
    from torchrl.envs import GymEnv, check_env_specs

    env = GymEnv(REACH, max_episode_steps=5)
    check_env_specs(env)
    rollout = env.rollout(11, break_when_any_done=False)
    assert rollout["next", "truncated"].flatten().nonzero().flatten().tolist() == [4, 9]
    assert rollout["observation"].shape == (11, 29)
    env.close()


def test_torchrl_learns_through_gymnasium() -> None:
    pytest.importorskip("torchrl", reason=INSTALL)
    from tensordict.nn import TensorDictModule
    from tensordict.nn.distributions import NormalParamExtractor
    from torchrl.collectors import Collector
    from torchrl.envs import GymWrapper
    from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    pool = gymnasium.make_vec(REACH, num_envs=NUM_ENVS, autoreset_mode="DISABLED", stagger=True, **EASY)
    env = GymWrapper(pool)
    size, actions = pool.single_observation_space.shape[0], pool.single_action_space.shape[0]

    def network(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    mean_and_std = nn.Sequential(network(2 * actions), NormalParamExtractor("biased_softplus_0.5"))
    actor = ProbabilisticActor(
        TensorDictModule(mean_and_std, ["observation"], ["loc", "scale"]), in_keys=["loc", "scale"],
        distribution_class=IndependentNormal, return_log_prob=True, spec=env.action_spec,
    )  # fmt: skip
    critic = ValueOperator(network(1), in_keys=["observation"])
    advantage = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    loss = ClipPPOLoss(actor, critic, entropy_coeff=0.0, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), 3e-3)

    def policy(state: Tensor) -> Tensor:
        return mean_and_std(state)[0]

    before = mean_return(policy)
    collector = Collector(env, actor, frames_per_batch=16 * NUM_ENVS, total_frames=50 * 16 * NUM_ENVS)
    for data in collector:
        with torch.no_grad():
            advantage(data)
        flat = data.reshape(-1)
        for _ in range(5):
            for rows in torch.randperm(len(flat)).chunk(4):
                losses = loss(flat[rows])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                optimizer.step()
    collector.shutdown()
    check_learned(before, mean_return(policy))
