"""Defaults that follow from the task of another simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied import train
from embodied.algos import adam
from embodied.algos.config import PPOConfig
from embodied.algos.registry import ALGORITHMS
from embodied.core.errors import UserError
from embodied.core.options import config_dataclass
from embodied.core.registry import Entry
from embodied.core.spec import CameraSpec, Discrete, EnvSpec, MultiDiscrete
from embodied.report.metrics import read_metrics
from embodied.session.config import compose_run, read_run, to_mapping, to_yaml
from embodied.session.defaults import compose_new, derive
from tests.commands.helpers import run

BOX = EnvSpec.of_sizes("box", state=3, action=2, max_episode_steps=1000)
CHOICES = EnvSpec.of_sizes("choices", state=3, action=1, max_episode_steps=500)


def changed(spec: EnvSpec, **fields: Any) -> EnvSpec:
    return EnvSpec(**{name: getattr(spec, name) for name in spec.__dataclass_fields__} | fields)


SPECS = {
    "box": (BOX, "gaussian"),
    "short box": (changed(BOX, max_episode_steps=50), "gaussian"),
    "choices": (changed(CHOICES, action=Discrete(("left", "right"))), "categorical"),
    "several choices": (changed(CHOICES, action=MultiDiscrete(("a", "b"), (2, 3))), "categorical"),
    "images": (
        changed(CHOICES, action=Discrete(("up",)), max_episode_steps=27_000, cameras=(CameraSpec.square("obs", 64),)),
        "categorical",
    ),
    "nothing stated": (changed(BOX, assumed=("control_dt_s", "max_episode_steps")), "gaussian"),
}


@pytest.mark.parametrize("kind", SPECS)
def test_settings_follow_from_a_spec(kind: str) -> None:
    spec, policy = SPECS[kind]
    settings, lines = derive(spec, policy, {})
    steps, batch = spec.max_episode_steps, settings["num_envs"] * settings["runtime"]["decisions"]
    horizon = 1 / (1 - settings["algo"]["gamma"])
    assert (settings["policy"]["horizon"], settings["policy"]["execute"]) == (1, 1)
    assert 20 <= round(horizon, 3) <= 100
    assert horizon == pytest.approx(steps / 10) or round(horizon) in (20, 100)
    evaluated = settings["runtime"]["eval_episodes"] * steps
    assert evaluated <= 0.1 * batch * settings["runtime"]["eval_every"]
    assert ("init_std" in settings["policy"]) == ("noise_hold" in settings["runtime"]) == (policy == "gaussian")
    assert settings["policy"].get("cameras", []) == [camera.name for camera in spec.cameras]
    assert batch % settings["algo"]["num_minibatches"] == 0
    assert len(lines) == 3
    assert lines[0].count(f"policy={policy}") == 1
    assert f"{steps:,} control steps" in lines[1]
    assert lines[1].count("assumed") == len(spec.assumed)


def test_sizes_fit_to_given_ones() -> None:
    settings, lines = derive(BOX, "gaussian", {"num_envs": 64, "policy.execute": 4, "policy.max_std": 0.5})
    assert settings["runtime"]["decisions"] == 32
    assert settings["policy"]["horizon"] == 4
    assert settings["policy"]["init_std"] < 0.5
    assert "num_envs" not in lines[2]
    assert "execute" not in lines[0]


@pytest.mark.parametrize(("actions", "std"), [(1, 0.95), (3, 0.95), (8, 0.5818), (12, 0.475), (200, 0.2375)])
def test_noise_of_many_actions_is_no_longer_than_that_of_three(actions: int, std: float) -> None:
    settings, _ = derive(EnvSpec.of_sizes("box", state=3, action=actions, max_episode_steps=1000), "gaussian", {})
    assert settings["policy"]["init_std"] == std


def test_what_is_given_wins_and_lines_say_the_rest() -> None:
    lines: list[str] = []
    words = {"task": "gym/CartPole-v1", "algo.gamma": 0.9, "max_staleness": 1, "algo.learning_rate": 1e-3}
    config = compose_new(words, lines.append)
    assert config.policy.name == "categorical"
    assert (config.algo.options.gamma, config.algo.options.learning_rate) == (0.9, 1e-3)
    assert (config.algo.options.critic_learning_rate, config.runtime.max_staleness) == (None, 1)
    assert (config.algo.options.min_learning_rate, config.algo.options.max_learning_rate) == (3.3e-4, 1e-3)
    assert (config.num_envs, config.runtime.decisions, config.algo.options.schedule) == (8, 256, "adaptive")
    lower = compose_new({"task": "gym/CartPole-v1", "algo.max_learning_rate": 6e-5}).algo.options
    assert (lower.learning_rate, lower.min_learning_rate, lower.max_learning_rate) == (6e-5, 2e-5, 6e-5)
    assert compose_new({"task": "gym/CartPole-v1", "algo.learning_rate": 0}).algo.options.learning_rate == 0
    assert len(lines) == 3
    assert not any(word in line for line in lines for word in ("gamma", "algo.learning_rate", "max_staleness"))
    chosen = compose_new({"task": "gym/CartPole-v1", "policy": "dsrl"}, lines.append)
    assert to_mapping(chosen) == to_mapping(compose_run({"task": "gym/CartPole-v1", "policy": "dsrl"}))


@pytest.mark.parametrize(
    ("words", "derived"),
    [
        ({"task": "gym/Cont-CC-PMSM-v0"}, {"policy": "gaussian"}),
        ({"task": "pick_place"}, {"stop_at_success": 0.99}),
        ({"task": "gym/Pendulum-v1", "algo": "grpo", "policy": "gaussian"}, {}),
    ],
    ids=lambda value: value.get("task", ""),
)
def test_recipes_and_our_own_tasks_and_other_algorithms_stay(words: dict[str, Any], derived: dict[str, Any]) -> None:
    if "PMSM" in words["task"]:
        pytest.importorskip("gym_electric_motor")
    assert to_mapping(compose_new(words)) == to_mapping(compose_run({**derived, **words}))


@config_dataclass
class OwnConfig(PPOConfig):
    """Options of an algorithm that changes PPO's loss."""


def test_an_algorithm_made_from_ppo_stops_at_success_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS._entries, "ppo", Entry("ppo", "embodied.algos.ppo:PPO", OwnConfig))
    assert compose_new({"task": "reach"}).stop_at_success == 0.99
    assert compose_new({"task": "reach", "algo": "sft"}).stop_at_success is None


def test_options_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    outcome = run(train.main, ["task=gym/CartPole-v1", "policy=gaussian", f"out={tmp_path / 'run'}"])
    assert outcome.code == 2
    assert "policy=categorical" in outcome.stderr.splitlines()[-1]
    outcome = run(train.main, ["task=gym/CartPole-v1", "runtime=sync", "max_staleness=1"])
    assert outcome.code == 2
    assert "max_staleness=1 needs runtime=local" in outcome.stderr.splitlines()[-1]


def test_config_shows_what_was_derived() -> None:
    outcome = run(train.main, ["task=gym/Pendulum-v1", "--config"])
    assert outcome.code == 0
    assert outcome.result["runtime"]["noise_hold"] == 6
    assert "noise_hold: 6" in outcome.stderr


def test_a_task_alone_learns_and_its_run_holds_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random policy balances the pole for 22 steps."""
    monkeypatch.setattr(adam, "HOLD", 0)
    small = ["runtime.decisions=64", "total_steps=5_120", "eval_episodes=10", "runtime.eval_every=0"]
    outcome = run(train.main, ["task=gym/CartPole-v1", *small, f"out={tmp_path / 'run'}"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr.count(" → ") >= 3
    assert outcome.result["eval"]["return_mean"] > 45
    rates = [row["train/learning_rate"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rates[-1] < 0.15 * rates[0], "of ten updates the last has 0.145 of the first one's"
    config = read_run(tmp_path / "run")
    assert (config.policy.name, config.algo.options.gamma, config.algo.options.num_minibatches) == (
        "categorical",
        0.98,
        4,
    )


@pytest.mark.parametrize("words", [{}, {"sim": "warp", "num_envs": 7}, {"sim": "warp", "device": "cpu"}])
def test_our_own_tasks_have_more_envs_only_where_a_gpu_simulates_them(words: dict[str, Any]) -> None:
    lines: list[str] = []
    assert to_mapping(compose_new(words, lines.append)) == to_mapping(compose_run({"stop_at_success": 0.99, **words}))
    assert not lines
    on_gpu = compose_new({"task": "reach", "sim": "warp", "device": "cuda"}, lines.append)
    assert on_gpu.num_envs == 4096
    sizes = "policy.horizon=4 policy.execute=4 policy.sigma_init=0.25 runtime.decisions=4 algo.epochs=5 num_envs=4096"
    rates = "algo.num_minibatches=4 algo.max_learning_rate=0.01 algo.desired_kl=0.03"
    assert lines == [f"sim=warp on a GPU → {sizes} {rates} cut_after_success=0 repeat_failures=0.0"]
    assert on_gpu.policy.options.sigma_init == 0.25
    gpu = {"sim": "warp", "device": "cuda"}
    assert chunks({**gpu, "policy.horizon": 8}) == (1, 8, 4, 4, 4096)
    recipe = compose_new({**gpu, "task": "lift", "policy": "gaussian"})  # its single actions stay
    assert (recipe.policy.options.horizon, recipe.num_envs) == (1, 4096)


@config_dataclass
class OtherConfig:
    """Options of an algorithm that is no PPO."""


@pytest.mark.parametrize("algo", ["grpo", "grounding", "other"])
def test_algorithms_that_the_sizes_of_a_gpu_do_not_suit_keep_their_own(
    algo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO compares whole episodes, other algorithms lack options of PPO."""
    monkeypatch.setitem(ALGORITHMS._entries, "other", Entry("other", "embodied.algos.ppo:PPO", OtherConfig))
    lines: list[str] = []
    on_gpu = compose_new({"task": "reach", "sim": "warp", "device": "cuda", "algo": algo}, lines.append)
    on_cpu = compose_new({"task": "reach", "sim": "warp", "device": "cpu", "algo": algo})
    assert on_gpu == replace(on_cpu, runtime=replace(on_cpu.runtime, device="cuda"))
    assert not lines


def test_an_algorithm_made_from_ppo_has_the_sizes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS._entries, "own", Entry("own", "embodied.algos.ppo:PPO", OwnConfig))
    words = {"task": "reach", "sim": "warp", "device": "cuda", "algo": "own", "policy": "gaussian"}
    assert compose_new(words).num_envs == 4096


def chunks(words: dict[str, Any]) -> tuple[int, ...]:
    """Denoise steps, horizon, executed actions, decisions of a rollout and envs."""
    config = compose_new({"task": "reach", **words})
    flow = config.policy.options
    return flow.denoise_steps, flow.horizon, flow.execute, config.runtime.decisions, config.num_envs


def test_a_run_that_starts_from_another_has_its_denoise_steps_and_chunks(tmp_path: Path) -> None:
    words = {"init": str(tmp_path)}
    for before, found in (
        ({}, (1, 1, 1, 32)),
        ({"algo": "sft"}, (4, 2, 2, 16)),
        ({"policy.denoise_steps": 2, "policy.horizon": 8}, (2, 8, 4, 8)),
    ):
        (tmp_path / "config.yaml").write_text(to_yaml(compose_new({"task": "reach", **before})))
        assert chunks(words) == (*found, 256)
        assert found[2] * found[3] == 32, "control steps of a rollout, whatever the chunks"
        assert compose_new({"task": "reach", **words}).algo.options.num_minibatches == found[3] / 2
        assert chunks({**words, "policy.denoise_steps": 8, "policy.execute": 1})[:3] == (8, found[1], 1)
    assert chunks({**words, "policy.execute": 6})[:3] == (2, 8, 6), "more than the horizon of a policy from scratch"
    assert chunks({**words, "policy.max_delay": 4, "policy.execute": 4})[:3] == (2, 8, 4)


def test_a_run_that_starts_from_another_has_its_cameras_and_refuses_an_impossible_chunk(tmp_path: Path) -> None:
    words = {"task": "lift", "policy": "gaussian", "policy.cameras": ["front"], "policy.image_size": 48}
    (tmp_path / "config.yaml").write_text(to_yaml(compose_new({**words, "algo": "sft"})))
    options = compose_new({"task": "lift", "init": str(tmp_path)}).policy.options
    assert (options.cameras, options.image_size) == (("front",), 48)
    for wrong in (0, "abc"):
        with pytest.raises(UserError, match=r"policy\.execute: got"):
            compose_new({"task": "lift", "init": str(tmp_path), "policy.execute": wrong})


@pytest.mark.parametrize(
    ("policy", "imitated", "steps"), [("flow", "flow", 32), ("dsrl", "flow", 16), ("vla_tiny", "vla_tiny", 32)]
)
def test_rollouts_after_imitation_have_as_many_control_steps_whatever_the_chunk(
    policy: str, imitated: str, steps: int, tmp_path: Path
) -> None:
    for execute in (1, 2, 4):
        words = {"task": "tabletop", "algo": "sft", "policy.horizon": execute, "policy.execute": execute}
        (tmp_path / "config.yaml").write_text(to_yaml(compose_new({**words, "policy": imitated})))
        config = compose_new({"task": "tabletop", "init": str(tmp_path), "policy": policy})
        assert config.runtime.decisions * execute == steps


@pytest.mark.parametrize("policy", ["flow", "vla_tiny", "gaussian"])
def test_a_run_that_starts_from_another_has_its_policy(policy: str, tmp_path: Path) -> None:
    """Also on a task of others, which cannot begin a certain episode again."""
    for task in ("reach", "gym/Pendulum-v1"):
        before = compose_new({"task": task, "algo": "sft", "policy": policy})
        (tmp_path / "config.yaml").write_text(to_yaml(before))
        after = compose_new({"task": task, "init": str(tmp_path)})
        assert (after.policy.name, after.policy.options.horizon) == (policy, before.policy.options.horizon)
        assert after.repeat_failures == (0.5 if policy != "gaussian" and task == "reach" else 0.0)


def test_other_peoples_tasks_end_by_steps_alone() -> None:
    """Rates fall until ``total_steps``: a limit of time would end a slow simulator's training before they do."""
    assert compose_new({"task": "gym/Pendulum-v1"}).max_minutes is None
    assert compose_new({"task": "gym/Pendulum-v1", "max_minutes": 2}).max_minutes == 2
    assert compose_new({"task": "reach"}).max_minutes == 15


def test_a_flow_policy_on_a_task_of_others_has_what_follows_from_the_task() -> None:
    words = {"task": "gym/Pendulum-v1", "policy.execute": 4}
    plain, flow = compose_new(words), compose_new({**words, "policy": "flow"})
    assert plain.policy.name == "gaussian"
    assert flow.runtime == plain.runtime
    assert replace(flow.algo.options, desired_kl=0.03) == plain.algo.options
    assert (plain.num_envs, plain.policy.options.horizon, plain.policy.options.init_std) == (8, 4, 0.95)
    assert (flow.num_envs, flow.policy.options.horizon, flow.policy.options.sigma_init) == (8, 4, 0.95)
    assert (flow.cut_after_success, flow.repeat_failures) == (0, 0.0), "these are of our arm"
    other = compose_new({**words, "policy": "flow", "policy.horizon": 8, "policy.sigma_max": 0.5})
    assert (other.policy.options.horizon, other.policy.options.sigma_init) == (8, 0.475)


def test_flow_ends_no_episode_at_a_success_that_the_task_does_not_report() -> None:
    for task in ("gym/Pendulum-v1", "envpool/HalfCheetah-v5"):
        if task.startswith("envpool"):
            pytest.importorskip("envpool")
        config = compose_new({"task": task, "policy": "flow"})
        assert (config.cut_after_success, config.repeat_failures) == (0, 0.0)


def test_imitation_has_chunks_of_two_actions_unless_others_are_chosen() -> None:
    for algo in ("grounding", "sft", "ppo", "grpo"):
        sees = {"task": "tabletop", "policy": "vla_tiny", "algo": algo}
        assert [chunks({**sees, **own})[1:3] for own in ({}, {"policy.horizon": 8}, {"policy.execute": 3})] == [
            (2, 2), (8, 4), (4, 3)
        ]  # fmt: skip
    assert chunks({"algo": "sft"})[:3] == (4, 2, 2)
    assert chunks({"algo": "sft", "policy.horizon": 8})[:3] == (4, 8, 4)
    assert chunks({"algo": "sft", "policy.execute": 1})[:3] == (4, 4, 1)
    assert chunks({"algo": "sft", "task": "gym/Pendulum-v1", "policy": "flow", "policy.horizon": 1})[:3] == (4, 1, 1)


def test_flow_from_scratch_has_single_actions_unless_chunks_are_chosen() -> None:
    assert chunks({}) == chunks({"policy.horizon": 1}) == (1, 1, 1, 16, 256)
    assert chunks({"policy.horizon": 8}) == (1, 8, 4, 8, 256)
    assert chunks({"policy.horizon": 2}) == (1, 2, 2, 8, 256)
    assert chunks({"policy.execute": 6}) == (1, 6, 6, 8, 256)
    assert chunks({"policy.horizon": 8, "policy.execute": 2, "runtime.decisions": 3}) == (1, 8, 2, 3, 256)
    with pytest.raises(UserError, match="execute"):
        compose_new({"task": "reach", "policy.horizon": 2, "policy.execute": 4})
    with pytest.raises(UserError, match=r"policy\.horizon: got 'x'"):
        compose_new({"task": "reach", "policy.horizon": "x"})
