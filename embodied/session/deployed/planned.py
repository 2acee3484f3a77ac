"""Policies that plan in physical units, as policies of torch: bundles, and policies behind servers.

observations ──► one row each, physical units ──► Planner or any openpi server ──► chunk in [-1, 1]
"""

from contextlib import suppress
from dataclasses import field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import UserError, one_line
from embodied.core.options import PositiveInt, Text, config_dataclass, from_mapping
from embodied.core.policy import Policy
from embodied.core.spec import Box, CameraSpec, EnvSpec
from embodied.core.types import Obs
from embodied.data.columns import Column, convert
from embodied.deployment.bundle.format import MAX_JSON_BYTES, read_json
from embodied.deployment.bundle.runner import InputSpec, Planner
from embodied.deployment.robots.base import Unusable
from embodied.deployment.serving.client import PolicyConnection


class PlannedPolicy(Policy):
    """A bundle's policy, by its runner or by a server of this project.

    Where a robot would be told to hold, the arm holds, but the fingers go halfway: it does not know their last targets.
    """

    def __init__(self, planner: Planner) -> None:
        super().__init__()
        bundle = self.bundle = planner.bundle
        self.planner, self.horizon, self.execute = planner, bundle.horizon, bundle.execute
        self.noise_shape = self.plan_noise_shape = bundle.noise_shape
        self._names = set(InputSpec(bundle).shapes)
        action = Box(bundle.action)
        self._unit, self._scale, self._offset = bundle.env_spec.state_scale, action.scale, action.offset

    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        inputs = {name: value.numpy() for name, value in obs.items() if name in self._names}
        rows = len(inputs["state"])
        inputs["state"] = inputs["state"] / self._unit
        inputs["noise"] = np.zeros((rows, *self.noise_shape), np.float32) if noise is None else noise.numpy()
        if "prefix" in inputs:
            inputs["prefix"] = inputs["prefix"] * self._scale + self._offset
        chunk_NHA = np.zeros((rows, self.horizon, len(self._scale)), np.float32)
        for n in range(rows):
            with suppress(Unusable):
                planned_HA = self.planner.plan({name: value[n : n + 1] for name, value in inputs.items()})[0]
                chunk_NHA[n] = (planned_HA - self._offset) / self._scale
        return torch.from_numpy(chunk_NHA)


@config_dataclass
class ServerMapping:
    """Names and numbers of any openpi server, a JSON file: which entries of its messages are what on a task of ours."""

    action: Column
    """Actions in a reply, [H, D]. ``entries``: columns to take, by their numbers "0", "1", ...; the task's action, in
    [-1, 1], is ``offset + scale * number``."""
    execute: PositiveInt
    """Actions that are executed of a chunk, at the task's rate."""
    state: Column | None = None
    """State in a request. ``entries``: names of the task's entries, such as "joint_pos[0]", in the server's order. The
    server gets ``offset + scale * number``, for a number in the task's unit."""
    images: dict[str, str] = field(default_factory=dict)
    """Cameras of the task, by their names in a request."""
    image_size: PositiveInt = 224
    """Height and width of the images."""
    prompt: Text | None = "prompt"
    """Name of the instruction in a request; null sends none."""

    @property
    def cameras(self) -> tuple[CameraSpec, ...]:
        return tuple(CameraSpec.square(name, self.image_size) for name in self.images.values())


def read_server_mapping(path: Path) -> ServerMapping:
    content = read_json(path, MAX_JSON_BYTES)
    if not isinstance(content, dict):
        raise UserError(f"mapping={path}: got {one_line(content)[:60]}, allowed: an object")
    parts = {key: from_mapping(Column, content[key], key) for key in ("state", "action") if content.get(key)}
    return from_mapping(ServerMapping, content | parts)


class ServerPolicy(Policy):
    """Anybody's policy behind an openpi server, which draws its own noise.

    UserError for what it refuses. ConnectionError for a server that is gone, late, or replies without actions.
    """

    noise_shape = plan_noise_shape = ()

    def __init__(self, connection: PolicyConnection, mapping: ServerMapping, spec: EnvSpec) -> None:
        super().__init__()
        if not isinstance(spec.action, Box):
            raise UserError(f"policies: {connection.url} plans continuous actions, task {spec.task} has choices")
        self.connection, self.mapping, self.spec, self.execute = connection, mapping, spec, mapping.execute
        self._unit = torch.from_numpy(spec.state_scale)

    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        mapping, rows = self.mapping, []
        for n, state_S in enumerate(obs["state"] / self._unit):
            request: dict[str, object] = {key: obs[f"images.{name}"][n].numpy() for key, name in mapping.images.items()}
            if mapping.state is not None:
                state_1S = convert(state_S[None], self.spec.state_names, mapping.state, "state")
                request[mapping.state.name] = state_1S[0].numpy()
            if mapping.prompt is not None:
                texts = self.spec.texts or (self.spec.task,)
                request[mapping.prompt] = texts[int(obs["instruction"][n]) if "instruction" in obs else 0]
            rows.append(self._actions(self.connection.ask(request, MAX_JSON_BYTES)))
        shortest = min(map(len, rows))
        return torch.stack([row[:shortest] for row in rows])

    def _actions(self, reply: object) -> Tensor:
        """Return a chunk, [H, A], in [-1, 1] unless the server exceeds it. A delay reaches beyond its first E rows."""
        name, size = self.mapping.action.name, self.spec.action_dim
        found = np.asarray(reply.get(name) if isinstance(reply, dict) else None)
        if (
            found.ndim != 2
            or found.dtype.kind not in "fiu"
            or len(found) < self.execute
            or not np.isfinite(found).all()
        ):
            got = f"{name} of {found.dtype} {list(found.shape)}" if found.ndim else f"no array '{name}'"
            needed = f"finite numbers [H, D] with at least {self.execute} actions"
            raise ConnectionError(f"{self.connection.url} replied with {got}, needed {needed}")
        columns = [str(i) for i in range(found.shape[1])]
        chunk_HA = convert(torch.tensor(found), columns, self.mapping.action, "action")
        if chunk_HA.shape[1] != size:
            raise UserError(f"action.entries: got {chunk_HA.shape[1]} columns of {name}, needed {size} for the task")
        return chunk_HA
