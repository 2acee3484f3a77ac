"""Reader of ManiSkill trajectories (HDF5), the format of its data sets and its RecordEpisode wrapper.

    <name>.h5     traj_0, traj_1, ...: actions [T, A], obs [T+1, S] or nested groups of arrays, success [T], rewards [T]
    <name>.json   env_info (env_id, env_kwargs with control_mode and maybe sim_config.control_freq), episodes

The state is the concatenation of all vectors in ``obs``, in the order of their names, without images.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.core.spec import ActionTerm, Box, EnvSpec, Term
from embodied.data.demonstrations import Episode

IMAGES = ("sensor_data", "sensor_param")
HZ = 20.0  # ManiSkill's default control_freq
MAX_NUMBERS = 2**28  # of one array: a small file may declare a size beyond memory


def read_trajectories(path: Path, instruction: str | None = None) -> tuple[list[Episode], EnvSpec]:
    """Read the episodes of a file and their spec. instruction: by default the environment's id.

    UserError if h5py, the file, its JSON file or state observations are missing, and for numbers that are not finite
    or trajectories that differ in size.
    """
    try:
        import h5py
    except ImportError as error:
        raise UserError("reading HDF5 needs h5py: pip install -c constraints.txt -e '.[maniskill]'") from error
    info = path.with_suffix(".json")
    try:
        env_info = json.loads(info.read_text(encoding="utf-8"))["env_info"]
        env_id, kwargs = str(env_info.get("env_id", path.stem)), env_info.get("env_kwargs") or {}
        mode, dt_s = kwargs.get("control_mode", "action"), 1 / (kwargs.get("sim_config") or {}).get("control_freq", HZ)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"ManiSkill writes {info.name} beside the .h5 file, and it is needed: {error}") from error
    except (LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        told = "env_info, or it has an env_id, env_kwargs or control_freq that is none"
        raise UserError(f"{info} is not the description of ManiSkill trajectories: no {told}") from error
    episodes: list[Episode] = []
    terms: tuple[Term, ...] = ()
    try:
        with h5py.File(path, "r") as file:
            keys = sorted((key for key in file if re.fullmatch(r"traj_\d+", key)), key=lambda key: int(key[5:]))
            if not keys:
                raise UserError(f"{path} has no trajectories (groups traj_0, traj_1, ...)")
            for key in keys:
                episode, terms = _episode(file[key], f"{path}: {key}", instruction or env_id)
                episodes.append(episode)
    except OSError as error:
        raise UserError(f"cannot read {path} as HDF5: {error}") from error
    sizes = {(episode.state_LS.shape[1], episode.action_LA.shape[1]) for episode in episodes}
    if len(sizes) > 1:
        raise UserError(f"{path}: trajectories differ in the sizes of state and action: {sorted(sizes)}")
    action = Box(tuple(ActionTerm(f"{mode}[{i}]") for i in range(episodes[0].action_LA.shape[1])))
    return episodes, EnvSpec(env_id, terms, action, dt_s, max_episode_steps=max(map(len, episodes)))


def _episode(group: Any, where: str, instruction: str) -> tuple[Episode, tuple[Term, ...]]:
    missing = [name for name in ("obs", "actions") if name not in group]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; replay with obs_mode=state to have observations")
    actions = _array(group["actions"], f"{where}: actions")
    if actions.ndim != 2 or not actions.size:
        raise UserError(f"{where}: actions have shape {actions.shape}, needed: [T, A] with a control step or more")
    parts = _vectors(group["obs"], "state" if hasattr(group["obs"], "shape") else "", where)
    if not parts:
        raise UserError(f"{where} has no vectors in obs; replay with obs_mode=state or state_dict")
    length = len(actions)
    for name, value in parts.items():
        if len(value) != length + 1:
            raise UserError(f"{where}: obs/{name} has {len(value)} rows, needed is {length + 1}, one more than actions")
    state = np.concatenate([value[:-1] for value in parts.values()], axis=1)
    for name, value in (("obs", state), ("actions", actions)):
        if not np.isfinite(value).all():
            raise UserError(f"{where}: {name} is not finite")
    nothing = np.zeros(length)
    success, rewards = (_array(group.get(name, nothing), f"{where}: {name}") for name in ("success", "rewards"))
    if success.shape != (length,) or rewards.shape != (length,):
        raise UserError(f"{where}: success {success.shape} and rewards {rewards.shape} must have {length} numbers each")
    terms = tuple(Term(name, value.shape[1]) for name, value in parts.items())
    state_LS, action_LA, reward_L, success_L = map(torch.from_numpy, (state, actions, rewards, success != 0))
    return Episode(state_LS, action_LA, reward_L, success_L, instruction), terms


def _array(node: Any, where: str) -> NDArray[np.float32]:
    """Return an array of a file as float32. UserError for what holds no numbers, or too many."""
    if not hasattr(node, "shape") or not (np.issubdtype(node.dtype, np.number) or node.dtype == bool):
        raise UserError(f"{where} is not an array of numbers")
    if node.size > MAX_NUMBERS:
        raise UserError(f"{where} has {node.size:,} numbers, allowed: at most {MAX_NUMBERS:,}")
    return np.asarray(node).astype(np.float32)


def _vectors(node: Any, name: str, where: str) -> dict[str, NDArray[np.float32]]:
    """Return every numeric array [T+1] or [T+1, D] under a node as float32 [T+1, D], by its path."""
    if hasattr(node, "shape"):
        numbers = (len(node.shape) in (1, 2) and np.issubdtype(node.dtype, np.number)) or node.dtype == bool
        if not numbers:
            return {}
        value = _array(node, f"{where}: {name}")
        return {name: value.reshape(len(value), -1)}
    found: dict[str, NDArray[np.float32]] = {}
    for key in sorted(node):
        if key not in IMAGES:
            found |= _vectors(node[key], f"{name}/{key}" if name else key, where)
    return found
