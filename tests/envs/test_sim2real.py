"""Imperfect hardware: what each quantity of the randomisation does, by how much, and that it follows from the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from embodied.core.arm import Chain
from embodied.core.config import read_preset
from embodied.core.errors import UserError
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.randomization.object_shapes import SIZE_FIELDS
from embodied.envs.mujoco.scene import Shape, add_object
from embodied.session.config import CONFIG_DIR
from tests.envs.helpers import actions, assert_continues, pool, restart

SIM2REAL = read_preset(CONFIG_DIR, "sim2real")


CHANGING_MASS = {"randomization": {
    "size": {"field": "object_size", "range": [0.9, 1.1]},
    "mass": {"field": "body_mass", "names": ["objects"], "range": [0.5, 2.0], "mode": "interval", "interval_s": 0.1},
}}  # fmt: skip
JOINT_ACTIONS = {"control": {"mode": "joint_delta"}}


def with_terms(
    task: str, num_envs: int, steps: int | None = None, config: dict[str, Any] | None = None, **terms: Any
) -> MujocoPool:
    """A pool with terms whose value is always the same, given as field=value or field=(low, high)."""
    made = {}
    for field, value in terms.items():
        interval = {"mode": "interval", "interval_s": 0.2} if field.endswith("_push") else {}
        bounds = list(value) if isinstance(value, tuple) else [value, value]
        made[field] = {"field": field, "range": bounds, "each": field.endswith("offset"), **interval}
    return pool(task, num_envs, steps, config=config or {}, sim={"randomization": made})


def part(env: MujocoPool, obs: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """Entries of a term in ``state``, unscaled, [N, size]."""
    first = 0
    for term in env.spec.state:
        if term.name == name:
            return (obs["state"][:, first : first + term.size] / term.scale).double().numpy()
        first += term.size
    raise AssertionError(name)


# -- measurements ------------------------------------------------------------------------------------------------------
def test_noise_has_the_stated_size_and_leaves_the_truth_alone() -> None:
    env = with_terms("pick_place", 400, joint_noise=0.01, velocity_noise=0.1, object_noise=0.02)
    obs = env.observe()
    errors = {
        "joint_pos": (part(env, obs, "joint_pos") - env.arm.joint_pos.numpy(), 0.01),
        "joint_vel": (part(env, obs, "joint_vel") - env.arm.joint_vel.numpy(), 0.1),
        "cube_pos": (part(env, obs, "cube_pos") - env.view.body_qpos("cube")[:, :3].numpy(), 0.02),
        "tray": (part(env, obs, "tray") - env.task.tray[:, :2].numpy(), 0.02),
    }
    for name, (error, size) in errors.items():
        assert abs(error.std() - size) < 0.08 * size, name
        assert abs(error.mean()) < 4 * size / np.sqrt(error.size), name
    np.testing.assert_allclose(part(env, obs, "cube_rotation"), env.view.sensor("cube_x_axis", 2), atol=1e-6)
    torch.testing.assert_close(obs["privileged"], pool("pick_place", 400).observe()["privileged"], rtol=0, atol=0)


def test_noise_is_new_in_every_control_step() -> None:
    env = with_terms("reach", 1, joint_noise=0.01)
    errors = []
    for _ in range(6):
        step = env.step(torch.zeros(1, 1, 4))
        errors.append(tuple((part(env, step.obs, "joint_pos") - env.arm.joint_pos.numpy())[0].round(6)))
    assert len(set(errors)) == 6


def test_derived_terms_follow_from_the_measured_ones() -> None:
    errors = {"joint_noise": 0.01, "encoder_offset": (-0.02, 0.02), "object_noise": 0.02, "joint_delay": 0.03}
    env = with_terms("pick_place", 3, **errors)
    env.step(actions([0, 1, 2], 3, 4))
    obs = env.observe()
    chain = Chain(env.spec.arm)
    for n, (qpos, qvel) in enumerate(zip(part(env, obs, "joint_pos"), part(env, obs, "joint_vel"), strict=True)):
        tool, _, jacobian = chain.tool(qpos)
        np.testing.assert_allclose(part(env, obs, "tcp_pos")[n], tool, atol=1e-6)
        np.testing.assert_allclose(part(env, obs, "tcp_vel")[n], jacobian[:3] @ qvel, atol=1e-6)
    cube, tray = part(env, obs, "cube_pos"), part(env, obs, "tray")
    np.testing.assert_allclose(part(env, obs, "cube_from_tcp"), cube - part(env, obs, "tcp_pos"), atol=1e-6)
    np.testing.assert_allclose(part(env, obs, "tray_from_cube")[:, :2], tray - cube[:, :2], atol=1e-6)
    np.testing.assert_allclose(part(env, obs, "tray_from_cube")[:, 2], -cube[:, 2], atol=1e-6)


def test_what_follows_from_the_tool_or_a_handle_is_computed_from_their_measurements() -> None:
    errors = {"joint_noise": 0.01, "encoder_offset": (-0.02, 0.02), "object_offset": (-0.03, 0.03)}
    env = with_terms("detour", 3, **errors)
    env.step(actions([0, 1, 2], 3, 4))
    obs, offset = env.observe(), env.non_model.values["object_offset"].numpy()
    post = part(env, obs, "post_from_tcp") + part(env, obs, "tcp_pos")[:, :2]
    np.testing.assert_allclose(post, env.task.post[:, :2].numpy() + offset[:, :2], atol=1e-6)

    env = with_terms("lift_bar", 3, object_noise=0.01, **errors)
    for _ in range(2):
        obs = env.observe()
        heights = [part(env, obs, f"{side}_handle_pos")[:, 2] for side in ("left", "right")]
        left, right = part(env, obs, "handles_below_goal").T + heights
        np.testing.assert_allclose(left, right, atol=1e-6)  # both are the measured height of the goal
        error = left - env.task.goal[:, 2].numpy() - env.non_model.values["object_offset"][:, 2].numpy()
        assert (1e-4 < np.abs(error)).all()
        assert (np.abs(error) < 0.05).all()
        env.step(actions([0, 1, 2], 1, 8))


def test_offsets_stay_for_an_episode_and_change_with_it() -> None:
    env = with_terms("lift", 50, 6, encoder_offset=(-0.01, 0.01), object_offset=(-0.03, 0.03))

    def errors() -> tuple[np.ndarray, np.ndarray]:
        obs = env.observe()
        joints = part(env, obs, "joint_pos") - env.arm.joint_pos.numpy()
        return joints, part(env, obs, "cube_pos") - env.view.body_qpos("cube")[:, :3].numpy()

    before = errors()
    env.step(torch.zeros(50, 4))
    for old, new, limit in zip(before, errors(), (0.01, 0.03), strict=True):
        np.testing.assert_allclose(old, new, atol=1e-6)
        assert 0.9 * limit < abs(old).max() < 1.001 * limit
        assert np.abs(np.corrcoef(old.T) - np.eye(old.shape[1])).max() < 0.6  # one number for each joint or axis
    restart(env)
    assert not np.allclose(before[0], errors()[0])


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.08])
def test_delayed_measurements_are_those_of_the_past(delay_s: float) -> None:
    env = with_terms("lift", 3, joint_delay=delay_s, object_delay=delay_s)
    plan, joints, cubes = actions([0, 1, 2], 6, 4), [], []
    for t in range(6):
        env.view.body_qpos("cube")[:, 0] += 0.01 * t
        step = env.step(plan[:, t])
        joints.append(env.arm.joint_pos.numpy().copy())
        cubes.append(env.view.body_qpos("cube")[:, :3].numpy().copy())
    age = delay_s / 0.05
    k, share = int(age), age - int(age)
    for name, past in (("joint_pos", joints), ("cube_pos", cubes)):
        expected = (1 - share) * past[-1 - k] + share * past[-2 - k]
        np.testing.assert_allclose(part(env, step.obs, name), expected, atol=1e-6)


def test_actions_start_from_the_measured_pose() -> None:
    """As on a robot: the encoder's error cancels in joint targets, its noise does not."""
    found = {}
    for name, term in {"exact": {}, "offset": {"encoder_offset": 0.003}, "noise": {"joint_noise": 0.01}}.items():
        env = with_terms("reach", 4, config=JOINT_ACTIONS, **term)
        env.arm.apply(np.full((4, 8), 0.1), None, env.non_model.measured())
        found[name] = env.arm.ctrl[:, :7].copy()
        measured = part(env, env.observe(), "joint_pos")
    np.testing.assert_allclose(found["offset"], found["exact"], atol=1e-12)
    np.testing.assert_allclose(found["noise"], measured + 0.015, atol=1e-6)
    assert abs(found["noise"] - found["exact"]).max() > 0.01


# -- actuators ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_a_delayed_command_takes_effect_that_many_physics_steps_later(steps: int) -> None:
    env = with_terms("reach", 2, action_delay=0.01 * steps)
    batch = env.batch
    for _ in range(37):  # so that rounding of the time has grown
        batch.step(None, nstep=1, stage=int(mujoco.mjtStage.mjSTAGE_VEL))
    before = batch.bind("qvel")[:, 0].copy()
    env.arm.ctrl[:, 0] += 0.05
    moved = []
    for _ in range(10):
        batch.step(None, nstep=1, stage=int(mujoco.mjtStage.mjSTAGE_VEL))
        moved.append(bool((abs(batch.bind("qvel")[:, 0] - before) > 0.05).all()))
    assert moved == [t >= steps for t in range(10)]


def test_backlash_swallows_small_movements() -> None:
    loose = with_terms("reach", 2, config=JOINT_ACTIONS, backlash=0.1)
    start = loose.arm.ctrl.copy()
    loose.step(torch.full((2, 8), 0.2))  # 0.03 rad, less than half of the play
    np.testing.assert_array_equal(loose.arm.ctrl[:, :7], start[:, :7])
    qpos = loose.arm.joint_pos.numpy().copy()
    loose.step(torch.full((2, 8), 0.8))
    np.testing.assert_allclose(loose.arm.ctrl[:, :7], qpos + 0.12 - 0.05)


def test_joint_friction_is_that_of_the_solver() -> None:
    """A joint that is pushed below its friction stays; beyond it moves as with ``dof_frictionloss``."""
    solver = {"field": "dof_frictionloss", "names": ["arm"], "range": [2.0, 2.0], "operation": "add"}
    yielding, hard = with_terms("reach", 1, joint_friction=2.0), pool("reach", 1, sim={"randomization": {"x": solver}})
    moved = []
    for env in (yielding, hard, pool("reach", 1)):
        env.batch.expand("actuator_gainprm")[:] = 0.0
        env.batch.expand("actuator_biasprm")[:] = 0.0
        force = env.batch.bind("qfrc_applied")
        start = env.arm.joint_pos.numpy().copy()
        for torque in (1.5, 3.0):
            force[:, 0] = torque
            env.batch.step(None, nstep=30, stage=int(mujoco.mjtStage.mjSTAGE_VEL))
            moved.append(float(env.arm.joint_pos[0, 0] - start[0, 0]))
    assert 0 < moved[0] < 0.002
    assert 0 < moved[2] < 0.003
    assert moved[4] > 0.03
    assert moved[1] - moved[0] == pytest.approx(moved[3] - moved[2], rel=0.15)
    assert moved[5] > 1.5 * moved[1]


# -- objects and pushes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["box", "cylinder"])
def test_a_resized_object_is_one_of_that_size(kind: str) -> None:
    size = (0.022, 0.022, 0.022) if kind == "box" else (0.02, 0.045)
    words = {"shapes": {"thing": {"kind": kind, "size_m": list(size)}, "other": {"kind": "sphere", "size_m": [0.029]}}}
    env = pool("tabletop", 2, config={"words": {**default_words(), **words}}, sim={"randomization": {
        "size": {"field": "object_size", "range": [1.1, 1.1]}}})  # fmt: skip
    spec = mujoco.MjSpec()
    add_object(spec, "object", Shape(kind, tuple(1.1 * x for x in size)), 0.064, (1, 1, 1, 1))
    alone = spec.compile()
    body, geom = env.model.body("target").id, env.model.geom("target").id
    for field in ("geom_size", "geom_rbound", "geom_aabb"):
        np.testing.assert_allclose(env.batch.expand(field)[:, geom], np.stack([getattr(alone, field)[0]] * 2))
    for field in ("body_inertia", "body_mass", "body_invweight0"):
        expected = np.stack([getattr(alone, field)[1]] * 2)
        np.testing.assert_allclose(env.batch.expand(field)[:, body], expected, rtol=1e-6)
    half_height = 1.1 * size[-1]
    np.testing.assert_allclose(env.view.body_qpos("target")[:, 2], half_height)


def default_words() -> dict[str, Any]:
    """Colours, trays and templates of tabletop."""
    return {
        "colors": {"red": [0.85, 0.15, 0.1], "blue": [0.15, 0.3, 0.85]},
        "trays": {"left": [0.525, 0.285], "right": [0.525, -0.285]},
        "templates": ["put the {color} {shape} into the {tray} tray"],
        "held_out": [],
    }


def test_meshes_and_bodies_that_carry_others_keep_size_and_inertia(tmp_path: Path) -> None:
    corners = "0 0 0  .1 0 0  0 .1 0  0 0 .1"
    (tmp_path / "things.xml").write_text(f"""<mujoco>
        <asset><mesh name="tetra" vertex="{corners}"/></asset>
        <worldbody>
            <body name="mug" pos="0.4 0.5 0.2"><freejoint/><geom type="mesh" mesh="tetra" mass="0.1"/></body>
            <body name="box" pos="0.6 0.5 0.2"><freejoint/><geom name="box" type="box" size=".05 .05 .05"/>
                <body name="lid" pos="0 0 0.06"><joint/><geom type="box" size=".05 .05 .01"/></body>
            </body>
            <body name="ball" pos="0.5 0.7 0.2"><freejoint/><geom name="ball" size="0.05" mass="0.1"/></body>
        </worldbody>
    </mujoco>""")
    size = {"size": {"field": "object_size", "range": [1.3, 1.3]}}
    env = pool("lift", 2, config={"scene": str(tmp_path / "things.xml")}, sim={"randomization": size})
    for field in ("body_inertia", "body_mass", "body_invweight0"):
        values, nominal = env.batch.expand(field), getattr(env.model, field)
        for name in ("scene/mug", "scene/box", "scene/lid"):
            body = env.model.body(name).id
            np.testing.assert_allclose(values[:, body], np.stack([nominal[body]] * 2), rtol=1e-12)
    for name, factor in (("scene/box", 1.0), ("scene/ball", 1.3), ("cube", 1.3)):
        geom = env.model.geom(name).id
        np.testing.assert_allclose(env.batch.expand("geom_size")[:, geom], factor * env.model.geom_size[[geom] * 2])
    assert set(env.view.sizes) == {"scene/ball", "cube"}


def test_sizes_and_masses_vary_together() -> None:
    terms = {"size": {"field": "object_size", "range": [0.9, 1.1], "each": True},
             "mass": {"field": "body_mass", "names": ["objects"], "range": [0.5, 2.0], "each": True}}  # fmt: skip
    env = pool("stack", 40, 5, sim={"randomization": terms})
    for _ in range(2):
        mass = env.batch.expand("body_mass")
        for name in ("cube", "base"):
            body, factor = env.model.body(name).id, env.view.sizes[name].numpy()
            ratio = mass[:, body] / env.model.body_mass[body]
            assert 0.5 <= ratio.min() < 0.7
            assert 1.8 < ratio.max() <= 2.0
            assert factor.std() > 0.03
            expected = env.model.body_inertia[body] * (ratio * factor**2)[:, None]
            np.testing.assert_allclose(env.batch.expand("body_inertia")[:, body], expected)
        restart(env)
    assert abs(np.corrcoef(env.view.sizes["cube"], env.view.sizes["base"])[0, 1]) < 0.6


def test_pushes_come_once_in_every_interval_at_their_size() -> None:
    env = with_terms("lift", 40, object_push=0.5, arm_push=0.3)
    assert env.randomizer.intervals
    speeds = env.batch.bind("qvel")
    dof = env.model.joint("cube").dofadr[0]
    rng = EpisodeRng(env.plans.seed_n, env.plans.number_n)
    counts, kicks, angles = np.zeros(40), [], []
    for t in range(12):
        before = speeds.copy()
        env.randomizer.step(rng, np.full(40, t), None)
        kick = speeds - before
        hit = np.flatnonzero(np.abs(kick[:, dof]) > 0)
        counts[hit] += 1
        kicks += list(np.hypot(kick[hit, dof], kick[hit, dof + 1]))
        angles += list(np.arctan2(kick[hit, dof], kick[hit, dof + 1]))
        arm = kick[:, :7][np.abs(kick[:, 0]) > 0]
        np.testing.assert_allclose(np.abs(arm), 0.3)
        if (t + 1) % 4 == 0:
            assert (counts == (t + 1) // 4).all()
    np.testing.assert_allclose(kicks, 0.5)
    assert np.std(angles) > 1.5  # all directions


def test_a_field_of_the_model_can_change_within_an_episode() -> None:
    term = {"field": "geom_friction", "names": ["fingers"], "column": 0, "range": [0.5, 1.5], "mode": "interval",
            "interval_s": 0.2}  # fmt: skip
    env = pool("lift", 5, sim={"randomization": {"grip": term}})
    geom = env.model.geom("left_pad").id
    seen = [env.batch.expand("geom_friction")[:, geom, 0].copy()]
    for _ in range(8):
        env.step(torch.zeros(5, 4))
        seen.append(env.batch.expand("geom_friction")[:, geom, 0].copy())
    changes = (np.diff(np.array(seen), axis=0) != 0).sum(0)
    assert changes.tolist() == [2] * 5


@pytest.mark.parametrize("task", ["stack", "tabletop"])
def test_a_mass_that_changes_within_an_episode_keeps_the_object_s_size_and_shape(task: str) -> None:
    env = pool(task, 6, sim=CHANGING_MASS)
    bodies = [env.model.body(name).id for name in env.task.objects]
    mass, inertia = (env.batch.expand(name)[:, bodies] for name in ("body_mass", "body_inertia"))
    first, per_mass = mass.copy(), inertia / mass[..., None]
    assert np.ptp(env.view.sizes[env.task.objects[0]].numpy()) > 0.01
    for _ in range(6):
        env.step(torch.zeros(6, 4))
        mass, inertia = (env.batch.expand(name)[:, bodies] for name in ("body_mass", "body_inertia"))
        np.testing.assert_allclose(inertia / mass[..., None], per_mass, rtol=1e-12)
    assert (mass != first).all()


# -- plans and resume --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("task", "sim"),
    [("pick_place", SIM2REAL), ("tabletop", SIM2REAL), ("tabletop", CHANGING_MASS), ("stack", CHANGING_MASS)],
)
def test_continues_exactly_from_its_state(task: str, sim: dict[str, Any]) -> None:
    assert_continues(task, sim, stagger=True, stages=True)


def test_an_episode_is_a_function_of_its_plan() -> None:
    """Number of envs, chunks and other envs' episodes make no difference; rows are measured alone or together."""
    plan = actions(list(range(9)), 27, 4)
    few, many = pool("pick_place", 3, 9, sim=SIM2REAL, seed=3), pool("pick_place", 9, 9, sim=SIM2REAL, num_threads=2)
    for t in range(0, 27, 3):
        one = few.step(plan[3:6, t : t + 3])
        steps = [many.step(plan[:, t + i]) for i in range(3)]
        torch.testing.assert_close(one.obs["state"], steps[-1].obs["state"][3:6], rtol=0, atol=0)
    rows = np.array([1, 4])
    torch.testing.assert_close(many.observe(rows)["state"], many.observe()["state"][rows], rtol=0, atol=0)
    many.non_model.sensing._measured = None
    torch.testing.assert_close(many.observe(rows)["state"], many.observe()["state"][rows], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"field": "backlsh", "range": [0, 1]}, "Did you mean 'backlash'"),
        ({"field": "backlash", "range": [-0.1, 1]}, r"allowed for backlash: uniform or log_uniform, at least 0"),
        ({"field": "joint_noise", "range": [0, 1], "distribution": "gaussian"}, "allowed for joint_noise: uniform"),
        ({"field": "backlash", "range": [0, 1], "names": ["arm"]}, "names: backlash has no names"),
        ({"field": "object_push", "range": [0, 1]}, "mode: got reset, object_push happens with mode=interval"),
        ({"field": "object_size", "range": [0.9, 1], "mode": "interval", "interval_s": 1}, "allowed for object_size"),
        ({"field": "body_mass", "range": [0, 1], "names": ["objects"], "mode": "interval"}, "interval_s: got null"),
        ({"field": "backlash", "range": [0, 1], "interval_s": 1.0}, "interval_s: got 1 with mode=reset"),
    ],
)
def test_bad_terms_are_refused(term: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pool("lift", 1, sim={"randomization": {"x": term}})


def test_two_terms_for_the_size_of_an_object_are_refused() -> None:
    terms = {"a": {"field": "object_size", "range": [0.9, 1.1]}, "b": {"field": "geom_size", "names": ["cube"],
             "range": [0.9, 1.1]}}  # fmt: skip
    assert "geom_size" in SIZE_FIELDS
    with pytest.raises(UserError, match="geom_size: allowed without the field object_size"):
        pool("lift", 1, sim={"randomization": terms})


def test_the_documentation_has_every_term(root: Path) -> None:
    text = (root / "docs" / "environments.md").read_text()
    for name in SIM2REAL["randomization"]:
        assert f"`{name}`" in text, name
