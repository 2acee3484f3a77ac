"""The instructed task: what counts, what distracts, which episodes come when, and that objects are what they seem."""

from __future__ import annotations

from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch
from mujoco.batch import MODEL_FIELDS, Batch
from torch import Tensor

from embodied.core.spec import TRAIN
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.randomization.object_shapes import ShapeVariants
from embodied.envs.mujoco.scene import RED, Shape, add_object, on_table
from embodied.envs.rendering.vision import CAMERAS
from embodied.envs.tasks.tabletop import SLOTS, UPRIGHT
from tests.envs.helpers import PANDA, assert_continues, pool, restart

SHAPES = (Shape("box", (0.02,) * 3), Shape("cylinder", (0.02, 0.035)), Shape("sphere", (0.025,)))
NAMES = ("a", "b", "c")
MASS_KG = 0.064


def rest_in(env: MujocoPool, name: str, tray: Tensor) -> None:
    """Leave the object in the middle of trays at [N, 3] until it rests there, while the arm stays where it is."""
    env.view.body_qpos(name)[:, :3] = tray + torch.tensor([0.0, 0.0, 0.045])
    env.view.body_qvel(name)[:] = 0
    for _ in range(12):
        env.step(torch.tensor([0.0, 0.0, 0.0, 1.0]).repeat(env.num_envs, 1))


# -- what counts -------------------------------------------------------------------------------------------------------


def test_only_the_named_object_in_the_named_tray_counts() -> None:
    env = pool("tabletop", 24)
    wanted, trays = env.task.tray, env.task.trays
    other = torch.where((wanted == trays[0]).all(1, keepdim=True), trays[1], trays[0])
    rest_in(env, "target", other)
    assert not env.task.success().any(), "the other tray"
    for distractor in SLOTS[1:]:
        rest_in(env, distractor, wanted)
        assert not env.task.success().any(), "another object"
        restart(env, 0)
    rest_in(env, "target", wanted)
    assert env.task.success().all()


def test_knocking_over_what_stands_tall_costs() -> None:
    """A lying cylinder loses that term until it is in the tray; a cube or a ball that rolled has lost nothing."""
    env = pool("tabletop", 24)
    tall = env.task.half_height_m > env.task.half_width_m
    assert 0 < tall.sum() < 24
    standing = env.task.rewards(env.task.success())["upright"]
    env.view.body_qpos("target")[:, 3:] = torch.tensor([0.5**0.5, 0.5**0.5, 0.0, 0.0])  # by 90 degrees
    lying = env.task.rewards(env.task.success())["upright"]
    assert torch.allclose(standing, torch.full_like(standing, UPRIGHT))
    assert torch.allclose(lying, UPRIGHT * (~tall).double(), atol=1e-6)
    rest_in(env, "target", env.task.tray)
    assert torch.allclose(env.task.rewards(env.task.success())["upright"], torch.full_like(standing, UPRIGHT))


def test_what_is_said_is_what_is_there() -> None:
    """The target has the colour and the shape of the instruction, and the tray is on its side."""
    env = pool("tabletop", 48)
    words, rgba = env.task.config.words, env.batch.expanded("geom_rgba")
    types = {"cube": mujoco.mjtGeom.mjGEOM_BOX, "cylinder": mujoco.mjtGeom.mjGEOM_CYLINDER,
             "ball": mujoco.mjtGeom.mjGEOM_SPHERE}  # fmt: skip
    geom = env.model.geom("target").id
    for i in range(48):
        color, shape, _, tray, _ = env.spec.goals[env.task.instruction_N[i]].split()
        assert color in env.spec.texts[env.task.instruction_N[i]]
        assert tuple(rgba[i, geom, :3]) == pytest.approx(words.colors[color])
        assert env.batch.expanded("geom_type")[i, geom] == types[shape]
        assert (env.task.tray[i, 1] > 0) == (tray == "left")


def test_only_the_instruction_tells_the_target() -> None:
    """A distractor shares its shape, another its colour; all three stand anywhere, apart from each other."""
    env = pool("tabletop", 600)
    shape, color = env.task.shape_NB, env.task.color_NB
    assert (shape[:, 1] == shape[:, 0]).all()
    assert (color[:, 2] == color[:, 0]).all()
    assert (color[:, 1] != color[:, 0]).all()
    assert (shape[:, 2] != shape[:, 0]).all()
    assert len(torch.unique(torch.stack([color[:, 0], color[:, 1]], 1), dim=0)) == 12
    assert len(torch.unique(torch.stack([shape[:, 0], shape[:, 2]], 1), dim=0)) == 6
    place = torch.stack([env.view.body_qpos(name)[:, :2] for name in SLOTS], 1)
    config = env.task.config
    cell = (place[..., 0] > 0.525) * 3 + (place[..., 1] > -0.05) * 1 + (place[..., 1] > 0.05) * 1
    share = torch.stack([(cell == k).double().mean(0) for k in range(6)])
    assert share.min() > 0.1, "every object in every cell"
    gaps = (place[:, :, None] - place[:, None]).norm(dim=-1)[:, [0, 0, 1], [1, 2, 2]]
    assert gaps.min() >= 0.11 - 2 * config.jitter_m[1] - 1e-9


# -- episodes ----------------------------------------------------------------------------------------------------------


def test_training_never_asks_for_what_is_held_out() -> None:
    env = pool("tabletop", 36, 2, splits=(TRAIN,))
    for episode in range(4):
        told = [env.spec.goals[i] for i in env.task.instruction_N]
        splits = {env.spec.splits[i] for i in env.task.instruction_N}
        assert splits == {TRAIN}, episode
        assert {told.count(goal) for goal in told} == {2}, "18 goals in 36 envs"
        env.step(torch.zeros(36, 2, 4))


def test_evaluation_asks_for_as_many_of_both() -> None:
    env = pool("tabletop", 48)
    splits = [env.spec.splits[i] for i in env.task.instruction_N]
    assert splits.count("train") == splits.count("held_out") == 24
    assert len({env.spec.goals[i] for i in env.task.instruction_N}) == 24


def test_episodes_tell_what_was_asked() -> None:
    env = pool("tabletop", 6, 2)
    told, words = env.task.instruction_N.clone(), env.instruction_texts
    stats = env.step(torch.zeros(6, 2, 4)).episodes
    assert stats.plans.instruction_n.tolist() == told.tolist()
    assert [env.spec.texts[i] for i in told] == words
    assert not torch.equal(env.task.instruction_N, told)
    assert env.instruction_texts != words


def test_continues_exactly_with_masses_of_its_own_for_every_shape() -> None:
    mass = {"field": "body_mass", "names": ["target"], "range": [0.5, 2.0]}
    assert_continues("tabletop", {"randomization": {"mass": mass}}, num_envs=6, stagger=True, splits=(TRAIN,))


def test_with_cameras_the_instruction_is_observed_and_objects_are_not() -> None:
    camera = replace(CAMERAS["front"], width=8, height=8)
    env = pool("tabletop", 4, 3, cameras=[camera])
    obs = restart(env, 0)
    assert torch.equal(obs["instruction"], env.task.instruction_N)
    assert obs["instruction"] is not env.task.instruction_N
    assert {name.split("[")[0] for name in env.spec.state_names} == set(env.arm.observe())
    before = env.task.instruction_N.clone()
    step = env.step(torch.zeros(4, 3, 4))
    assert torch.equal(step.final_obs["instruction"], before)
    assert torch.equal(step.obs["instruction"], env.task.instruction_N)


# -- objects -----------------------------------------------------------------------------------------------------------


def model(kinds: list[int]) -> mujoco.MjModel:
    """The table with a native object of each kind."""
    spec = on_table(PANDA)
    for name, kind in zip(NAMES, kinds, strict=True):
        add_object(spec, name, SHAPES[kind], MASS_KG, RED)
        spec.body(name).pos = [0, 0, 0]
    return spec.compile()


def test_a_morphed_model_is_the_native_one() -> None:
    """Every field of the model, and the constants that the engine derives."""
    kinds = np.random.default_rng(0).integers(0, 3, (8, 3))
    batch = Batch(model([0, 0, 0]), 8, 1, persistent=True)
    ShapeVariants(batch, NAMES, SHAPES, MASS_KG).apply(np.arange(8), kinds)
    for _ in range(2):
        for i in range(8):
            native = model(kinds[i].tolist())
            for field in (name for name in MODEL_FIELDS if "." not in name):
                values = batch.expanded(field)
                ours = np.asarray(getattr(batch.model, field)) if values is None else values[i]
                np.testing.assert_array_equal(ours, np.asarray(getattr(native, field))[: len(ours)], err_msg=field)
        batch.set_const()


def test_morphed_objects_fall_roll_and_collide_as_native_ones() -> None:
    rng, n = np.random.default_rng(1), 6
    place = rng.uniform(-0.03, 0.03, (n, 3, 7))
    place[:, :, :3] += [0.5, 0, 0.1]
    place[..., 3:] = rng.normal(size=(n, 3, 4))
    place[..., 3:] /= np.linalg.norm(place[..., 3:], axis=-1, keepdims=True)
    place[:, :, 2] += [0.0, 0.08, 0.16]  # they fall onto each other
    kinds = rng.integers(0, 3, (n, 3))

    def run(batch: Batch, rows: np.ndarray) -> np.ndarray:
        at = batch.model.joint("a").qposadr[0]
        batch.bind("qpos")[:, at:] = place[rows].reshape(len(rows), -1)
        batch.bind("qvel")[:, batch.model.joint("a").dofadr[0]] = 0.5
        batch.step(nstep=120)
        return batch.bind("qpos")[:, at:].copy()

    morphed = Batch(model([0, 0, 0]), n, 1, persistent=True)
    ShapeVariants(morphed, NAMES, SHAPES, MASS_KG).apply(np.arange(n), kinds)
    found = run(morphed, np.arange(n))
    for i in range(n):
        native = Batch(model(kinds[i].tolist()), 1, 1, persistent=True)
        np.testing.assert_array_equal(run(native, np.array([i]))[0], found[i])


def test_inertia_follows_a_randomised_mass() -> None:
    terms = {"mass": {"field": "body_mass", "names": ["target"], "range": [2.0, 2.0]}}
    plain, heavy = pool("tabletop", 12), pool("tabletop", 12, sim={"randomization": terms})
    body, dof = plain.model.body("target").id, plain.model.joint("target").dofadr[0]
    for field, factor in {"body_mass": 2.0, "body_inertia": 2.0, "body_invweight0": 0.5}.items():
        nominal = plain.batch.expanded(field)
        nominal = np.tile(plain.model.body_mass, (12, 1)) if nominal is None else nominal
        np.testing.assert_allclose(heavy.batch.expanded(field)[:, body], factor * nominal[:, body], rtol=1e-9)
    ours, theirs = (env.batch.expanded("dof_invweight0")[:, dof : dof + 6] for env in (heavy, plain))
    np.testing.assert_allclose(ours, 0.5 * theirs, rtol=1e-9)


def test_what_nobody_touches_stays_where_it_is() -> None:
    """Balls too, for a whole episode."""
    env = pool("tabletop", 48)
    places = torch.stack([env.view.body_qpos(name)[:, :3] for name in SLOTS], 1).clone()
    env.step(torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(48, 79, 1))
    moved = (torch.stack([env.view.body_qpos(name)[:, :3] for name in SLOTS], 1) - places).norm(dim=-1)
    assert moved[env.task.shape_NB == 2].max() < 0.001
    assert moved.max() < 0.003


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_starts", [0.0, 1.0])
def test_the_expert_solves_it_for_every_shape(held_starts: float) -> None:
    """From the table, and with the target already in the hand."""
    env = pool("tabletop", 72, seed=1000, config={"held_starts": held_starts}, stages=True)
    shape = env.task.shape_NB[:, 0].clone()
    if held_starts:
        env.step(torch.tensor([0.0, 0.0, 0.0, -1.0]).repeat(72, 1))
        assert env.view.grasped("target").double().mean() > 0.95
    while not len((step := env.step(env.task.expert())).final_ids):
        pass
    for kind in range(3):
        solved = step.episodes.success_at_end_M[shape == kind].double().mean()
        assert solved > (0.75 if held_starts else 0.85), kind  # it hurries off with what it did not grasp itself


def test_objects_can_hardly_be_dragged_over_the_wall() -> None:
    """Closed fingers press the target against the wall and rise; pick_place has the same test."""
    n = 48
    env = pool("tabletop", n, 120, seed=500)
    target, tray = env.task.object, env.task.tray
    for side, name in ((1, "distractor_1"), (-1, "distractor_2")):
        env.view.body_qpos(name)[:, :2] = torch.tensor([0.3, 0.05 * side])
    height = torch.tensor([[0.014], [0.02], [0.03]], dtype=torch.float64).repeat(n // 3, 1)
    heading = torch.nn.functional.normalize((tray - target)[:, :2])
    behind = torch.cat([target[:, :2] - 0.08 * heading, height], -1)

    def go(goal: Tensor, steps: int) -> None:
        for _ in range(steps):
            move = ((goal - env.view.tcp_pos) * 2 / env.arm.config.delta_m).clamp(-1, 1)
            env.step(torch.cat([move, torch.full((n, 1), -1.0, dtype=torch.float64)], 1))

    go(behind + torch.tensor([0, 0, 0.12]), 14)
    go(behind, 12)
    inside, nearest = torch.zeros(n, dtype=torch.bool), torch.full((n,), torch.inf, dtype=torch.float64)
    for t in range(80):
        line = torch.nn.functional.normalize((tray - target)[:, :2])
        offset = (env.view.tcp_pos - target)[:, :2]
        across = offset - (offset * line).sum(-1, keepdim=True) * line
        push = env.view.tcp_pos[:, :2] + 0.02 * line - 0.5 * across
        go(torch.cat([push, height + 0.08 * (t > 35)], -1), 1)
        nearest = torch.minimum(nearest, (target - tray)[:, :2].abs().amax(-1))
        inside |= env.task.success()
    assert (nearest < env.task.config.tray_half_m + 0.05).double().mean() > 0.5, "most of them at the wall"
    assert inside.double().mean() <= 0.1
