"""Read what EnvPool says of an environment: spaces, time limit, rate, success. Nothing is simulated here."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
from gymnasium import spaces

from embodied.core.errors import UserError, nearest, one_line, unknown_name
from embodied.core.spec import SUCCESS, ActionSpace, Box, CameraSpec, EnvSpec, Instruction, Term
from embodied.envs.adapters.config import EnvpoolTaskConfig
from embodied.envs.adapters.gym.spaces import SMALLEST_IMAGE, TIME, Frame, action_space_of, by_age, check_cameras

INSTALL = "pip install -c constraints.txt -e '.[envpool]'"
SUCCESS_KEYS = ("info:is_success", "info:success")
MASK_KEYS = ("obs:action_mask", "info:legal_action_mask")
PRIVILEGED_KEY = "obs:privileged_state"  # of MuJoCo Playground: for critics alone
MODEL_FOLDERS = ("mujoco/assets_gym", "mujoco/robotics/assets")  # of the models that ``xml_file`` names
NO_LIMIT = 10**6  # control steps; EnvPool has larger ones, and 0, where there is no time limit
NO_BOUND = 1e6  # a limit of an action beyond this bounds nothing
OURS = {  # options that the adapter itself sets, or that have a name of their own
    "num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset", "base_path", "seed",
    "env_seed", "gym_reset_return_info", "max_episode_steps",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """An environment of EnvPool. state, privileged, success, mask: EnvPool's names of these arrays."""

    id: str
    options: Mapping[str, Any]
    """Options of ``envpool.make``."""
    spec: EnvSpec
    state: tuple[str, ...]
    privileged: tuple[str, ...]
    frames: Mapping[str, Frame]
    """Where the image of each camera of the spec is."""
    success: str | None
    mask: str | None


def library() -> ModuleType:
    """Return EnvPool. UserError with the command that installs it."""
    try:
        return importlib.import_module("envpool")
    except ImportError as error:
        raise UserError(f"task=envpool/... needs EnvPool, which is not installed: {INSTALL}") from error


def require_known(id: str) -> str:
    """Return ``id``. UserError with the nearest name if EnvPool has no such environment."""
    names = library().list_all_envs()
    if id in names:
        return id
    short = {name.lower().rpartition("/")[2]: name for name in names}
    found = nearest(id.lower().rpartition("/")[2], short)
    hint = f" Nearest: envpool/{short[found]}." if found else ""
    raise UserError(f"task=envpool/{id}: EnvPool has {len(names)} environments, none with this name.{hint}")


def read_layout(id: str, task: EnvpoolTaskConfig, cameras: Sequence[CameraSpec] = ()) -> Layout:
    """Return the layout of an environment with options ``task`` and these cameras.

    UserError for an unknown id, option or camera, and for what is not supported, with the reason.
    """
    options = dict(task.options)
    if task.max_episode_steps is not None:
        options["max_episode_steps"] = task.max_episode_steps
    found = _make_spec(require_known(id), options)
    config = found.config._asdict()
    limit = int(config["max_episode_steps"])
    if not 0 < limit < NO_LIMIT:
        raise UserError(f"task=envpool/{id} has no time limit in EnvPool: give task.max_episode_steps=<control steps>")
    arrays = found.state_array_spec
    shapes = {key: [length for length in array.shape if length != -1] for key, array in arrays.items()}
    action = _action(id, found)
    choices = None if isinstance(action, Box) else [*action.counts]
    mask = next((key for key in MASK_KEYS if key in arrays and shapes[key] == choices), None)
    shapes = {key: shape for key, shape in shapes.items() if key.partition(":")[0] == "obs" and key != mask}
    frames = _frames(id, config, arrays, shapes)
    images = {frame.key for frame in frames.values()}
    vectors = [key for key in shapes if key not in images]
    check_cameras(f"envpool/{id}", cameras, frames, [] if vectors else [*frames], action)
    state, privileged = (
        {key: Term(_name(key), int(np.prod(shapes[key]))) for key in vectors if (key == PRIVILEGED_KEY) == hidden}
        for hidden in (False, True)
    )
    success = next((key for key in SUCCESS_KEYS if key in arrays), None)
    text = task.instruction or id.rpartition("/")[2].partition("-v")[0]
    dt_s = control_dt_s(config)
    spec = EnvSpec(
        task=f"envpool/{id}",
        state=tuple(state.values()) or (TIME,),
        privileged=tuple(privileged.values()),
        action=action,
        control_dt_s=dt_s or 1.0,  # a control step is then the unit of time
        max_episode_steps=limit,
        cameras=tuple(cameras),
        instructions=(Instruction(text, goal=text),),
        outcomes=(SUCCESS,) if success else (),
        action_mask=mask is not None,
        repeats="first",
        assumed=() if dt_s else ("control_dt_s",),
    )
    shown = {camera.name: frames[camera.name] for camera in cameras}
    options["max_episode_steps"] = limit + 1  # at its own limit EnvPool calls a failure a truncation, so ours is first
    return Layout(id, options, spec, tuple(state), tuple(privileged), shown, success, mask)


def _frames(
    id: str, config: Mapping[str, Any], arrays: Mapping[str, Any], shapes: Mapping[str, list[int]]
) -> dict[str, Frame]:
    """Return the frames of the observed images by camera name, the newest of a stack first (it is EnvPool's last)."""
    frames: dict[str, Frame] = {}
    stack = config.get("stack_num", config.get("frame_stack", 1))
    for key, shape in shapes.items():
        if np.dtype(arrays[key].dtype) != np.uint8 or len(shape) not in (2, 3):
            continue
        first = len(shape) == 3 and shape[0] < shape[2]  # the axis of the channels
        height, width, channels = [*shape[1:], shape[0]] if first else [*shape, 1][:3]
        if min(height, width) < SMALLEST_IMAGE:
            continue
        name, each = _name(key).replace(".", "_"), channels // stack
        if each * stack != channels or each not in (1, 3):
            got = f"images of {channels} channels in {stack} frames ({name}: uint8 {shape})"
            raise UserError(f"task=envpool/{id} observes {got}; supported: frames of 1 or 3 channels")
        if len(shape) == 2:
            frames[name] = Frame(key, ())
            continue
        before = () if first else (slice(None), slice(None))
        parts = [slice(at, at + each) for at in range(channels - each, -1, -each)]
        frames |= by_age(name, [Frame(key, (*before, part), channels_first=first) for part in parts])
    return frames


def _make_spec(id: str, options: Mapping[str, Any]) -> Any:
    """Return EnvPool's own spec. UserError for an unknown option, a bad value or an environment that cannot run."""
    try:
        found = library().make_spec(id)
        defaults = {name: value for name, value in found.config._asdict().items() if name not in OURS}
        for name, value in options.items():
            if name == "max_episode_steps":
                continue
            if name not in defaults:
                raise unknown_name(f"option of task=envpool/{id}", name, defaults)
            default = defaults[name]
            kinds = (float, int) if isinstance(default, float) else type(default)
            if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
                allowed = f"{type(default).__name__}, such as {default!r}"
                raise UserError(f"task.options.{name}: got {value!r}, allowed: {allowed}")
        return library().make_spec(id, **options) if options else found
    except (ImportError, TypeError, RuntimeError) as error:
        raise UserError(f"task=envpool/{id}: {one_line(error)}") from error


def _name(key: str) -> str:
    """Return the name of an array of EnvPool: ``obs:achieved_goal`` → ``achieved_goal``, ``obs`` → ``obs``."""
    return (key.partition(":")[2] or key).replace(":", ".")


def _action(id: str, found: Any) -> ActionSpace:
    """Return the action space. UserError for one that is not supported."""
    if found.config.max_num_players != 1:
        raise UserError(f"task=envpool/{id} has {found.config.max_num_players} players, supported: one")
    space = found.action_space
    is_vector = isinstance(space, spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating)
    if is_vector and np.abs([space.low, space.high]).max() > NO_BOUND:
        raise UserError(f"task=envpool/{id} has actions without limits ({space}); policies act within limits")
    if not is_vector and not (isinstance(space, spaces.Discrete) and space.start == 0):
        supported = "a vector of real numbers (Box) or Discrete from 0"
        raise UserError(f"task=envpool/{id} has actions {space}, supported: {supported}")
    return action_space_of(space)


def control_dt_s(config: Mapping[str, Any]) -> float | None:
    """Return the duration of a control step: MuJoCo Playground's own, or simulator steps of a model's file.

    None where EnvPool tells neither.
    """
    if "ctrl_dt" in config:
        return float(config["ctrl_dt"])
    if "xml_file" in config and "frame_skip" in config:
        named = Path(config["xml_file"])
        files = named, named.with_stem(f"{named.stem}_envpool")  # some lie there under the second name alone
        paths = [Path(config["base_path"], folder, file) for folder in MODEL_FOLDERS for file in files]
        for path in filter(Path.is_file, paths):
            option = ElementTree.parse(path).getroot().find("option")
            if option is not None and "timestep" in option.attrib:
                return float(round(config["frame_skip"] * float(option.attrib["timestep"]), 6))
    return None
