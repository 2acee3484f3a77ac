"""Grounding of a VLA policy: heads that predict what images show and where it is, and their losses.

Each head is one linear layer on hidden states of the network, and no action depends on it.

Suffixes: N observations, C cameras, P patches of all cameras, M masks (of words or roles), R roles, D descriptions,
V words of the descriptions, h and w pixels.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied.core.types import Obs, Role
from embodied.policies.vla.pi0 import ImageTokens

NUM_ROLES = len(Role) - 1  # all but NONE
POSITION_SIZE = 9  # numbers of ``target_positions``
PRESENT_SHARE = 1 / 8  # share of a patch that a mask must cover for the target 1
CENTRE_WEIGHT = 2.0  # of the loss of positions in the image; that of masks has weight 1
POSITION_WEIGHT = 4.0  # of the loss of ``target_positions``
HUBER_BETA = 0.1  # standard deviations, about a centimetre: the gradient of larger errors is constant


class GroundingHeads(nn.Module):
    """Linear heads on image tokens (words, roles) and on the state token (positions).

    text_width: size of the language model's hidden states. expert_width: size of the action expert's. patch_size:
    pixels along a patch. descriptions: of all that images show; without them there is no head for words.
    """

    word_DV: Tensor
    """1 where description d (from 1; 0: none) contains a word, otherwise 0, float32 [D + 1, V]."""

    def __init__(
        self, text_width: int, expert_width: int, patch_size: int, cameras: Sequence[str], descriptions: Sequence[str]
    ) -> None:
        super().__init__()
        self.patch_size, self.cameras = patch_size, tuple(cameras)
        words = sorted({word for description in descriptions for word in description.split()})
        used = [[float(word in description.split()) for word in words] for description in ("", *descriptions)]
        self.register_buffer("word_DV", torch.tensor(used).reshape(len(used), len(words)), persistent=False)
        self.roles = nn.Sequential(nn.LayerNorm(text_width), nn.Linear(text_width, 3 * NUM_ROLES))
        self.words: nn.Module | None = None
        if words:
            self.words = nn.Sequential(nn.LayerNorm(text_width), nn.Linear(text_width, len(words)))
        self.named = nn.Linear(expert_width, POSITION_SIZE)

    def image_loss(self, tokens: ImageTokens, obs: Obs, with_centres: bool) -> Tensor:
        """Return the loss of the predictions from image tokens, a scalar.

        It sums, over words or roles, the mean over patches of

        - the cross entropy of the words that describe a patch, predicted before the language model;
        - the cross entropy of the roles of a patch, predicted after it;
        - with_centres: the squared error of the image position of a role's centre, over the patches that clearly show
          the role. Positions reach from -1 to 1.
        """
        logit_NPR, centre_NPR2 = self.predict_roles(tokens)
        masks_NCRhw = self.role_masks(obs)
        share_NPR = self._patch_shares(masks_NCRhw)
        loss = _presence_loss(logit_NPR, share_NPR)
        if self.words is not None:
            shown_NCVhw = self.word_DV[self._stack_cameras("described", obs).long()].movedim(-1, 2)
            loss = loss + _presence_loss(self.words(tokens.visual), self._patch_shares(shown_NCVhw))
        if not with_centres:
            return loss
        target_NPR2 = centres(masks_NCRhw).repeat_interleave(share_NPR.shape[1] // masks_NCRhw.shape[1], 1)
        error_NPR = (centre_NPR2 - target_NPR2).square().sum(-1)
        clear_NPR = share_NPR > PRESENT_SHARE / 2
        return loss + CENTRE_WEIGHT * ((error_NPR * clear_NPR).sum((0, 1)) / clear_NPR.sum((0, 1)).clamp_min(1)).sum()

    def localization_hits(self, tokens: ImageTokens, obs: Obs) -> dict[str, Tensor]:
        """Return whether the patch rated highest for the named object really shows it, bool [n], for each camera.

        n: number of observations in which the camera sees the object.
        """
        logit_NPR, _ = self.predict_roles(tokens)
        share_NPR = self._patch_shares(self.role_masks(obs))
        by_camera = (len(logit_NPR), len(self.cameras), -1)
        logit_NCp, share_NCp = (part[..., Role.OBJECT - 1].view(by_camera) for part in (logit_NPR, share_NPR))
        hit_NC = share_NCp.gather(-1, logit_NCp.argmax(-1, keepdim=True)).squeeze(-1) > 0
        seen_NC = share_NCp.amax(-1) > 0
        return {camera: hit_NC[seen_NC[:, c], c] for c, camera in enumerate(self.cameras)}

    def predict_roles(self, tokens: ImageTokens) -> tuple[Tensor, Tensor]:
        """Return logits of the roles of each patch [N, P, R] and image positions of their centres [N, P, R, 2]."""
        numbers: Tensor = self.roles(tokens.contextual)
        return numbers[..., :NUM_ROLES], numbers[..., NUM_ROLES:].reshape(*numbers.shape[:2], NUM_ROLES, 2)

    def role_masks(self, obs: Obs) -> Tensor:
        """Return 1 where an image shows a role, otherwise 0, float32 [N, C, R, h, w]."""
        masks_NChw = self._stack_cameras("masks", obs)
        return torch.stack([masks_NChw == role for role in Role if role != Role.NONE], 2).float()

    def _stack_cameras(self, label: str, obs: Obs) -> Tensor:
        """Return ``<label>.<camera>`` of all cameras, [N, C, h, w]."""
        return torch.stack([obs[f"{label}.{camera}"] for camera in self.cameras], 1)

    def _patch_shares(self, masks_NCMhw: Tensor) -> Tensor:
        """Return the share of each patch that each mask covers, [N, P, M]."""
        num, _, count = masks_NCMhw.shape[:3]
        share = F.avg_pool2d(masks_NCMhw.flatten(0, 1), self.patch_size)
        return share.flatten(2).transpose(1, 2).reshape(num, -1, count)


def _presence_loss(logit_NPM: Tensor, share_NPM: Tensor) -> Tensor:
    """Return the cross entropy of the masks that patches show: the sum over masks of the mean over patches."""
    target_NPM = (share_NPM / PRESENT_SHARE).clamp(max=1.0)
    return F.binary_cross_entropy_with_logits(logit_NPM, target_NPM) * target_NPM.shape[-1]


def centres(masks_NCRhw: Tensor) -> Tensor:
    """Return x and y, from -1 to 1, of the centre of each role's pixels, [N, C, R, 2]; 0 if there are none."""
    down, across = (torch.arange(n, device=masks_NCRhw.device) * 2.0 + 1.0 - n for n in masks_NCRhw.shape[-2:])
    count = masks_NCRhw.sum((-2, -1)).clamp_min(1.0)
    x = (masks_NCRhw.sum(-2) @ (across / len(across))) / count
    y = (masks_NCRhw.sum(-1) @ (down / len(down))) / count
    return torch.stack((x, y), -1)
