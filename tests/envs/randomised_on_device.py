"""Randomisation with states and model fields on a device, as ``WarpPool`` has it, without MuJoCo Warp."""

from __future__ import annotations

import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.core.config import read_preset
from embodied.core.options import from_mapping
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.randomization.non_model import NonModelRandomization
from embodied.envs.mujoco.randomization.randomizer import Fields, Randomizer
from embodied.envs.mujoco.randomization.terms import RandomizationTerm
from embodied.envs.mujoco.view import View
from embodied.envs.mujoco.warp.randomization import DeviceFields, DeviceRng
from embodied.session.config import CONFIG_DIR
from tests.envs.helpers import pool

N = 5
SIM2REAL = read_preset(CONFIG_DIR, "sim2real")["randomization"]


class OnDevice:
    """``Simulations`` whose arrays are float32 copies on a device; nothing is simulated."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.model, self.batch, self.device = batch.model, batch, device
        self.live: dict[str, Tensor] = {}

    def bind(self, name: str) -> Tensor:
        return self._of(name, self.batch.bind(name))

    def expand(self, name: str) -> Tensor:
        return self._of(name, np.broadcast_to(getattr(self.model, name), (N, *getattr(self.model, name).shape)))

    def _of(self, name: str, array: np.ndarray) -> Tensor:
        return self.live.setdefault(name, torch.from_numpy(array.copy()).float().to(self.device))


def randomise(device: torch.device) -> list[Tensor]:
    """Return what is measured and commanded in two episodes, the state and the fields of the model."""
    sims = pool("pick_place", N, sim={"randomization": SIM2REAL})
    states, task, fields = OnDevice(sims.batch, device), sims.task, Fields(Batch(sims.model, N, 1))
    arm = task.robot.attach_tensors(states)
    task.attach(View(states, arm))
    terms = {name: from_mapping(RandomizationTerm, term) for name, term in SIM2REAL.items()}
    left_N, limit_N, ids, found = torch.full((N,), 9, device=device), np.full(N, 9), np.arange(N), []
    noise = DeviceRng(left_N)
    non_model = NonModelRandomization(arm, task, terms, fields, states, noise.normal)
    randomizer = Randomizer(fields, terms, non_model.targets, task.config.control_dt_s)
    sent = DeviceFields(fields.batch, states, device)
    for rows in (ids, ids[1:3]):
        rng = EpisodeRng(rows + 7, rows)
        randomizer.apply(rows, rng)
        with non_model.resizing(rows):
            pass
        sent.send(rows)
        noise.start(torch.from_numpy(rows).to(device), rng, limit_N[rows])
        non_model.start(rows)
        for name in ("arm_push", "object_push"):
            target = non_model.targets[name]
            target.write(rows, np.linspace(0, 1, len(rows) * 2 * target.size).reshape(len(rows), -1))
        for _ in range(2):
            arm.apply(torch.full((N, 4), 0.3, device=device), non_model.measured())
            left_N -= 1
            non_model.moved()
            for measured in (non_model.observe(None), non_model.observe(rows)):
                assert measured is not None
                del measured["finger_target"]  # a view of a view, which the device that is none copies
                found += measured.values()
        non_model.load_state_dict({key: value.cpu() for key, value in non_model.state_dict().items()})
    return [*found, *states.live.values()]
