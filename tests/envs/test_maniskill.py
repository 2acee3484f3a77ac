"""The family maniskill: contract, layout of demonstrations, pixels, options, and what it says where it cannot run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from embodied.core.errors import UserError
from embodied.core.spec import Box, CameraSpec, slices_of
from embodied.data import read, write
from embodied.data.lerobot import check_fits
from embodied.data.maniskill import read_trajectories
from embodied.envs import FAMILIES, make_sampler
from embodied.envs.adapters.config import ManiSkillConfig
from embodied.envs.adapters.maniskill import family as maniskill
from embodied.envs.adapters.maniskill.family import ManiSkillScene
from embodied.envs.adapters.maniskill.sim import INSTALL, VULKAN, Request
from embodied.envs.checks.conformance import check_env

ID = "PickCube-v1"
DEVICE = "import sapien; sapien.render.RenderSystem(sapien.Device('cpu'))"


@pytest.fixture(scope="module")
def family() -> Any:
    """The family, where ManiSkill can run."""
    pytest.importorskip("mani_skill", reason=INSTALL)
    if subprocess.run([sys.executable, "-c", DEVICE], capture_output=True).returncode:
        pytest.skip(VULKAN)
    return FAMILIES["maniskill"].build()


@pytest.fixture(scope="module")
def simulations(family: Any) -> Any:
    """What child processes hold, in this process."""
    from embodied.envs.adapters.maniskill.sim import Simulations

    return Simulations()


def options(**given: Any) -> maniskill.ManiSkillTaskConfig:
    return maniskill.ManiSkillTaskConfig(**given)


@pytest.fixture(scope="module")
def pool(family: Any) -> Iterator[Any]:
    """Two envs in two processes, with images, that end when they succeed."""
    config = options(max_episode_steps=5, terminate_on="success", control_mode="pd_joint_pos")
    cameras = [CameraSpec("base_camera", 24, 32)]
    with closing(family.make(ID, config, num_envs=2, num_threads=2, sim=ManiSkillConfig(), cameras=cameras)) as pool:
        yield pool


@pytest.mark.slow(reason="builds four environments in child processes")
def test_it_keeps_the_contract_of_an_environment(family: Any) -> None:
    config = options(max_episode_steps=4, obs_mode="state")
    check_env(
        lambda num_envs: family.make(ID, config, num_envs=num_envs, num_threads=2, sim=ManiSkillConfig()), num_envs=2
    )


def test_the_scene_that_gpus_step_keeps_the_contract_too(family: Any) -> None:
    """With one env it can be simulated on the CPU."""
    spec = family.spec(ID, options(max_episode_steps=4))
    check_env(lambda num_envs: ManiSkillScene(spec, Request(ID), num_envs, ("success",)), num_envs=1)


@pytest.mark.slow(reason="renders in software")
def test_images_state_and_privileged_observation_are_of_the_same_state(pool: Any) -> None:
    obs = pool.reset(make_sampler(pool, seed=1))
    assert {key: tuple(value.shape) for key, value in obs.items()} == {
        "state": (2, 29), "privileged": (2, 13), "images.base_camera": (2, 24, 32, 3), "instruction": (2,),
    }  # fmt: skip
    assert [term.name for term in pool.spec.privileged] == [
        "extra/obj_pose",
        "extra/obj_to_goal_pos",
        "extra/tcp_to_obj_pos",
    ]
    pose = slices_of(pool.spec.state)["extra/tcp_pose"]
    object_m, tcp_to_object_m = obs["privileged"][:, :3], obs["privileged"][:, -3:]
    torch.testing.assert_close(object_m - obs["state"][:, pose][:, :3], tcp_to_object_m)
    assert (obs["images.base_camera"][0] != obs["images.base_camera"][1]).any()  # cubes are in different places
    frames = pool.film(48, 32)()
    assert frames.shape == (2, 32, 48, 3)
    assert not frames[:, :, :8].any()  # a square image between black borders
    assert frames[:, :, 8:40].any()


@pytest.mark.slow(reason="shares the environments of the test above")
def test_actions_in_units_of_the_robot_are_scaled_from_their_limits(pool: Any) -> None:
    """pd_joint_pos commands joint angles. The action that means the present ones keeps the arm still."""
    obs = pool.reset(make_sampler(pool, seed=2))
    assert isinstance(pool.spec.action, Box)
    assert pool.spec.action_names[0] == "pd_joint_pos_normalized[0]"
    scale, offset = (torch.tensor([getattr(t, what) for t in pool.spec.action.terms]) for what in ("scale", "offset"))
    joints = obs["state"][:, :7]
    keep = torch.zeros(2, 8)
    keep[:, :7] = (joints - offset[:7]) / scale[:7]
    step = pool.step(keep.repeat_interleave(3, 0).view(2, 3, 8))
    torch.testing.assert_close(step.obs["state"][:, :7], joints, atol=0.01, rtol=0)


@pytest.mark.parametrize("mode", ["state_dict", "state"])
def test_converted_demonstrations_fit(mode: Any, family: Any, tmp_path: Path) -> None:
    """What ManiSkill records and ``embodied.convert`` reads has the layout of the family's observations."""
    import mani_skill.envs  # noqa: F401
    from mani_skill.utils.wrappers.record import RecordEpisode

    env = gymnasium.make(ID, obs_mode=mode, control_mode="pd_joint_delta_pos", render_backend="cpu")
    recorder = RecordEpisode(env, str(tmp_path), trajectory_name="demo", save_video=False, info_on_video=False)
    recorder.reset(seed=3)
    for _ in range(4):
        recorder.step(np.zeros((1, 8), np.float32))
    recorder.close()
    episodes, recorded = read_trajectories(tmp_path / "demo.h5")
    spec = family.spec(ID, options(obs_mode=mode))
    assert (recorded.state_names, recorded.texts or spec.texts) == (spec.state_names, (ID,))
    write(tmp_path / "set", episodes, recorded)
    check_fits(read(tmp_path / "set"), spec, tmp_path / "set")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("PickCub-v1"), r"unknown task of the family maniskill 'PickCub-v1'. Did you mean 'PickCube-v1'\?"),
        (Request(ID, control_mode="pd_ee_delta"), r"task.control_mode 'pd_ee_delta'. Did you mean 'pd_ee_delta_pos'\?"),
        (Request(ID, robot_uids="pnda"), r"task.robot_uids 'pnda'. Did you mean 'panda'\?"),
        (Request(ID, robot_uids="panda_stick"), r"does not work with 'panda_stick' .*it is made for panda, fetch, "),
        (Request("PickSingleYCB-v1"), r"needs assets .*mani_skill.utils.download_asset PickSingleYCB-v1$"),
        (Request("AnymalC-Reach-v1"), r"needs assets .*mani_skill.utils.download_asset anymal_c$"),
    ],
)
def test_what_is_not_there_is_named(request_: Request, message: str, simulations: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))  # noqa: SIM115 (a child process has no input)
    with pytest.raises(UserError, match=message):
        simulations.describe(request_)


def test_several_robots_and_failures_are_described(simulations: Any) -> None:
    two = simulations.describe(Request("TwoRobotPickCube-v1"))
    assert len(two.action.terms) == 16
    assert two.action.terms[8].name.endswith("[panda_wristcam-1/0]")
    assert two.robot == "panda_wristcam+panda_wristcam"
    balance = simulations.describe(Request("MS-CartpoleBalance-v1"))
    assert (balance.outcomes, "sparse" in balance.reward_modes) == (("fail",), False)  # ManiSkill raises for it


def test_options_are_refused_with_what_is_allowed(family: Any, monkeypatch: Any) -> None:
    with pytest.raises(UserError, match=r"terminate_on: got 'sucess'.*success"):
        options(terminate_on="sucess")
    with pytest.raises(UserError, match=r"task\.obs_mode=state is only for policies without cameras"):
        family.spec(ID, options(obs_mode="state"), [CameraSpec.square("base_camera", 24)])
    with pytest.raises(UserError, match=r"camera of task maniskill/PickCube-v1 'base'.*'base_camera'"):
        family.spec(ID, options(), [CameraSpec.square("base", 24)])
    if not torch.cuda.is_available():
        sim = ManiSkillConfig(sim_backend="physx_cuda")
        with pytest.raises(UserError, match=r"sim\.sim_backend=physx_cuda needs a CUDA GPU"):
            family.make(ID, options(), num_envs=2, num_threads=1, sim=sim)


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maniskill, "find_spec", lambda name: None)
    maniskill._ids.cache_clear()
    with pytest.raises(UserError, match=r"ManiSkill, which is not installed: pip install .*\[maniskill\]"):
        FAMILIES["maniskill"].build().spec("Lift-v9", options())
    assert FAMILIES["maniskill"].build().ids() == ()
    maniskill._ids.cache_clear()


def test_without_a_vulkan_device_what_to_install_is_named(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nowhere.json")
    with pytest.raises(UserError, match=r"needs a Vulkan device.*install_vulkan\.sh.*\(.*IncompatibleDriver\)"):
        family.spec("PushCube-v1", options())


def test_a_driver_that_crashes_is_named_and_ends_only_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maniskill, "SIMULATIONS", "tests.envs.children:Answers")
    monkeypatch.setattr(maniskill, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=r"needs a Vulkan device.*ended by SIGSEGV"):
        FAMILIES["maniskill"].build().spec("PullCube-v1", options())


def test_a_library_that_it_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mani_skill", reason="needs ManiSkill: pip install -c constraints.txt -e '.[maniskill]'")
    message = "libGL.so.1: cannot open shared object file: No such file or directory"
    (tmp_path / "cv2.py").write_text(f'raise ImportError("{message}")\n', encoding="utf-8")  # of a machine without it
    monkeypatch.syspath_prepend(str(tmp_path))
    maniskill._ids.cache_clear()
    with pytest.raises(UserError, match=r"ManiSkill cannot be imported: .*libGL\.so\.1.*: apt-get install libgl1$"):
        FAMILIES["maniskill"].build().ids()
