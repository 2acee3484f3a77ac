"""What the engine leaves out changes no results."""

from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from embodied.envs import make_sampler
from embodied.envs.mujoco import pool as pools
from embodied.envs.mujoco.engine import needs_own_data, stop_timers, take_gravity, timers
from embodied.envs.tasks.lift import Lift
from tests.envs.helpers import actions, assert_same, pool

MASS = {"field": "body_mass", "names": ["objects"], "range": [0.5, 2.0], "mode": "interval", "interval_s": 0.2}
ONE_BODY = """<mujoco><worldbody><body gravcomp="{gravcomp}"><joint {joint}/><geom size="1"/><site name="s"/></body>
</worldbody><sensor>{sensor}</sensor></mujoco>"""


@pytest.mark.parametrize("terms", [{}, {"mass": MASS}], ids=["plain", "masses that change"])
def test_objects_with_an_applied_weight_move_as_in_gravity(
    terms: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    env, plan = pool("stack", 3, 5, sim={"randomization": terms}), actions([0, 1, 2], 12, 4)
    assert not env.model.opt.gravity.any()
    apply = env.arm.apply

    def simulate(*args: Any, **measured: Any) -> None:
        apply(*args, **measured)
        for i in range(3):
            model, data = env.batch.get_model(i), env.batch.get_data(i)
            model.opt.gravity[2] = -9.81
            data.xfrc_applied[:] = 0
            mujoco.mj_step(model, data, env.substeps)
            expected[i] = data.qpos

    monkeypatch.setattr(env.arm, "apply", simulate)
    expected = np.zeros((3, env.model.nq))
    masses = []
    for t in range(12):
        ended = env.step(plan[:, t]).truncated_N.numpy()
        np.testing.assert_allclose(env.batch.bind("qpos")[~ended], expected[~ended], rtol=0, atol=1e-13)
        masses.append(env.batch.bind("xfrc_applied")[:, env.model.body("cube").id, 2] / -9.81)
    assert (np.ptp(masses, axis=0) > 0.01).all() == bool(terms)


def test_a_state_of_a_version_with_gravity_gets_the_weights() -> None:
    env, older, plan = pool("lift", 2), pool("lift", 2), actions([0, 1], 3, 4)
    older.batch.bind("xfrc_applied")[:] = 0
    older.load_state_dict(older.state_dict(), make_sampler(older))
    assert (older.batch.bind("xfrc_applied")[:, env.model.body("cube").id, 2] < 0).all()
    for t in range(3):
        assert torch.equal(env.step(plan[:, t]).obs["state"], older.step(plan[:, t]).obs["state"])


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ({}, True),
        ({"gravcomp": 0.5}, False),
        ({"joint": 'actuatorgravcomp="true"'}, False),
        ({"sensor": '<accelerometer site="s"/>'}, False),
    ],
)
def test_gravity_stays_where_its_absence_would_be_noticed(words: dict[str, Any], taken: bool) -> None:
    model = mujoco.MjModel.from_xml_string(ONE_BODY.format(**{"gravcomp": 1, "joint": "", "sensor": "", **words}))
    assert (take_gravity(model) is not None) == taken
    assert model.opt.gravity.any() == (not taken)


@pytest.mark.parametrize("terms", [{}, {"mass": MASS}], ids=["plain", "masses that change"])
def test_data_kept_for_every_simulation_change_no_bit(terms: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of three control steps begin in between."""
    options: dict[str, Any] = {"max_episode_steps": 3, "sim": {"randomization": terms}}
    env = pool("stack", 3, **options)
    monkeypatch.setattr(pools, "needs_own_data", lambda model: True)
    keeping, plan = pool("stack", 3, **options), actions([0, 1, 2], 12, 4)
    assert (env.batch.persistent, keeping.batch.persistent) == (False, True)
    for t in range(0, 12, 2):
        assert_same(env.step(plan[:, t : t + 2]), keeping.step(plan[:, t : t + 2]))


def add_to_lift(monkeypatch: pytest.MonkeyPatch, name: str, kind: mujoco.mjtSensor) -> None:
    """Give the task ``lift`` a sensor at the tool."""

    def scene(task: Lift) -> mujoco.MjSpec:
        spec = without(task)
        spec.add_sensor(name=name, type=kind, objtype=mujoco.mjtObj.mjOBJ_SITE, objname="tcp")
        return spec

    without = Lift.scene
    monkeypatch.setattr(Lift, "scene", scene)


def test_a_sensor_of_velocities_is_current_and_alone_makes_the_engine_compute_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pool("lift", 2).stage == mujoco.mjtStage.mjSTAGE_POS
    add_to_lift(monkeypatch, "speed", mujoco.mjtSensor.mjSENS_FRAMELINVEL)
    env = pool("lift", 2)
    for plan in actions([0, 1], 4, 4).unbind(1):
        env.step(plan)
        assert (env.view.sensor("speed").abs().amax(-1) > 1e-3).all()
        torch.testing.assert_close(env.arm.tcp_vel, env.view.sensor("speed"), atol=1e-12, rtol=0)


def test_the_velocity_of_the_tool_does_not_depend_on_the_number_of_envs() -> None:
    some, more = pool("lift", 8), pool("lift", 40)
    for plan in actions(list(range(40)), 6, 4).unbind(1):
        some.step(plan[:8])
        more.step(plan)
        assert torch.equal(some.arm.tcp_vel, more.arm.tcp_vel[:8])


def test_a_sensor_of_forces_reads_0_at_the_start_of_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reading belongs to the last step, and must not be that of another env."""

    add_to_lift(monkeypatch, "felt", mujoco.mjtSensor.mjSENS_ACCELEROMETER)
    env, felt = pool("lift", 2, 2), []
    for plan in actions([0, 1], 4, 4).unbind(1):
        env.step(plan)
        felt.append(env.view.sensor("felt").clone())
    assert env.batch.persistent
    assert (felt[0] != 0).all()
    assert (felt[1] == 0).all()


@pytest.mark.parametrize(("flag", "keeps"), [("sleep", True), ("ipc", True), ("energy", False)])
def test_data_are_kept_where_the_engine_demands_it(flag: str, keeps: bool) -> None:
    model = mujoco.MjModel.from_xml_string(ONE_BODY.format(gravcomp=1, joint="", sensor=""))
    model.opt.enableflags |= int(getattr(mujoco.mjtEnableBit, f"mjENBL_{flag.upper()}"))
    assert needs_own_data(model) == keeps


def test_timers_run_only_where_asked() -> None:
    model = mujoco.MjModel.from_xml_string(ONE_BODY.format(gravcomp=1, joint="", sensor=""))
    stop_timers()
    silent, timed = mujoco.MjData(model), mujoco.MjData(model)
    mujoco.mj_step(model, silent)
    with timers():
        mujoco.mj_step(model, timed)
    mujoco.mj_step(model, silent)
    assert silent.timer[0].duration == 0 < timed.timer[0].duration


@pytest.mark.parametrize("moved", [False, True], ids=["one model", "places of bodies that differ"])
def test_the_state_of_a_new_simulation_is_that_of_a_reset(moved: bool) -> None:
    env = pool("pick_place", 4, 5)
    if moved:  # a reset puts mocap bodies, such as the tray, where the model of the simulation has them
        env.batch.expand("body_pos")[:, env.model.body("tray").id, 0] += np.arange(4)
    for plan in actions([0, 1, 2, 3], 3, 4).unbind(1):
        env.step(plan)
    ids = np.array([1, 3])
    env.beginning.restore(ids)
    restored = env.batch.state.copy()
    env.batch.reset(ids, stage=int(mujoco.mjtStage.mjSTAGE_NONE))
    assert np.array_equal(env.batch.state, restored)
    assert (np.ptp(env.batch.bind("mocap_pos")[ids], axis=0) > 0).any() == moved
