"""A pool whose images are labelled from the simulator's state: geom → body → role and description → labels."""

import torch
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodeSampler
from embodied.core.errors import UserError
from embodied.core.types import Obs
from embodied.envs.mujoco.pool import MujocoPool


class LabeledPool:
    """Label the observations of a pool with cameras whose task has ``descriptions`` of its bodies.

    Labels: ``embodied.core.policy.Policy.grounding_loss``. sampler: draws the scenes. masks: whether pixels are
    labelled, or ``target_positions`` is the only label.
    """

    def __init__(self, pool: VecEnv, sampler: EpisodeSampler, *, masks: bool = True) -> None:
        """UserError for environments whose images nothing labels."""
        if not isinstance(pool, MujocoPool) or pool.rig is None or not pool.task.descriptions:
            raise UserError(f"task={pool.spec.task}: its environments do not label images")
        self.pool, self.rig, self.expert, self.close = pool, pool.rig, pool.task.expert, pool.close
        self.spec, self.num_envs, self.masks = pool.spec, pool.num_envs, masks
        pool.observe_segmentation = masks
        self._sampler = sampler
        self._bodies = [self.rig.model.body(body).name for body in self.rig.model.geom_bodyid]  # of the geoms

    def next_scene(self) -> Obs:
        """Start the next episode of every env and return its first, labelled observation."""
        self.pool.observe_images = True
        return self._labeled(self.pool.reset(self._sampler))

    def act(self, action_NA: Tensor) -> None:
        """Execute one action without rendering."""
        self.pool.observe_images = False
        self.pool.step(action_NA)

    def act_and_render(self, action_NA: Tensor) -> Obs:
        """Execute one action and return the labelled observation after it."""
        self.pool.observe_images = True
        return self._labeled(self.pool.step(action_NA).obs)

    def _labeled(self, obs: Obs) -> Obs:
        """Replace the segmentation of an observation by its labels, those of pixels uint8 [N, height, width]."""
        object_N3, place_N3 = self.pool.task.target_positions()
        positions = torch.cat((object_N3, object_N3 - self.pool.view.tcp_pos, place_N3), -1).float()
        labeled = {key: value for key, value in obs.items() if not key.startswith("segmentation.")}
        labeled["target_positions"] = positions
        if self.masks:
            rows, no_label_N = torch.arange(self.num_envs)[:, None, None], torch.zeros(self.num_envs)
            described = {body: index_N + 1 for body, index_N in self.pool.task.body_descriptions().items()}
            for name, by_body in {"masks": self.pool.task.body_roles(), "described": described}.items():
                columns = [by_body.get(body, no_label_N) for body in self._bodies]
                label_NG = torch.stack([*columns, no_label_N], -1).to(torch.uint8)  # the last column, index -1: no geom
                for camera in self.spec.cameras:
                    labeled[f"{name}.{camera.name}"] = label_NG[rows, obs[f"segmentation.{camera.name}"].long()]
        return labeled
