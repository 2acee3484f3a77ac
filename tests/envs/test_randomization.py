"""Domain randomisation: what changes, by how much, when, and what follows from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
import yaml
from mujoco.batch import Batch

from embodied.core.errors import UserError
from embodied.core.options import from_mapping
from embodied.envs import SimConfig, make_pool, make_sampler
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.randomization.randomizer import Fields, Randomizer
from embodied.envs.mujoco.randomization.terms import RandomizationTerm
from embodied.envs.mujoco.scene import RED, add_cube, on_table
from tests.envs.helpers import PANDA, pool, restart

N = 400


def batch(num_envs: int = N) -> Batch:
    spec = on_table(PANDA)
    add_cube(spec, "cube", 0.02, 0.064, RED)
    return Batch(spec.compile(), num_envs, 1, persistent=True)


def term(**changes: Any) -> RandomizationTerm:
    options = {"field": "geom_friction", "names": ["left_pad", "right_pad"], "range": [0.5, 1.5], "column": 0}
    return from_mapping(RandomizationTerm, {**options, **changes})


def apply(sims: Batch, terms: dict[str, RandomizationTerm], episode: int = 0, seed: int = 0) -> Randomizer:
    randomizer = Randomizer(Fields(sims), terms, {}, 1.0)
    ids = np.arange(sims.nsim)
    randomizer.apply(ids, EpisodeRng(ids + seed, np.full(sims.nsim, episode)))
    return randomizer


@pytest.mark.parametrize("operation", ["scale", "add", "abs"])
@pytest.mark.parametrize("column", [0, 2, None])
def test_exactly_the_named_entries_change(operation: str, column: int | None) -> None:
    sims = batch()
    apply(sims, {"friction": term(operation=operation, column=column)})
    nominal, values = sims.model.geom_friction, sims.expanded("geom_friction")
    rows = [sims.model.geom(name).id for name in ("left_pad", "right_pad")]
    named = np.zeros(nominal.shape, bool)
    named[rows, slice(None) if column is None else column] = True
    assert (values[:, ~named] == nominal[~named]).all()

    inverse = {"scale": values / np.maximum(nominal, 1e-12), "add": values - nominal, "abs": values}[operation]
    drawn = inverse[:, named]
    np.testing.assert_allclose(drawn, np.repeat(drawn[:, :1], drawn.shape[1], 1), rtol=1e-9)  # one number for an env
    assert 0.5 <= drawn.min() < 0.51
    assert 1.49 < drawn.max() < 1.5


@pytest.mark.parametrize(
    ("distribution", "bounds", "mean", "std", "low", "high"),
    [
        ("uniform", [0.5, 1.5], 1.0, np.sqrt(1 / 12), 0.5, 1.5),
        ("log_uniform", [0.1, 10.0], (10 - 0.1) / np.log(100), None, 0.1, 10.0),
        ("gaussian", [2.0, 0.25], 2.0, 0.25, 0.0, 4.0),
    ],
)
def test_distributions(
    distribution: str, bounds: list[float], mean: float, std: float | None, low: float, high: float
) -> None:
    n = 20000
    rng = EpisodeRng(np.arange(n), np.zeros(n, int))
    values = term(distribution=distribution, range=bounds).draw(rng, "x")[:, 0]
    assert values.shape == (n,)
    assert low <= values.min() < values.max() <= high
    assert abs(values.mean() - mean) < 4 * values.std() / np.sqrt(n)
    if std is not None:
        assert abs(values.std() - std) < 0.02 * std
    if distribution == "log_uniform":  # as many below the geometric mean as above
        assert abs((values < 1.0).mean() - 0.5) < 0.02


def test_startup_is_drawn_once_and_reset_at_every_episode() -> None:
    terms = {
        "friction": {"field": "geom_friction", "names": ["left_pad"], "range": [0.5, 1.5], "mode": "reset"},
        "mass": {"field": "body_mass", "names": ["cube"], "range": [0.5, 2.0], "mode": "startup"},
    }
    env = pool("lift", 6, 3, sim={"randomization": terms})
    friction, mass = (env.batch.expanded(name) for name in ("geom_friction", "body_mass"))
    pad, cube = env.model.geom("left_pad").id, env.model.body("cube").id

    def values() -> tuple[np.ndarray, np.ndarray]:
        return friction[:, pad, 0].copy(), mass[:, cube].copy()

    first, second = values(), None
    env.step(torch.zeros(6, 2, 4))
    np.testing.assert_array_equal(values(), first)  # constant inside an episode
    env.step(torch.zeros(6, 2, 4))
    second = values()
    assert (second[0] != first[0]).all()
    np.testing.assert_array_equal(second[1], first[1])
    assert len(np.unique(first[1])) == 6
    restart(env, 0)
    np.testing.assert_array_equal(values(), first)  # episode 0 of the same seeds
    restart(env, 1)
    for again, before in zip(values(), first, strict=True):
        np.testing.assert_array_equal(again[:-1], before[1:])  # env i has seed i + 1
        assert again[-1] not in before


def test_an_episode_that_begins_directly_is_the_one_that_follows_others() -> None:
    """Terms of different modes share an element, so their order matters."""
    friction = {"field": "geom_friction", "names": ["cube"], "column": 0, "operation": "abs"}
    mass = {"field": "body_mass", "names": ["cube"]}
    terms = {
        "rough": {**friction, "range": [0.2, 0.4]},
        "rougher": {**friction, "range": [0.8, 0.9], "mode": "startup"},
        "light": {**mass, "range": [0.1, 0.2], "mode": "startup"},
        "heavy": {**mass, "range": [2.0, 3.0], "mode": "interval", "interval_s": 0.1},
    }
    names = ("geom_friction", "body_mass", "body_inertia", "dof_invweight0")
    later = pool("push", 3, 2, sim={"randomization": terms})
    direct = make_pool("push", {"max_episode_steps": 2}, num_envs=3, num_threads=1, sim={"randomization": terms})
    for _ in range(2):
        later.step(torch.zeros(3, 2, 4))
    sampler = make_sampler(direct)
    sampler.number_N[:] = later.plans.number_n - 1
    direct.reset(sampler)
    assert direct.plans.number_n.tolist() == later.plans.number_n.tolist() == [2, 2, 2]
    for name in names:
        np.testing.assert_array_equal(later.batch.expanded(name), direct.batch.expanded(name), name)


def test_a_partial_reset_leaves_the_other_envs_alone() -> None:
    sims = batch(6)
    terms = {"friction": term(), "mass": term(field="body_mass", names=["cube"], column=None)}
    randomizer = apply(sims, terms)
    names = ("geom_friction", "body_mass", "body_inertia", "body_invweight0", "dof_invweight0")
    before = [sims.expanded(name).copy() for name in names]
    ids = np.array([1, 4])
    randomizer.apply(ids, EpisodeRng(ids, np.ones(2, int)))
    for name, old in zip(names, before, strict=True):
        changed = (sims.expanded(name) != old).reshape(6, -1).any(1)
        assert changed.tolist() == [i in ids for i in range(6)], name


def test_terms_on_one_field_do_not_undo_each_other() -> None:
    sims = batch(5)
    left = {"names": ["left_pad"], "operation": "abs"}
    terms = {
        "sliding": term(**left, range=[2.0, 2.0], column=0),
        "rolling": term(**left, range=[0.3, 0.3], column=2),
        "other": term(names=["right_pad"], operation="abs", range=[0.7, 0.7], column=0),
        "damping": term(field="actuator_biasprm", names=["joint1"], range=[0.5, 0.5], column=2),
        "stiffness": term(field="actuator_gainprm", names=["joint1"], range=[2.0, 2.0], column=0),
    }
    apply(sims, terms)
    friction, bias = (
        sims.expanded("geom_friction")[:, sims.model.geom("left_pad").id],
        sims.expanded("actuator_biasprm"),
    )
    np.testing.assert_allclose(friction, [[2.0, sims.model.geom("left_pad").friction[1], 0.3]] * 5)
    assert (sims.expanded("geom_friction")[:, sims.model.geom("right_pad").id, 0] == 0.7).all()
    np.testing.assert_allclose(bias[:, 0, :3], [[0.0, -2000.0, -50.0]] * 5)


def test_a_servo_keeps_pulling_to_its_target() -> None:
    """A scaled stiffness scales gain and bias alike, so that force is zero at q = ctrl whatever the draw."""
    sims = batch(8)
    apply(sims, {"kp": term(field="actuator_gainprm", names=["joint1", "joint4"], range=[0.5, 2.0])})
    gain, bias, model = sims.expanded("actuator_gainprm"), sims.expanded("actuator_biasprm"), sims.model
    named = [model.actuator("joint1").id, model.actuator("joint4").id]
    np.testing.assert_array_equal(bias[:, :, 1], -gain[:, :, 0])
    np.testing.assert_array_equal(bias[:, :, 2], np.broadcast_to(model.actuator_biasprm[:, 2], (8, model.nu)))
    assert (gain[:, named, 0] != model.actuator_gainprm[named, 0]).all()
    rest = [i for i in range(model.nu) if i not in named]
    np.testing.assert_array_equal(gain[:, rest], np.broadcast_to(model.actuator_gainprm[rest], gain[:, rest].shape))


def test_a_new_mass_is_as_if_it_had_been_in_the_file() -> None:
    sims = batch(3)
    apply(sims, {"mass": term(field="body_mass", names=["cube"], range=[0.2, 0.2], operation="abs", column=None)})
    spec = on_table(PANDA)
    add_cube(spec, "cube", 0.02, 0.2, RED)
    heavy = spec.compile()
    for name in ("body_mass", "body_inertia", "body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0"):
        for values in sims.expanded(name):
            np.testing.assert_allclose(values, getattr(heavy, name), rtol=1e-9, err_msg=name)
    data = mujoco.MjData(heavy)
    data.qpos[9:12] = [0.5, 0.0, 0.3]
    sims.bind("qpos")[:] = data.qpos
    sims.bind("qfrc_applied")[:, 9] = data.qfrc_applied[9] = 1.0  # a push of 1 N on the cube
    mujoco.mj_step(heavy, data, 10)
    sims.step(nstep=10)
    np.testing.assert_allclose(sims.bind("qpos"), np.tile(data.qpos, (3, 1)), atol=1e-12)
    assert sims.bind("qvel")[0, 9] == pytest.approx(0.1 / 0.2)  # 1 N for 0.1 s on 0.2 kg


def test_a_free_joint_is_named_with_all_its_degrees_of_freedom() -> None:
    sims = batch(2)
    apply(
        sims,
        {"damping": term(field="dof_damping", names=["cube", "joint2"], range=[3, 3], operation="abs", column=None)},
    )
    changed = (sims.expanded("dof_damping") != sims.model.dof_damping).all(0)
    assert np.flatnonzero(changed).tolist() == [1, 9, 10, 11, 12, 13, 14]


def test_draws_do_not_depend_on_how_many_envs_there_are() -> None:
    few, many, shifted = batch(3), batch(20), batch(3)
    gaussian = term(field="body_mass", names=["cube"], distribution="gaussian", range=[1, 0.1], column=None)
    terms = {"friction": term(), "mass": gaussian}
    for sims, seed in ((few, 0), (many, 0), (shifted, 5)):
        apply(sims, terms, seed=seed)
    for name in ("geom_friction", "body_mass", "body_inertia"):
        np.testing.assert_array_equal(few.expanded(name), many.expanded(name)[:3])
        np.testing.assert_array_equal(shifted.expanded(name), many.expanded(name)[5:8])


def test_comes_from_plain_mappings() -> None:
    mapping = {
        "randomization": {
            "cube_mass": {"field": "body_mass", "names": ["cube"], "range": [0.5, 2], "distribution": "log_uniform"}
        }
    }
    made = from_mapping(SimConfig, mapping, "sim").randomization["cube_mass"]
    assert made == RandomizationTerm("body_mass", (0.5, 2.0), ("cube",), distribution="log_uniform")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"field": "geom_frction"}, "field: got 'geom_frction', allowed: .* Did you mean 'geom_friction'"),
        ({"field": "opt.gravity"}, "field: got 'opt.gravity'"),
        ({"mode": "resets"}, "mode: got 'resets', allowed: 'startup', 'reset' or 'interval'. Did you mean 'reset'"),
        ({"distribution": "loguniform"}, "Did you mean 'log_uniform'"),
        ({"operation": "scales"}, "Did you mean 'scale'"),
        ({"range": [2.0, 1.0]}, "has low above high"),
        ({"range": [0.0, 1.0], "distribution": "log_uniform"}, "must be above 0"),
        ({"range": [1.0, -1.0], "distribution": "gaussian"}, "negative standard deviation"),
        ({"names": []}, "names: got none, needed: those that geom_friction varies for"),
        ({"range": [1.0]}, "range: got \\[1.0\\], allowed: a list of 2"),
        ({"colum": 1}, "Did you mean 'column'"),
    ],
)
def test_bad_terms_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        term(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"names": ["left_pat"]},
            "unknown geom in the randomization of geom_friction 'left_pat'. Did you mean 'left_pad'",
        ),
        ({"field": "body_mass", "names": ["cubes"], "column": None}, "Did you mean 'cube'"),
        ({"field": "actuator_gainprm", "names": ["joint9"]}, "unknown actuator"),
        ({"column": 3}, "column: got 3, allowed: null or 0 to 2"),
        ({"field": "body_mass", "names": ["cube"]}, "column: got 0, allowed: null"),
        ({"field": "geom_condim"}, "only real numbers"),
    ],
)
def test_what_the_model_does_not_have_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Randomizer(Fields(batch(1)), {"x": term(**changes)}, {}, 1.0)


def test_the_documented_example_works(root: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (root / "docs" / "environments.md").read_text(), re.DOTALL)
    env = pool("lift", 3, sim=yaml.safe_load(example))
    assert set(env.randomizer.terms) == {"grip", "cube_mass", "stiffness"}
    assert torch.isfinite(env.step(torch.ones(3, 4)).obs["state"]).all()
