"""The family gym: spaces, ends, masks, images, processes, and what cannot be served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from embodied.core.episodes import EpisodePlans, PlanList
from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec, EnvSpec, MultiDiscrete
from embodied.envs import FAMILIES
from embodied.envs.adapters.gym import family as gym
from embodied.envs.adapters.gym import source as gym_source
from embodied.envs.adapters.gym.family import GymConfig, GymEnv, GymSimConfig
from embodied.envs.base.actions import random_actions
from embodied.envs.checks.conformance import check_env
from embodied.envs.episodes.sampler import first_episodes

MODULE = "tests.envs.toy_gym"
FAMILY = FAMILIES["gym"].build()


def spec(name: str, cameras: tuple[CameraSpec, ...] = (), **task: Any) -> EnvSpec:
    return FAMILY.spec(f"{MODULE}:{name}-v0", GymConfig(**task), cameras)


def make(name: str, num_envs: int = 3, processes: int = 0, cameras: tuple[CameraSpec, ...] = (), **task: Any) -> GymEnv:
    id = name if "-v" in name else f"{MODULE}:{name}-v0"
    env = FAMILY.make(
        id, GymConfig(**task), num_envs=num_envs, num_threads=1, sim=GymSimConfig(processes=processes), cameras=cameras
    )
    assert isinstance(env, GymEnv)
    return env


@contextmanager
def started(name: str, num_envs: int = 3, **options: Any) -> Iterator[tuple[GymEnv, Mapping[str, torch.Tensor]]]:
    with closing(make(name, num_envs, **options)) as env:
        yield env, env.reset(PlanList(plans_of(env), num_envs))


def plans_of(env: GymEnv) -> EpisodePlans:
    return first_episodes(env.spec, env.num_envs, seed=0)


CONFORMING = {
    "CartPole-v1": {"max_episode_steps": 15},
    "Pendulum-v1": {"max_episode_steps": 7},
    "Blackjack-v1": {"max_episode_steps": 4},
    "Taxi-v4": {"max_episode_steps": 7},
    "Toy": {},
    "Ending": {},
    "Masked": {},
    "Bits": {},
}


@pytest.mark.parametrize("name", CONFORMING)
def test_environments_conform(name: str) -> None:
    check_env(lambda num_envs: make(name, num_envs, **CONFORMING[name]))


def test_environments_of_processes_conform() -> None:
    check_env(lambda num_envs: make("Ending", num_envs, processes=2))


def test_processes_give_what_this_process_gives() -> None:
    with started("Toy", 5) as (here, obs), started("Toy", 5, processes=2) as (there, other):
        assert torch.equal(obs["state"], other["state"])
        for t in range(6):
            action = random_actions(here.spec.action, 5, 5, t)
            mine, theirs = here.step(action), there.step(action)
            assert torch.equal(mine.obs["state"], theirs.obs["state"])
            assert torch.equal(mine.reward_NE, theirs.reward_NE)
            assert torch.equal(mine.num_steps_N, theirs.num_steps_N)


def test_actions_are_scaled_to_the_limits() -> None:
    with started("Toy", 1) as (env, _):
        for given, expected in (([-1.0, -1.0], [0.0, -3.0]), ([1.0, 1.0], [1.0, 5.0]), ([0.0, 0.5], [0.5, 3.0])):
            env.step(torch.tensor([[given]]))
            assert env.rows.envs[0].unwrapped.last.tolist() == expected  # type: ignore[attr-defined]
    terms = spec("Toy").action.terms  # type: ignore[union-attr]
    assert [(term.scale, term.offset) for term in terms] == [(0.5, 0.5), (4.0, 1.0)]


def test_truncation_termination_and_success_are_those_of_the_environment() -> None:
    with started("Ending", 8) as (env, _obs):
        assert env.spec.has_success
        step = env.step(torch.zeros(8, 7, 2))
        assert step.num_steps_N.tolist() == [5] * 8
        high_N = torch.from_numpy(env.rows.seed_N >= 0) & (step.final_obs["state"][:, 0] > 0.5)  # type: ignore[attr-defined]
        assert torch.equal(step.terminated_N, high_N)
        assert torch.equal(step.truncated_N, ~high_N)
        assert high_N.any()
        assert not high_N.all()
        assert step.final_obs["state"][:, 1].tolist() == [5.0] * 8
        assert step.obs["state"][:, 1].tolist() == [0.0] * 8
        assert step.episodes.success_at_end_M.all()


def test_the_time_limit_is_that_of_the_plan() -> None:
    assert spec("Toy").max_episode_steps == 12
    assert spec("Toy", max_episode_steps=30).max_episode_steps == 30
    with started("Toy", 2, max_episode_steps=30) as (env, _):
        step = env.step(torch.zeros(2, 31, 2))
        assert step.truncated_N.all()
        assert step.episodes.length_M.tolist() == [30, 30]


def test_nested_observations_are_terms_and_cameras() -> None:
    terms = [(term.name, term.size) for term in spec("Nested").state]
    assert terms == [("arm.mode", 3), ("arm.pos", 4), ("bits", 3), ("pair.0", 5), ("pair.1", 1)]
    cameras = (CameraSpec("front", 24, 32), CameraSpec.square("gray", 8), CameraSpec("render", 20, 30))
    with started("Nested", 2, cameras=cameras) as (env, obs):
        expected = [1, 0, 0, 0, 1, 2, 3, 1, 0, 1, 0, 1, 0, 0, 1, 0.5]
        assert obs["state"][0].tolist() == expected
        step = env.step(torch.zeros(2, 1, 2))
        assert (step.obs["images.front"] == 1).all()
        assert step.obs["images.front"].shape == (2, 24, 32, 3)
        assert (step.obs["images.gray"] == 7).all()
        assert step.obs["images.gray"].shape == (2, 8, 8, 3)
        assert step.obs["images.render"].shape == (2, 20, 30, 3)
        assert step.obs["images.render"].max() == 255
        assert step.obs["instruction"].tolist() == [0, 0]
    check_env(lambda num_envs: make("Nested", num_envs, cameras=cameras))


def test_images_alone_need_a_policy_that_sees() -> None:
    with pytest.raises(UserError, match=r"observes images alone: .* policy.cameras=\[observation\]"):
        spec("Pixels")
    with pytest.raises(UserError, match=r"unknown camera .* 'front'.* Allowed: observation, render"):
        spec("Pixels", (CameraSpec.square("front", 16),))
    with started("Pixels", 2, cameras=(CameraSpec.square("observation", 16),)) as (env, obs):
        assert env.spec.texts == ("Pixels",)
        assert obs["state"].tolist() == [[0.0], [0.0]]
        assert env.step(torch.zeros(2, 3, 2)).obs["state"].tolist() == [[0.25], [0.25]]


def test_images_with_choices_need_the_categorical_policy() -> None:
    with pytest.raises(UserError, match=r"images alone: .* policy=categorical policy.cameras=\[observation\]"):
        spec("PixelChoice")


def test_masks_and_several_choices() -> None:
    assert spec("Masked").action == MultiDiscrete(("choice[0]", "choice[1]"), (3, 2))
    with started("Masked", 2) as (env, obs):
        assert obs["action_mask"].tolist() == [[True, False, True, True, False]] * 2
        step = env.step(torch.tensor([[[2, 0]], [[0, 0]]]))
        assert step.reward_N.tolist() == [2.0, 0.0]
        assert step.obs["action_mask"].tolist() == [[True, True, True, True, False]] * 2
        with pytest.raises(ValueError, match=r"got 0 to 2 in entry 1, allowed: 0 to 1"):
            env.step(torch.tensor([[[2, 0]], [[0, 2]]]))


REFUSED = {
    "Words": "its observation 'observation' is a Text, which is not a vector of a fixed size; allowed: Dict",
    "Unbounded": "its actions have no limits .*: give its action_space finite ones",
    "Agents": "its actions are a Tuple; allowed: a Box",
    "Channels": r"is an array of bytes \[84, 84, 4\]; images must be",
    "Colours": r"is an array of bytes \[6, 84, 84\]; images must be",
}


@pytest.mark.parametrize("name", REFUSED)
def test_spaces_that_cannot_be_served_are_named(name: str) -> None:
    with pytest.raises(UserError, match=rf"task gym/{MODULE}:{name}-v0 cannot be served: .*{REFUSED[name]}") as error:
        spec(name)
    assert "\n" not in str(error.value)


UNKNOWN = {
    "CartPol-v1": "unknown environment 'CartPol-v1' of the family gym. Did you mean 'CartPole-v1'",
    f"{MODULE}:Toys-v0": "unknown environment 'Toys-v0' .* Did you mean 'Toy-v0'.*after the import of",
    "no_such_package:X-v0": "there is no module 'no_such_package': check its spelling, run in its folder, or install",
    "ALE/Pong-v5": "needs a package that is not installed: pip install ale-py",
}


@pytest.mark.parametrize("id", UNKNOWN)
def test_unknown_environments_are_named(id: str) -> None:
    with pytest.raises(UserError, match=UNKNOWN[id]):
        FAMILY.spec(id, GymConfig())


def test_wrong_arguments_of_the_constructor_are_named() -> None:
    assert spec("Toy", kwargs={"offset": 2.0}).state_dim == 2
    with pytest.raises(UserError, match=r"cannot be built: TypeError in .*: .*unexpected keyword argument 'mass'"):
        spec("Toy", kwargs={"mass": 2.0})
    with pytest.raises(UserError, match="render_mode is set where it is needed"):
        GymConfig(kwargs={"render_mode": "human"})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("OldStep", "must return observation, reward, terminated, truncated and info from step.., got a tuple of 4"),
        ("OldReset", "must return an observation and an info from reset.., got ndarray"),
    ],
)
def test_an_environment_of_the_old_interface_is_told_what_to_return(name: str, what: str) -> None:
    with pytest.raises(
        UserError, match=f"task gym/{MODULE}:{name}-v0 cannot be served: its class {MODULE}.{name} {what}"
    ):
        spec(name)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Raising", "raised RuntimeError in toy_gym.py, line .*: the simulator is broken"),
        ("Infinite", "gave a value of state that is not"),
    ],
)
def test_an_environment_that_fails_is_named(name: str, what: str, processes: int) -> None:
    with started(name, 2, processes=processes) as (env, _):
        place = r"\(control step 8 of the episode with seed \d+\)"
        with pytest.raises(UserError, match=rf"task gym/{MODULE}:{name}-v0: env 0 {what}.*{place}"):
            env.step(torch.zeros(2, 9, 2))


def test_a_process_that_ends_is_named() -> None:
    with started("Dying", 3, processes=2) as (env, _):  # noqa: SIM117
        with pytest.raises(UserError, match="the process of envs 0 to 1 ended by SIGKILL"):
            env.step(torch.zeros(3, 9, 2))


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.slow(reason="imports everything in a process of its own")
def test_no_process_survives_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import torch\nfrom tests.envs.test_gym import started\n"
        "with started('Toy', 4, processes=2) as (env, _):\n    print('ready', flush=True)\n    input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    workers = children(parent.pid)
    assert len(workers) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))


def test_processes_end_with_the_env() -> None:
    with started("Toy", 4, processes=2) as (env, _):
        workers = [worker.process for worker in env.rows.workers]  # type: ignore[attr-defined]
        assert len(workers) == 2
    assert [worker.poll() for worker in workers] == [0, 0]


def test_processes_import_neither_torch_nor_mujoco() -> None:
    with started("Toy", 2, processes=1) as (env, _):
        (worker,) = env.rows.workers  # type: ignore[attr-defined]
        mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
    assert "numpy" in mapped
    assert "libtorch" not in mapped
    assert "libmujoco" not in mapped


def test_only_slow_environments_get_processes_by_themselves() -> None:
    found = gym.probe(f"{MODULE}:Toy-v0", {}, None)
    assert gym._processes(replace(found, step_s=1e-5), 2, GymSimConfig()) == 0
    assert gym._processes(replace(found, step_s=1e-2), 2, GymSimConfig()) == 2
    assert gym._processes(found, 2, GymSimConfig(processes=5)) == 5


def test_a_warning_of_mujoco_is_logged_once(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    gym_source._warn_once.cache_clear()
    before = mujoco.get_mju_user_warning()
    make("HalfCheetah-v5", 3).close()  # the compiler warns of its model file
    assert [record.message.partition(":")[0] for record in caplog.records] == ["MuJoCo"]
    assert "WARNING" not in capfd.readouterr().err
    assert mujoco.get_mju_user_warning() is before


def test_pictures_for_people() -> None:
    for processes in (0, 2):
        with started("Toy", 3, processes=processes) as (env, _):
            frames = env.film(32, 24)()  # type: ignore[attr-defined]
            assert frames.shape == (3, 24, 32, 3)
            assert frames.dtype == np.uint8
            assert frames.max() == 255
