"""The family gym at the boundary to other people's environments: what they return is checked where it enters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from embodied.core.episodes import PlanList
from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec, EnvSpec
from embodied.envs import FAMILIES
from embodied.envs.adapters.gym.family import GymConfig, GymEnv, GymSimConfig
from embodied.envs.adapters.gym.results import WrongResult, advice, flat_mask
from tests.envs.test_gym import plans_of

MODULE = "tests.envs.toy_foreign"
FAMILY = FAMILIES["gym"].build()
OBSERVATION = CameraSpec("observation", 24, 32)


def id_of(name: str) -> str:
    return f"{MODULE}:{name}-v0"


def make(
    name: str, processes: int = 0, cameras: tuple[CameraSpec, ...] = (), limit: int | None = None, **kwargs: Any
) -> GymEnv:
    task, sim = GymConfig(kwargs=kwargs, max_episode_steps=limit), GymSimConfig(processes=processes)
    env = FAMILY.make(id_of(name), task, num_envs=2, num_threads=1, sim=sim, cameras=cameras)
    assert isinstance(env, GymEnv)
    return env


def spec(name: str, **kwargs: Any) -> EnvSpec:
    return FAMILY.spec(id_of(name), GymConfig(kwargs=kwargs))


def steps(env: GymEnv, num: int = 9) -> Any:
    """Play ``num`` control steps; return the observations at the beginning and the result of the last step."""
    obs = env.reset(PlanList(plans_of(env), env.num_envs))
    size = env.spec.action_dim
    action = torch.zeros(env.num_envs, 1, size)
    for _ in range(num):
        step = env.step(action)
    return obs, step


NAMED = {
    "one": r"float32 \[1\], needed real numbers of shape \[3\]",
    "column": r"float32 \[3, 1\]",
    "row": r"float32 \[1, 3\]",
    "complex": r"complex64 \[3\], needed real numbers",
    "text": r"str32 \[3\]",
    "objects": "ndarray",
    "none": "None",
    "ragged": "list",
}


@pytest.mark.parametrize("name", ["Foreign", "ForeignDict"])
@pytest.mark.parametrize("returned", NAMED)
def test_an_observation_of_another_shape_or_type_is_named(name: str, returned: str) -> None:
    part = "observation 'arm'" if name == "ForeignDict" else "observation"
    with pytest.raises(UserError, match=rf"cannot be served: .* returned {part}.* as {NAMED[returned]}"):
        spec(name, observation=returned)
    message = rf"returned {part}.* as {NAMED[returned]}.*control step"
    with closing(make(name, observation=returned, since=7)) as env, pytest.raises(UserError, match=message):
        steps(env)


WRONG_TOGETHER = {
    ("observation", "one"): r"observation 'observation' as float64 \[2, 1\], needed real numbers of shape \[2, 2\]",
    ("observation", "complex"): r"observation 'observation' as complex64 \[2, 2\]",
    ("observation", "text"): r"observation 'observation' as str",
    ("reward", "column"): r"rewards as float64 \[2, 1\], needed real numbers of shape \[2\]",
    ("reward", "none"): "rewards as None",
    ("terminated", "one"): r"terminated as bool \[1\]",
    ("truncated", "third"): "truncated with other values than True and False",
    ("info", "none"): "info as None, needed a dictionary",
}


@pytest.mark.parametrize(("part", "value"), WRONG_TOGETHER)
def test_wrong_results_of_a_vector_environment_are_named(part: str, value: str) -> None:
    message = f"its vector environment returned {WRONG_TOGETHER[part, value]}"
    with closing(make("ForeignVector", **{part: value})) as env, pytest.raises(UserError, match=message):
        steps(env)


@pytest.mark.parametrize("processes", [0, 1])
def test_the_class_that_returned_it_is_named(processes: int) -> None:
    message = rf"env 0 of {MODULE}.Foreign returned .* \(control step 7 of the episode"
    env = make("Foreign", processes, observation="one", since=7)
    with closing(env), pytest.raises(UserError, match=message):
        steps(env)


@pytest.mark.parametrize("returned", ["list", "float64", "int"])
def test_numbers_of_other_types_are_converted(returned: str) -> None:
    for name in ("Foreign", "ForeignDict"):
        with closing(make(name, observation=returned)) as env:
            expected = [1.0, 2.0, 3.0] if returned == "list" else [1.0] * 3
            assert steps(env, 2)[1].obs["state"].tolist() == [expected] * 2


def test_environments_may_return_the_same_array() -> None:
    with closing(make("Shared")) as env:
        for _ in range(3):
            state = steps(env, 1)[1].obs["state"]
            assert state[0, 0] != state[1, 0]  # each began somewhere else


WRONG = {
    ("reward", "array"): r"reward as float64 \[1\], needed a number: return float\(reward.item\(\)\)",
    ("reward", "text"): "reward as '1.5', needed a number",
    ("reward", "complex"): r"reward as complex128 \[\], needed a number",
    ("reward", "none"): "reward as None, needed a number",
    (
        "terminated",
        "array of no",
    ): r"terminated as bool \[1\], needed True or False: return bool\(terminated.item\(\)\)",
    ("truncated", "no"): "truncated as 'False', needed True or False",
    ("terminated", "third"): r"terminated as float64 \[\], needed True or False",
    ("terminated", "none"): "terminated as None, needed True or False",
    ("info", "none"): "info as None, needed a dictionary: return {}",
}


@pytest.mark.parametrize(("part", "value"), WRONG)
def test_other_results_of_another_type_are_named(part: str, value: str) -> None:
    for since in (0, 7):
        with (
            pytest.raises(UserError, match=f"returned {WRONG[part, value]}"),
            closing(make("Foreign", **{part: value, "since": since})) as env,
        ):
            steps(env)


@pytest.mark.parametrize("value", ["success as text", "success as array"])
def test_a_success_of_another_type_is_named(value: str) -> None:
    with (
        pytest.raises(UserError, match=r"returned info\['is_success'\] as "),
        closing(make("Foreign", info=value)) as env,
    ):
        steps(env)


def test_numbers_of_numpy_are_numbers() -> None:
    for value in ("np.float32", "np.array", "int"):
        with closing(make("Foreign", reward=value)) as env:
            assert steps(env, 1)[1].reward_N.tolist() == [2.0, 2.0]
    for value in ("np.bool", "one"):
        with closing(make("Foreign", terminated=value)) as env:
            assert steps(env, 1)[1].terminated_N.all()


@pytest.mark.parametrize(
    "kwargs",
    [{"one": 3}, {"one": -1}, {"one": 1.0}, {"two": (0, 2)}, {"two": (-1, 0)}, {"two": (0,)}, {"two": (0.5, 0)}],
)
def test_observed_choices_that_do_not_exist_are_named(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"returned observation '{next(iter(kwargs))}'"):
        spec("Choices", **kwargs)


SCALED = {  # type, limits, value: level of the camera
    ("float32", 0, 1, 0.5): 128,
    ("float64", 0, 1, 1.0): 255,
    ("float32", 0, 255, 7.4): 7,
    ("int64", 0, 255, 9): 9,
    ("uint8", 0, 1, 1): 255,
    ("uint8", 0, 255, 1): 1,
}


@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("shape", [(24, 32, 3), (32, 32)])
def test_images_of_numbers_are_cameras(case: tuple[str, int, int, float], shape: tuple[int, ...]) -> None:
    dtype, low, high, value = case
    image = {"shape": shape, "dtype": dtype, "low": low, "high": high, "value": value}
    with closing(make("Images", cameras=(OBSERVATION,), **image)) as env:
        assert env.spec.state_dim == 1
        assert (steps(env, 1)[0]["images.observation"] == SCALED[case]).all()


def test_floats_in_the_shape_of_a_picture_need_the_limits_of_one() -> None:
    with pytest.raises(
        UserError, match=r"'observation' is float32 \[24, 32, 3\], an image by its shape, but its limits"
    ):
        spec("Images", dtype="float32", low=-1, high=1, value=0)
    assert spec("Images", dtype="float32", shape=(24, 32), low=-1, high=1, value=0).state_dim == 24 * 32  # a map


@pytest.mark.parametrize(
    ("image", "value"),
    [
        ({"shape": (60, 20), "dtype": "float32", "low": 0, "high": 1}, 0.1234),  # shares of 20 things, 60 times
        ({"shape": (20, 20), "dtype": "uint8", "low": 0, "high": 3}, 3),  # codes of cells
        ({"shape": (20, 20, 2), "dtype": "uint8", "low": 0, "high": 9}, 9),
    ],
)
def test_numbers_and_codes_that_are_no_picture_are_the_state(image: dict[str, Any], value: float) -> None:
    with closing(make("Images", value=value, **image)) as env:
        assert not env.spec.images
        assert env.spec.state_dim == np.prod(image["shape"])
        assert (steps(env, 1)[0]["state"] == np.float32(value)).all()


def test_an_image_beyond_its_limits_is_named() -> None:
    with pytest.raises(
        UserError, match="returned observation 'observation' with values from 200 to 200, allowed: 0 to 1"
    ):
        make("Images", cameras=(OBSERVATION,), dtype="float32", high=1, value=200)
    with pytest.raises(UserError, match=r"returned observation 'observation' as float32 .* needed integers"):
        make("Images", cameras=(OBSERVATION,), value=0.5, returned="float32")


def test_booleans_in_an_image_are_black_and_white() -> None:
    with closing(make("Images", cameras=(OBSERVATION,), value=1, returned="bool")) as env:
        assert (steps(env, 1)[0]["images.observation"] == 255).all()


@pytest.mark.parametrize("shape", [(4, 24, 32), (4, 24, 32, 3), (4, 24, 32, 1)])
def test_a_stack_of_frames_is_a_camera_for_each_frame(shape: tuple[int, ...]) -> None:
    """As in the family envpool: the newest, which is the last, has no number."""
    cameras = [CameraSpec(name, 24, 32) for name in ("observation", "observation_1", "observation_3")]
    with closing(make("Images", cameras=tuple(cameras), shape=shape)) as env:
        obs, _ = steps(env, 1)
        for camera, level in zip(cameras, (3, 2, 0), strict=True):
            assert obs[f"images.{camera.name}"].shape == (2, 24, 32, 3)
            assert (obs[f"images.{camera.name}"] == level).all()
    with pytest.raises(UserError, match=r"observation, observation_1, observation_2, observation_3"):
        make("Images", cameras=(CameraSpec("front", 24, 32),), shape=shape)


def test_channels_may_come_first() -> None:
    with closing(make("Images", cameras=(OBSERVATION,), shape=(3, 24, 32))) as env:
        assert (steps(env, 1)[0]["images.observation"] == torch.tensor([0, 1, 2])).all()


@pytest.mark.parametrize(("frame", "level"), [("rgba", 200), ("grey", 200), ("bool", 255), ("int64", 200)])
def test_frames_for_people_become_bytes(frame: str, level: int) -> None:
    with closing(make("Shown", cameras=(CameraSpec("render", 40, 60),), frame=frame)) as env:
        assert (steps(env, 1)[0]["images.render"] == level).all()
        frames = env.film(32, 24)()  # type: ignore[attr-defined]
        assert frames.shape == (2, 24, 32, 3)
        assert frames.dtype == np.uint8
        assert (frames == level).all()


UNSHOWN = {
    "float": r"gave float32 \[40, 60, 3\] from render\(\), .*return \(255 \* frame\)",
    "beyond": ".*values from 300 to 300, allowed: 0 to 255",
    "list": r"gave list from render\(\)",
    "none": "gave NoneType",
    "two channels": r"gave uint8 \[40, 60, 2\]",
}


@pytest.mark.parametrize("frame", UNSHOWN)
def test_frames_that_are_no_picture_are_named(frame: str) -> None:
    with closing(make("Shown", frame=frame)) as env:
        steps(env, 1)
        with pytest.raises(UserError, match=rf"env 0 of {MODULE}.Shown {UNSHOWN[frame]}"):
            env.film(32, 24)()  # type: ignore[attr-defined]


def test_a_missing_render_is_named() -> None:
    with closing(make("Unshown")) as env:
        steps(env, 1)
        with pytest.raises(UserError, match=rf"of {MODULE}.Unshown has no render\(\), although its metadata name"):
            env.film(32, 24)()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dt", "expected"), [("float32", 0.25), ("int", 2), ("int64", 2), ("zero", 0.05), ("text", 0.05), ("nan", 0.05)]
)
def test_the_control_rate_is_that_of_dt(dt: str, expected: float) -> None:
    assert spec("Timed", dt=dt).control_dt_s == expected


@pytest.mark.parametrize("limit", [None, 30])
def test_a_wrapper_reads_the_time_limit(limit: int | None) -> None:
    """``TimeAwareObservation`` shows the share of the time limit that has passed."""
    with closing(make("Aware", limit=limit)) as env:
        step = steps(env, 6)[1]
        assert step.obs["state"][0, -1].item() == pytest.approx(6 / (limit or 12))
        assert not step.truncated_N.any()


@pytest.mark.parametrize(("name", "alone"), [("Choosy", False), ("ChoosyAlone", True)])
def test_a_vector_environment_that_refuses_a_mode_is_no_obstacle(name: str, alone: bool) -> None:
    """Single environments are used where there are some, and otherwise one in the mode that it has."""
    with closing(make(name)) as env:
        assert env.spec.state_dim == (2 if alone else 3)
        assert steps(env, 12)[1].truncated_N.all()


@pytest.mark.parametrize("name", ["Database", "Alarm"])
def test_the_cure_of_an_environment_that_is_bound_to_a_thread_is_named(name: str) -> None:
    with closing(make(name)) as env:
        cure = "; sim.processes=1 builds and steps it in the main thread of a process of its own"
        with ThreadPoolExecutor(1) as thread, pytest.raises(UserError, match=cure):
            thread.submit(steps, env).result()
    with closing(make(name, processes=1)) as env, ThreadPoolExecutor(1) as thread:
        thread.submit(steps, env).result()


@pytest.mark.parametrize("how", ["sys", "os"])
@pytest.mark.parametrize("processes", [0, 1])
def test_an_environment_that_leaves_is_named(how: str, processes: int) -> None:
    with (
        closing(make("Leaving", processes, how=how)) as env,
        pytest.raises(UserError, match=r"raised SystemExit in toy_foreign.py|ended with exit code 0"),
    ):
        steps(env)


def test_an_assertion_without_a_message_shows_what_it_asserts() -> None:
    with (
        closing(make("Asserting")) as env,
        pytest.raises(UserError, match=r"raised AssertionError in toy_foreign.py, line \d+: assert self.steps < 8 \("),
    ):
        steps(env)


def test_a_package_that_lacks_a_part_is_not_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_a_part.py").write_text("import numpy.no_such_part\n")
    (tmp_path / "needs_a_package.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"needs 'numpy.no_such_part': the 'numpy' that is installed does not have it"):
        FAMILY.spec("needs_a_part:X-v0", GymConfig())
    with pytest.raises(UserError, match="needs 'no_such_package': pip install no_such_package"):
        FAMILY.spec("needs_a_package:X-v0", GymConfig())


def test_the_variable_that_draws_without_a_display_is_named() -> None:
    error = mujoco.FatalError("an OpenGL platform library has not been loaded into this process")
    assert "MUJOCO_GL=egl" in advice(error)
    assert advice(ValueError("OpenGL")) == ""


@pytest.mark.parametrize("mask", [[0.0, -np.inf], ["yes", "no"], [0.5, 0.5], [None, 1]])
def test_a_mask_of_other_values_than_true_and_false_is_named(mask: list[Any]) -> None:
    assert flat_mask(([1, 0], np.array([True]))).tolist() == [True, False, True]
    with pytest.raises(WrongResult, match="returned action_mask"):
        flat_mask(np.array(mask))
