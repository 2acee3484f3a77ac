"""What the engine leaves out changes no results."""

from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from embodied.envs import make_sampler
from embodied.envs.mujoco.engine import stop_timers, take_gravity, timers
from tests.envs.helpers import actions, pool

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


def test_timers_run_only_where_asked() -> None:
    model = mujoco.MjModel.from_xml_string(ONE_BODY.format(gravcomp=1, joint="", sensor=""))
    stop_timers()
    silent, timed = mujoco.MjData(model), mujoco.MjData(model)
    mujoco.mj_step(model, silent)
    with timers():
        mujoco.mj_step(model, timed)
    mujoco.mj_step(model, silent)
    assert silent.timer[0].duration == 0 < timed.timer[0].duration
