"""Our tasks on MuJoCo Warp, on the CPU: the same as in the pool of MuJoCo but for rounding, and what is refused."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from embodied.core.config import read_preset
from embodied.core.env import VecEnv
from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec
from embodied.core.types import Obs, Timestep
from embodied.envs import FAMILIES, make_sampler
from embodied.envs.checks.conformance import check_env
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.warp.batch import INSTALL, check_memory, noting, num_bytes
from embodied.envs.mujoco.warp.pool import WarpConfig, WarpPool
from embodied.envs.mujoco.warp.randomization import DeviceRng
from embodied.envs.registry import sim_options
from embodied.envs.tasks.base import Task
from embodied.envs.tasks.tabletop import Tabletop
from embodied.envs.views.stepper import open_task
from embodied.session.config import CONFIG_DIR
from tests.envs.helpers import actions, assert_same, cut_after_three, pool

N, BROKEN = 4, 2
# Differences after one control step, in the observations' units. Seen in 1,920 steps (docs/results/bench/warp.json):
ROUNDING = 2e-5  # without contacts: at most 7e-6
IN_CONTACT = {"state": 2e-2, "privileged": 0.7}  # with contacts: 99% within 0.02 of a rotation and 0.7 of a velocity
CAMERAS = [CameraSpec.square(name, 32) for name in ("front", "wrist")]
OFTEN = {"mode": "interval", "interval_s": 0.1}
TERMS = {
    **read_preset(CONFIG_DIR, "sim2real")["randomization"],
    "joint_damping": {"field": "dof_damping", "names": ["arm"], "range": [0.5, 2.0], "mode": "startup"},
    "armature": {"field": "dof_armature", "names": ["arm"], "range": [0.0, 0.1], "operation": "add", **OFTEN},
    "grip": {"field": "geom_friction", "names": ["left_pad"], "range": [0.6, 1.2], **OFTEN},
    "arm_push": {"field": "arm_push", "range": [0.0, 0.1], **OFTEN},
}
kernels = pytest.mark.slow(reason="compiles kernels for a minute unless they are in Warp's cache")


def make(
    task: str = "lift",
    num_envs: int = N,
    *,
    options: dict[str, Any] | None = None,
    cameras: Sequence[CameraSpec] = (),
    **sim: Any,
) -> WarpPool:
    pytest.importorskip("mujoco_warp", reason=INSTALL)
    family = FAMILIES["mujoco"].build()
    config = family.task_config(task)(**(options or {}))
    sim = {"name": "warp", "device": "cpu", **sim}
    sim = sim_options(task, sim)[1]
    built = family.make(task, config, num_envs=num_envs, num_threads=1, sim=sim, cameras=cameras)
    assert isinstance(built, WarpPool)
    return built


def assert_seen(found: Obs, expected: Obs, atol: float | None = None) -> None:
    """Observations are equal within ``atol`` (None: as after a contact), images but for one pixel of 100."""
    for key, value in expected.items():
        if key.startswith("images."):
            assert ((found[key].int() - value.int()).abs().amax(-1) > 8).float().mean() <= 0.01, key
        else:
            torch.testing.assert_close(found[key], value, rtol=0, atol=IN_CONTACT.get(key, 0) if atol is None else atol)


@cache
def shared(task: str) -> WarpPool:
    """A pool that tests share, because building one takes seconds."""
    return make(task)


def begun(task: str, seed: int = 0) -> tuple[WarpPool, MujocoPool]:
    """Both pools at the start of the same episodes, some of them with the object in the hand."""
    warp, mujoco = shared(task), pool(task, N, seed=seed, stages=True)
    warp.reset(make_sampler(mujoco, seed, stages=True))
    return warp, mujoco


@kernels
def test_a_control_step_is_that_of_mujoco_but_for_rounding() -> None:
    warp, mujoco = begun("reach")
    for key, value in mujoco.observe().items():
        torch.testing.assert_close(warp.observe()[key], value, rtol=0, atol=1e-6)
    for t in range(3):
        action = actions(list(range(N)), 1, 4, salt=t)
        mine, theirs = warp.step(action), mujoco.step(action)
        torch.testing.assert_close(mine.obs, theirs.obs, rtol=0, atol=(t + 1) * ROUNDING)
        torch.testing.assert_close(mine.reward_NE, theirs.reward_NE, rtol=0, atol=(t + 1) * ROUNDING)
        torch.testing.assert_close(mine.info, theirs.info)


@kernels
def test_equal_states_have_equal_contacts_rewards_and_success() -> None:
    """States of the expert's way to success, carried over from MuJoCo."""
    warp, mujoco = begun("lift")
    grasped, solved = 0, 0
    for t in range(60):
        mujoco.step(mujoco.expert())
        if t % 4:
            continue
        for name in ("qpos", "qvel", "ctrl", "mocap_pos"):
            warp.batch.bind(name).copy_(torch.from_numpy(mujoco.batch.bind(name)))
        warp.batch.forward()
        warp.view.changed()
        mujoco.view.changed()
        success = mujoco.task.success()
        assert torch.equal(warp.task.success(), success)
        for name, reward in mujoco.task.rewards(success).items():
            torch.testing.assert_close(warp.task.rewards(success)[name].double(), reward.double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(warp.task.expert(), mujoco.task.expert(), rtol=0, atol=1e-4)
        mine, theirs = (arm.joint_moves(torch.full((N, 3), 0.02).double()) for arm in (warp.view.arm, mujoco.view.arm))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
        grasped, solved = grasped + int(mujoco.view.grasped("cube").sum()), solved + int(success.sum())
    assert grasped > 10
    assert solved > 3


@kernels
@pytest.mark.parametrize("task", ["reach", "lift"])
def test_it_keeps_the_contract_and_resumes_exactly(task: str) -> None:
    env = shared(task)
    assert isinstance(env, VecEnv)
    assert env.resumes_exactly
    cameras = CAMERAS if task == "lift" else ()
    check_env(lambda num_envs: make(task, num_envs, options={"max_episode_steps": 9}, cameras=cameras))


@kernels
@pytest.mark.parametrize(("field", "value"), [("qvel", np.nan), ("qvel", 1e30), ("qpos", np.nan)])
def test_only_a_broken_env_ends(tmp_path: Path, field: str, value: float) -> None:
    env, plan = shared("lift"), actions(list(range(N)), 4, 4)
    env.guard.dump_dir = tmp_path
    env.reset(make_sampler(env))
    expected = env.step(plan)
    env.reset(make_sampler(env))
    env.batch.bind(field)[BROKEN, 3] = value
    step = env.step(plan)

    others = torch.tensor([i for i in range(N) if i != BROKEN])
    assert_same(step, expected, others, others)
    assert step.truncated_N.tolist() == [i == BROKEN for i in range(N)]
    assert step.num_steps_N.tolist() == [0 if i == BROKEN else 4 for i in range(N)]
    for tensor in (*step.obs.values(), *step.final_obs.values(), step.reward_NE):
        assert torch.isfinite(tensor).all()
    (path,) = tmp_path.glob("nan_*.npz")
    with np.load(path) as dump:
        assert dump["ids"].tolist() == [BROKEN]
        assert dump["state"].shape == dump["state_before"].shape


@kernels
def test_pools_of_two_threads_do_not_disturb_each_other() -> None:
    """As a run steps its training envs while its evaluator builds envs of its own."""
    training, other, plan = make("reach", 32), shared("reach"), torch.zeros(32, 4, 4)
    other.reset(make_sampler(other))
    expected = other.step(plan[:N])
    training.reset(make_sampler(training))
    done = threading.Event()

    def train() -> list[Timestep]:
        steps = [training.step(plan)]
        while not done.is_set():
            steps.append(training.step(plan))
        return steps

    with ThreadPoolExecutor(1) as executor:
        trained = executor.submit(train)
        try:
            for _ in range(3):
                evaluated = make("reach")
                evaluated.reset(make_sampler(evaluated))
                assert_same(evaluated.step(plan[:N]), expected)
        finally:
            done.set()
    training.reset(make_sampler(training))
    for step in trained.result():
        assert_same(step, training.step(plan))


@kernels
def test_views_of_pools_take_it() -> None:
    pytest.importorskip("mujoco_warp", reason=INSTALL)
    stepper = open_task("reach", N, sim={"name": "warp", "device": "cpu"})
    assert isinstance(stepper.env, WarpPool)
    stepper.reset()
    assert stepper.step(torch.zeros(N, 4)).num_steps_N.tolist() == [1] * N
    with pytest.raises(UserError, match=r"name: .*mujoco"):
        gymnasium.make("embodied/Reach-v0", sim={"name": "warp"})


@kernels
def test_envs_whose_contacts_have_no_memory_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = make("lift", max_contacts=1, dump_dir=str(tmp_path))  # a cube on the table has four
    env.reset(make_sampler(env))
    step = env.step(torch.zeros(N, 1, 4))
    assert step.truncated_N.any()
    assert (step.num_steps_N[step.truncated_N] == 0).all()
    assert "raise sim.max_contacts or sim.max_constraints" in caplog.text


@kernels
def test_an_episode_is_cut_after_steps_of_success_in_a_row() -> None:
    env = make("reach")
    env.cut_after_success = 3
    env.reset(make_sampler(env))
    assert cut_after_three(env, 30, torch.zeros(N, dtype=torch.int64)) > 0


@kernels
def test_its_expert_solves_the_task_and_it_can_be_filmed() -> None:
    env = shared("lift")
    env.reset(make_sampler(env))
    render, first = env.film(64, 48), None
    for _ in range(64):
        first = render() if first is None else first
        step = env.step(env.expert())
    assert step.episodes.success_at_end_M.float().mean() > 0.7
    assert first is not None
    assert first.shape == (N, 48, 64, 3)
    assert (first != render()).any()


@kernels
@pytest.mark.parametrize("task", ["detour", "push", "lift", "pick_place", "tabletop"])
def test_other_tasks_run_as_in_mujoco(task: str) -> None:
    """``stack`` needs other kernels, which take half a minute more: docs/results/warp_agreement.py has it."""
    warp, mujoco = begun(task)
    mine, theirs = warp.step(mujoco.expert()), mujoco.step(mujoco.expert())
    assert_seen(mine.obs, theirs.obs)
    torch.testing.assert_close(mine.reward_NE, theirs.reward_NE, rtol=0, atol=1e-3)


def test_what_it_cannot_simulate_is_refused_before_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tabletop, "shapes", Task.shapes)  # as a task that changes shapes and does not say which
    with pytest.raises(UserError, match=r"the task varies .* between envs"):
        make("tabletop")


def assert_same_models(warp: WarpPool, mujoco: MujocoPool) -> None:
    for name, value in warp.batch._varying.items():
        expected = mujoco.batch.expanded(name)
        expected = getattr(warp.model, name) if expected is None else expected
        given = torch.from_numpy(np.array(expected)).float().expand(len(value), *expected.shape[-value.ndim + 1 :])
        if name.startswith("geom_"):  # of the geoms of an object, the one that has its type
            kind = mujoco.batch.expanded("geom_type")
            kind = np.broadcast_to(warp.model.geom_type if kind is None else kind, (N, warp.model.ngeom))
            real = torch.from_numpy(kind[:, warp.fields._geom_G] == warp.batch.model.geom_type)
            assert real.sum(1).tolist() == [warp.model.ngeom] * N
            value, given = value[real], given[:, warp.fields._geom_G][real]
        assert torch.equal(value, given), name


@kernels
@pytest.mark.parametrize("task", ["pick_place", "tabletop"])
def test_randomised_episodes_are_those_of_mujoco_and_resume_exactly(task: str) -> None:
    """All terms of ``sim2real``, terms that change within an episode, images, and shapes of ``tabletop``.

    A ball that starts in the hand touches the fingers in points, or by rounding it does not.
    """
    stages = task != "tabletop"
    looks = read_preset(CONFIG_DIR, "sim2real")["camera_randomization"]
    sim = {"randomization": TERMS, "camera_randomization": looks}
    warp = make(task, options={"max_episode_steps": 9}, cameras=CAMERAS, **sim)
    mujoco = pool(task, N, 9, seed=3, stages=stages, sim=sim, cameras=CAMERAS)
    sampler = make_sampler(mujoco, 3, stages=stages)
    assert_seen(warp.reset(sampler), mujoco.observe(), 1e-6)
    varied: dict[str, set[float]] = {"geom_friction": set(), "dof_invweight0": set(), "body_mass": set()}
    plan, steps = actions(list(range(N)), 14, 4), []
    for t in range(14):
        assert_same_models(warp, mujoco)
        for name, sums in varied.items():
            sums.add(float(warp.batch.expand(name).double().sum()))
        if t == 7:
            state, drawn = {key: value.clone() for key, value in warp.state_dict().items()}, sampler.state_dict()
        steps.append(warp.step(plan[:, t]))
        other = mujoco.step(plan[:, t])
        if t < 3:
            assert_seen(steps[t].obs, other.obs)
            torch.testing.assert_close(warp.arm.joint_pos.double(), mujoco.arm.joint_pos, rtol=0, atol=1e-5)
            torch.testing.assert_close(warp.arm.joint_vel.double(), mujoco.arm.joint_vel, rtol=0, atol=1e-4)
    assert len(varied["geom_friction"]) > 5
    assert len(varied["dof_invweight0"]) > 5
    assert len(varied["body_mass"]) == 2

    warp.reset(make_sampler(warp, 99))
    resumed = make_sampler(warp, 3, stages=stages)
    resumed.load_state_dict(drawn)
    warp.load_state_dict(state, resumed)
    for t in range(7, 14):
        assert_same(warp.step(plan[:, t]), steps[t])


@kernels
@pytest.mark.parametrize("field", ["action_delay", "joint_friction"])
def test_a_quantity_of_the_hardware_can_change_within_an_episode(field: str) -> None:
    sim = {"randomization": {"changing": {"field": field, "range": [0.0, 0.04], **OFTEN}}}
    warp, mujoco = make("reach", **sim), pool("reach", N, sim=sim)
    warp.reset(make_sampler(mujoco))
    (live,) = mujoco.randomizer.fields.values.values()
    seen = set()
    for _ in range(8):
        warp.step(torch.zeros(N, 4))
        mujoco.step(torch.zeros(N, 4))
        assert_same_models(warp, mujoco)
        seen.add(float(live.sum()))
    assert len(seen) > 2


@kernels
def test_the_last_observation_is_measured_after_the_last_step() -> None:
    env = make("pick_place", options={"max_episode_steps": 2}, randomization=TERMS, cameras=CAMERAS)
    env.autoreset = False
    env.reset(make_sampler(env))
    step = env.step(actions(list(range(N)), 2, 4))
    assert step.truncated_N.all()
    torch.testing.assert_close(step.final_obs, step.obs, rtol=0, atol=0)


@kernels
def test_pools_of_one_process_have_models_of_their_own() -> None:
    plan, found = actions(list(range(N)), 4, 4), []
    heavy = {"mass": {"field": "body_mass", "names": ["cube"], "range": [3.0, 3.0]}}
    pools = [shared("lift"), make(randomization=heavy), make(randomization=heavy)]
    for together in (True, False):
        steps: list[list[Timestep]] = [[], [], []]
        for env in pools:
            env.reset(make_sampler(env))
        order = [(t, i) for t in range(4) for i in range(3)]
        for t, i in order if together else sorted(order, key=lambda pair: pair[1]):
            steps[i].append(pools[i].step(plan[:, t]))
        found.append(steps)
    for alone, beside in zip(*found, strict=True):
        for a, b in zip(alone, beside, strict=True):
            assert_same(a, b)
    for a, b in zip(found[0][1], found[0][2], strict=True):
        assert_same(a, b)
    cube = pools[0].model.body("cube").id
    masses = [env.batch._model.body_mass.numpy()[:, cube] for env in pools]
    np.testing.assert_allclose(masses[1], 3 * np.repeat(masses[0], N), rtol=1e-6)


def test_random_numbers_of_a_device_are_those_of_episodes() -> None:
    rng, limit_n, left_n = EpisodeRng(np.array([3, 1 << 40, 7]), np.array([0, 5, 2])), np.array([9, 8, 7]), [9, 3, 1]
    device = DeviceRng(torch.tensor(left_n))
    device.start(torch.arange(3), rng, limit_n)
    expected = torch.from_numpy(rng.normal("noise/joints", limit_n - left_n, 7))
    torch.testing.assert_close(device.normal("noise/joints", 7, slice(None)), expected, rtol=0, atol=1e-14)
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(device.normal("noise/joints", 7, rows), expected[rows], rtol=0, atol=1e-14)


@pytest.mark.parametrize("field", ["body_margin", "geom_adhesion"])
def test_fields_that_warp_has_once_are_refused_with_their_term(field: str) -> None:
    term = {"field": field, "names": ["cube"], "range": [0.0, 0.1], "operation": "add"}
    with pytest.raises(UserError, match=rf"sim\.randomization\.odd: sim=warp: {field} cannot differ between envs"):
        make(randomization={"odd": term})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_without_a_device() -> None:
    with pytest.raises(UserError, match=r"sim\.device=cuda, but this build"):
        make("reach", device="cuda")


def test_without_warp_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)  # as Python marks a module that cannot be imported
    family = FAMILIES["mujoco"].build()
    with pytest.raises(UserError, match=r"not installed: pip install .*\[warp\]"):
        family.make("reach", family.task_config("reach")(), num_envs=1, num_threads=1, sim=WarpConfig(device="cpu"))


@kernels
def test_a_number_of_envs_that_does_not_fit_names_one_that_does() -> None:
    pytest.importorskip("mujoco_warp", reason=INSTALL)
    import mujoco_warp

    model = shared("lift").model
    sizes = [num_bytes(mujoco_warp.make_data(model, nworld=num, nconmax=32, njmax=128)) for num in (1, 2, 9)]
    env_bytes = sizes[1] - sizes[0]
    assert sizes[2] == pytest.approx(sizes[0] + 8 * env_bytes, rel=0.02)
    check_memory(9, env_bytes, 9 * env_bytes)
    with pytest.raises(UserError, match=r"10 envs of sim=warp need .* allowed: at most 9 in a group"):
        check_memory(10, env_bytes, 9 * env_bytes)


def test_while_launches_are_noted_those_of_other_threads_are_made() -> None:
    warp = pytest.importorskip("warp", reason=INSTALL)

    @warp.kernel
    def add_one(values: warp.array(dtype=float)) -> None:
        i = warp.tid()
        values[i] = values[i] + 1.0

    values, device = warp.zeros(3, dtype=float, device="cpu"), warp.get_device("cpu")
    with noting(warp, device) as noted:
        warp.launch(add_one, dim=3, inputs=[values], device="cpu")
        assert values.numpy().tolist() == [0, 0, 0]
        with ThreadPoolExecutor(1) as executor:
            executor.submit(warp.launch, add_one, dim=3, inputs=[values], device="cpu").result()
    assert values.numpy().tolist() == [1, 1, 1]
    assert [*noted] == [(add_one.module, 1)]
    warp.launch(add_one, dim=3, inputs=[values], device="cpu")
    assert values.numpy().tolist() == [2, 2, 2]
