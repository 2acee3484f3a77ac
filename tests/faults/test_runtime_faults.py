"""What must not happen: hangs, lost checkpoints, leftovers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.algorithm import Metrics
from embodied.core.clock import running_s
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment, Obs, PolicySample, Timestep
from embodied.policies.gaussian import GaussianPolicy
from embodied.runtime import checkpoint
from tests.faults.damage import cut, flip, remove
from tests.runtime.builders import DECISIONS, build, make_policy, runtime_threads
from tests.runtime.point_env import LIMIT, PointEnv

LOCAL = {"name": "local", "max_staleness": 1, "num_env_workers": 2}


class Death(Exception):
    pass


class DyingEnv(PointEnv):
    steps = 0

    def step(self, action: Tensor) -> Timestep:
        self.steps += 1
        if self.steps > 10:
            raise Death("env")
        return super().step(action)


class DyingPolicy(GaussianPolicy):
    """Dies in the actor server, which explores, or in the evaluator, which plans."""

    dies_in = "act"
    calls = 0

    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        self._maybe_die("act")
        return super().act(obs, noise)

    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        self._maybe_die("plan")
        return super().plan(obs, noise)

    def _maybe_die(self, method: str) -> None:
        self.calls += 1
        if self.calls > 10 and self.dies_in == method:
            raise Death("policy")


class DyingAlgorithm(PPO):
    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        if version == 3:
            raise Death("learner")
        return super().update(fragments, version)


def dying_policy(dies_in: str) -> Any:
    def make(spec: EnvSpec) -> DyingPolicy:
        policy = make_policy(spec)
        policy.__class__ = DyingPolicy
        assert isinstance(policy, DyingPolicy)
        policy.dies_in = dies_in
        return policy

    return make


def dying_algorithm(policy: Policy) -> DyingAlgorithm:
    return DyingAlgorithm(policy, PPOConfig(epochs=1), seed=0, device=torch.device("cpu"))


PARTS: dict[str, dict[str, Any]] = {
    "env": {"make_env": lambda num_envs, _: DyingEnv(num_envs)},
    "actor": {"make_policy": dying_policy("act")},
    "evaluator": {"make_policy": dying_policy("plan"), "eval_every": 1},
    "learner": {"make_algorithm": dying_algorithm},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("options", [{"name": "sync"}, LOCAL], ids=["sync", "local"])
def test_a_part_that_dies_ends_the_run_with_its_own_traceback(part: str, options: dict[str, Any]) -> None:
    began = time.monotonic()
    with pytest.raises(Death) as caught, build(**PARTS[part], **options) as runtime:
        for _ in runtime.iterations(deadline_s=running_s() + 30):
            pass
    assert time.monotonic() - began < 20
    assert runtime_threads() == []
    frames = [entry.name for entry in caught.traceback]
    assert frames[-1] in ("step", "_maybe_die", "update"), "the traceback must lead to where it happened"


def test_nan_actions_are_a_clear_error() -> None:
    def make(spec: EnvSpec) -> GaussianPolicy:
        policy = make_policy(spec)
        with torch.no_grad():
            policy.actor[-1].bias.fill_(float("nan"))
        return policy

    with pytest.raises(ValueError, match="NaN"), build(make_policy=make, **LOCAL) as runtime:
        list(runtime.iterations(max_env_steps=10_000))
    assert runtime_threads() == []


@pytest.mark.parametrize("number", ["reward", "nan", "inf", "last observation"])
def test_an_env_that_diverges_after_the_last_action_of_a_fragment_teaches_nothing(number: str) -> None:
    """No later action is drawn from that observation, so only the fragment itself can show it."""

    class Diverging(PointEnv):
        steps = 0

        def step(self, action: Tensor) -> Timestep:
            timestep = super().step(action)
            self.steps += 1
            if self.steps == 5 * DECISIONS:
                broken = timestep.reward_NE if number == "reward" else timestep.obs["state"]
                broken[2] = torch.inf if number == "inf" else torch.nan
            return timestep

    class DivergingAtItsEnd(PointEnv):
        """It terminates there, so that nobody asks for a value of the observation."""

        steps = 0

        def step(self, action: Tensor) -> Timestep:
            self.steps += 1
            if self.steps == 5 * DECISIONS:
                self.position_N2[2] = 2 * LIMIT
            timestep = super().step(action)
            if self.steps == 5 * DECISIONS:
                assert timestep.terminated_N[2]
                timestep.final_obs["state"][timestep.final_ids == 2] = torch.nan
            return timestep

    words = {"reward": "rewards", "nan": "observations and values"}.get(number, "observations")
    make = DivergingAtItsEnd if number == "last observation" else Diverging
    options: dict[str, Any] = {"name": "sync", "groups_per_worker": 1}
    with build(lambda num_envs, _: make(num_envs), **options) as runtime:
        with pytest.raises(FloatingPointError, match=f"^{words} of env 2 in group 0 of env worker 0 are not finite"):
            list(runtime.iterations(max_env_steps=10_000))
        assert runtime.iteration == 4
        for name, value in runtime.policy.state_dict().items():
            assert value.isfinite().all(), name


@pytest.mark.parametrize("options", [{"name": "sync"}, LOCAL], ids=["sync", "local"])
def test_a_run_whose_update_failed_fails_again_and_does_not_wait_for_the_lost_batch(options: dict[str, Any]) -> None:
    with build(**PARTS["learner"], **options) as runtime:
        for _ in range(2):
            with pytest.raises(Death, match="learner"):
                list(runtime.iterations())


def test_a_state_cannot_be_had_from_a_dead_run_but_does_not_hang() -> None:
    with build(**PARTS["env"], **LOCAL) as runtime:
        with pytest.raises(Death):
            list(runtime.iterations(max_env_steps=100_000))
        with pytest.raises(Death):
            runtime.state_dict()


def test_watchdog_says_who_waits_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    class StuckEnv(PointEnv):
        def step(self, action: Tensor) -> Timestep:
            go_on.wait(20)
            return super().step(action)

    stop = threading.Event()
    with caplog.at_level(logging.WARNING), build(
        lambda num_envs, _: StuckEnv(num_envs), name="local", max_staleness=1, watchdog_s=0.4
    ) as runtime:  # fmt: skip
        releaser = threading.Timer(1.2, lambda: (stop.set(), go_on.set()))
        releaser.start()
        assert len(list(runtime.iterations(stop_event=stop))) <= 1
    assert "no progress" in caplog.text
    for doing in ("env worker 0: step", "env worker 0 group 0: step", "learner: wait_fragments"):
        assert f"{doing} for " in caplog.text
    assert "actor server 0: wait_requests for " in caplog.text


CTRL_C = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
from tests.runtime.builders import build, runtime_threads
try:
    with build(name="local", max_staleness=1, num_env_workers=2, eval_every=1) as runtime:
        for iteration in runtime.iterations():
            print(iteration.index, flush=True)
except KeyboardInterrupt:
    print("threads", runtime_threads(), threading.active_count(), flush=True)
"""


def test_ctrl_c_leaves_no_thread_behind(root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CTRL_C],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "2":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert output.splitlines()[-1] == "threads [] 1"
    assert process.returncode == 0


# ------------------------------------------------------------------------------------------------- checkpoints
def save(run_dir: Path, env_steps: int, size: int = 1000) -> Path:
    return checkpoint.save(run_dir, env_steps, {"policy": {"w": torch.full((size,), float(env_steps))}, "runtime": {}})


@pytest.mark.parametrize("damage", [cut, flip, remove])
@pytest.mark.parametrize("file", ["policy.pt", "manifest.json"])
def test_corrupt_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path, str], None], file: str
) -> None:
    save(tmp_path, 10)
    damage(save(tmp_path, 20), file)
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert found.env_steps == 10
    assert float(found.state["policy"]["w"][0]) == 10.0
    assert "step_20" in caplog.text
    damage(tmp_path / "checkpoints/step_10", file)
    with pytest.raises(UserError, match="corrupt"):
        checkpoint.load_latest(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_disk_without_any_room_is_an_enospc_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the new checkpoint go to a device that is always full."""
    save(tmp_path, 10)
    real_open = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return real_open(Path("/dev/full") if "w" in mode else path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 20)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["last", "step_10"]


KILLED = """
import sys, torch
from pathlib import Path
from embodied.runtime import checkpoint
state = {"policy": {"w": torch.zeros(3_000_000)}}
print("ready", flush=True)
step = 100
while True:
    checkpoint.save(Path(sys.argv[1]), step, state)
    step += 1
"""


def test_killed_while_saving_leaves_a_valid_checkpoint(tmp_path: Path, root: Path) -> None:
    save(tmp_path, 10)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.kill()
    process.communicate()
    assert checkpoint.load_latest(tmp_path) is not None
    (tmp_path / "checkpoints/.saving-of-a-killed-process").mkdir()
    save(tmp_path, 10**6)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert not [name for name in names if name.startswith(".")], "what a killed process left is cleaned up"
