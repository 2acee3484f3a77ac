"""A policy that sees images and reads an instruction: π0 of transformers, explored and judged like any flow policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from policies.flow.chains import FlowChains
from policies.flow.step import interpolate
from policies.normalizer import RunningNormalizer
from policies.vla import checkpoint, lora, pi0
from policies.vla.config import PARTS, VLAConfig
from policies.vla.roles import ROLE_NAMES, Role
from policies.vla.text import tokenize

PREFIX = "prefix."  # what ``precompute`` puts into an observation in place of images and instruction
DRAWS = 4  # of noise and time for each observation that is imitated
ROLES = len(Role) - 1  # all but NONE
PRESENT_SHARE = 1 / 8  # of a patch from which on its target is 1
CENTRE_WEIGHT = 2.0  # of where a role is in the picture, beside which patches show it
NAMED_WEIGHT = 4.0  # of where that is in the world
HUBER_BETA = 0.1  # standard deviations, about a centimetre: the gradient of larger errors is constant
NAMED = 9  # numbers that tell it
PIECE = 256  # decisions whose prefix is computed at a time


class VLAContext(NamedTuple):
    """An encoded decision: its context in the action expert and its normalised state [N, S]."""

    context: pi0.Context
    state: Tensor


class VLAPolicy(FlowChains):
    """π0 (Black et al. 2024): SigLIP and Gemma read images and words, an action expert denoises chunks [H, W].

    Observations: ``images.<camera>`` uint8 [N, h, w, 3], ``instruction`` int64 [N] (an index into
    ``spec.instructions``), ``state`` [N, S]. The critic sees the last hidden state of the state token, which has
    attended to images and words (no gradient goes back through it), the state and what the simulator knows.

    Where vision and language are frozen, their share of a decision never changes: ``precompute`` puts it into the
    observation, so that the epochs of an update do not compute it again.
    """

    must_match = ("activation", "cameras")
    not_imitated = ("critic.", "noise_network.")
    optional_suffixes = (".lora_a", ".lora_b")
    roles = ROLE_NAMES

    tokens_IT: Tensor
    real_IT: Tensor
    pixel_mean: Tensor
    pixel_std: Tensor
    word_DV: Tensor

    def __init__(self, spec: EnvSpec, config: VLAConfig) -> None:
        if not spec.cameras:
            raise UserError(f"policy.cameras: task {spec.task} was built without cameras, the policy needs some")
        parts = checkpoint.build(spec, config)
        checkpoint.check_fits(parts, spec, config)
        model: Any = parts.model
        width, hidden = model.config.max_action_dim, model.config.dit_config.hidden_size
        super().__init__(spec, config, (hidden, width), width, hidden + spec.state_dim)
        self.config, self.parts = config, parts
        self.model: nn.Module = parts.model
        text = model.config.vlm_config.text_config.hidden_size
        words = sorted({word for description in spec.descriptions for word in description.split()})
        used = [[float(word in description.split()) for word in words] for description in ("", *spec.descriptions)]
        self.register_buffer("word_DV", torch.tensor(used).reshape(len(used), len(words)), persistent=False)
        self.grounding = nn.ModuleDict({"roles": nn.Sequential(nn.LayerNorm(text), nn.Linear(text, 3 * ROLES))})
        if words:
            self.grounding["words"] = nn.Sequential(nn.LayerNorm(text), nn.Linear(text, len(words)))
        self.grounding["named"] = nn.Linear(hidden, NAMED)
        self.named_normalizer = RunningNormalizer(NAMED)
        tokens_IT, real_IT = tokenize(parts.tokenizer, spec.texts, config.max_tokens)
        self.register_buffer("tokens_IT", tokens_IT, persistent=False)
        self.register_buffer("real_IT", real_IT, persistent=False)
        for name, colours in zip(("pixel_mean", "pixel_std"), parts.pixels, strict=True):
            alike = colours[:1] if len(set(colours)) == 1 else colours  # one number for all colours is faster
            self.register_buffer(name, 255.0 * torch.tensor(alike)[:, None, None], persistent=False)
        self._freeze(config)

    def _freeze(self, config: VLAConfig) -> None:
        vlm: Any = self.model.get_submodule("model.vlm")
        if "vision" in config.freeze:
            vlm.vision_tower.requires_grad_(False)
        if "language" in config.freeze:
            vlm.language_model.requires_grad_(False)
            vlm.multi_modal_projector.requires_grad_(False)
        if config.lora_rank:
            lora.adapt(self.model.get_submodule("model.dit.layers"), config.lora_rank)
        self.frozen = set(config.freeze) == set(PARTS)
        self.precompute_in_actor = self.frozen and config.prefix_from_actor
        self.prefix_dtype = getattr(torch, config.dtype)
        if self.frozen:
            vlm.to(self.prefix_dtype)

    # -- the network ---------------------------------------------------------------------------------------------------

    def prefix(self, obs: Obs) -> pi0.Prefix:
        """Of N observations, with a gradient only where something in it is trained."""
        if f"{PREFIX}key" in obs:
            return pi0.Prefix(*(obs[PREFIX + name] for name in pi0.Prefix._fields))
        return self._encode(obs, int(self._instruction(obs)[1].sum(-1).max()))[0]

    def _encode(self, obs: Obs, num_tokens: int) -> tuple[pi0.Prefix, pi0.ImageTokens]:
        """The prefix of images and the first ``num_tokens`` tokens of instructions, of which no others are real, and
        the image tokens on the way."""
        missing = [camera for camera in self.config.cameras if f"images.{camera}" not in obs]
        if missing:
            seen = ", ".join(key.removeprefix("images.") for key in obs if key.startswith("images.")) or "none"
            raise UserError(
                f"the policy sees {', '.join(self.config.cameras)}, and the observation has no pictures of "
                f"{', '.join(missing)}. It has: {seen}"
            )
        images = torch.stack([obs[f"images.{camera}"] for camera in self.config.cameras], 1)
        pixels = images.permute(0, 1, 4, 2, 3).float().sub_(self.pixel_mean).div_(self.pixel_std)
        tokens, real = (part[:, :num_tokens] for part in self._instruction(obs))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return pi0.encode_prefix(self.model, pixels.to(self.prefix_dtype), tokens, real)

    def _instruction(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Tokens of the instructions and which of them are real, [N, L] each: as given, or by ``instruction``."""
        if "instruction_tokens" in obs:
            return obs["instruction_tokens"], obs["instruction_mask"]
        return self.tokens_IT[obs["instruction"]], self.real_IT[obs["instruction"]]

    def tokenize(self, texts: Sequence[str]) -> Obs:
        """Tokens of any texts in words that the tokenizer knows; see ``Instructable``."""
        tokens, mask = tokenize(self.parts.tokenizer, texts, self.config.max_tokens)
        return {"instruction_tokens": tokens.to(self.tokens_IT.device), "instruction_mask": mask.to(tokens.device)}

    def encode(self, obs: Obs) -> VLAContext:
        return self._code(self.prefix(obs), obs)

    def _code(self, prefix: pi0.Prefix, obs: Obs) -> VLAContext:
        state = self.normalized_state(obs)
        model: Any = self.model
        padded = F.pad(state, (0, model.config.max_state_dim - state.shape[-1]))
        return VLAContext(pi0.encode_state(self.model, prefix, padded), state)

    def expand_steps(self, code: VLAContext) -> VLAContext:
        return code

    def code_value(self, code: VLAContext, obs: Obs) -> Tensor:
        return self.state_value(torch.cat((code.context.feature.detach(), code.state), -1), obs)

    def features(self, code: VLAContext, x: Tensor, t: Tensor) -> Tensor:
        """Last hidden states of the action tokens at x [N, H, W] and one time t [], or at x [N, steps, H, W] and t
        that broadcasts with [N, steps]."""
        denoise = _compiled_denoise() if self.config.compile else pi0.denoise
        if x.ndim == 4:
            return denoise(self.model, code.context, x, t.expand(x.shape[:2]))
        return denoise(self.model, code.context, x.unsqueeze(1), t.expand(len(x))[:, None]).squeeze(1)

    def out(self, features: Tensor) -> Tensor:
        """Velocity [..., W] of last hidden states."""
        velocity: Tensor = self.model.get_submodule("action_out_proj")(features)
        return velocity

    def velocity(self, code: VLAContext, x: Tensor, k: int | slice | Tensor) -> Tensor:
        return self.out(self.features(code, x, self.grid[k]))

    def noisy_velocity(self, code: VLAContext, x: Tensor, k: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        assert self.noise_network is not None
        features = self.features(code, x, self.grid[k])
        return self.out(features), self.noise_network(features)

    def imitation_loss(self, obs: Obs, action_NHA: Tensor, generator: torch.Generator) -> Tensor:
        """Flow-matching loss of demonstrated chunks, a scalar: mean squared error of the velocity ``noise - action``
        over the real dimensions; padding is zero, as in π0. Every observation is seen once and denoised from DRAWS
        points, since what it costs is in the images."""
        action = F.pad(action_NHA, (0, self.width - action_NHA.shape[-1])).repeat_interleave(DRAWS, 0)
        noise, t = self.draw_path(action, generator)
        x, t = interpolate(action, noise, t[:, None, None]), t.view(-1, DRAWS)
        velocity = self.out(self.features(self.encode(obs), x.view(-1, DRAWS, *x.shape[1:]), t)).flatten(0, 1)
        return (velocity - (noise - action))[..., : self.spec.action_dim].square().mean()

    def fit_normalizer(self, obs: Obs) -> None:
        super().fit_normalizer(obs)
        if "target_positions" in obs and not bool(self.named_normalizer.fixed):
            self.named_normalizer.fit(obs["target_positions"])

    # -- grounding -----------------------------------------------------------------------------------------------------

    def grounding_loss(self, obs: Obs, with_positions: bool) -> Tensor:
        """What image tokens tell of their patches: cross entropies, summed over words or roles, the mean over patches.

        - before they have read the instruction, which words describe what is there;
        - then, which roles it has.

        With ``where``, beside it:

        - squared distance of where these roles are in the picture (centres; the picture reaches from -1 to 1), as
          image tokens tell whose patches clearly show them: the sum over roles, the mean over such patches;
        - smooth L1 error (Girshick 2015, equation 3; quadratic below HUBER_BETA) of the standardised
          ``target_positions``, predicted from the state token: the mean over their numbers.
        """
        prefix, tokens = self._encode(obs, self.tokens_IT.shape[1])
        logit, centre = self._guess(tokens)
        masks = self._role_masks(obs)
        share = self._shares(masks)
        loss = _presence_loss(logit, share)
        if "words" in self.grounding:
            shown = self.word_DV[self._of_cameras("described", obs).long()].movedim(-1, 2)
            loss = loss + _presence_loss(self.grounding["words"](tokens.seen), self._shares(shown))
        if not with_positions:
            return loss
        error = (centre - _centres(masks).repeat_interleave(share.shape[1] // masks.shape[1], 1)).square().sum(-1)
        clear = share > PRESENT_SHARE / 2
        loss = loss + CENTRE_WEIGHT * ((error * clear).sum((0, 1)) / clear.sum((0, 1)).clamp_min(1)).sum()
        return loss + NAMED_WEIGHT * self._location_loss(self._code(prefix, obs), obs)

    @property
    def grounded(self) -> bool:
        return bool(self.named_normalizer.fixed)

    def location_loss(self, obs: Obs) -> Tensor:
        return self._location_loss(self.encode(obs), obs)

    def _location_loss(self, code: VLAContext, obs: Obs) -> Tensor:
        target = self.named_normalizer(obs["target_positions"])
        return F.smooth_l1_loss(self.grounding["named"](code.context.feature), target, beta=HUBER_BETA)

    def localization_hits(self, obs: Obs) -> dict[str, Tensor]:
        """By camera: whether the patch that is thought to show the named object most surely shows some of it."""
        logit, _ = self._guess(self._encode(obs, self.tokens_IT.shape[1])[1])
        named = (len(logit), len(self.config.cameras), -1)
        share = self._shares(self._role_masks(obs))
        logit_NCP, share_NCP = (part[..., Role.OBJECT - 1].view(named) for part in (logit, share))
        hit_NC = share_NCP.gather(-1, logit_NCP.argmax(-1, keepdim=True)).squeeze(-1) > 0
        seen_NC = share_NCP.amax(-1) > 0
        return {camera: hit_NC[seen_NC[:, c], c] for c, camera in enumerate(self.config.cameras)}

    def predict_positions(self, obs: Obs) -> Tensor:
        return self.named_normalizer.inverse(self.grounding["named"](self.encode(obs).context.feature))

    def _guess(self, tokens: pi0.ImageTokens) -> tuple[Tensor, Tensor]:
        """What image tokens tell: logits of the roles [N, C * patches, ROLES] and where these are
        [N, C * patches, ROLES, 2]."""
        told: Tensor = self.grounding["roles"](tokens.read)
        return told[..., :ROLES], told[..., ROLES:].reshape(*told.shape[:2], ROLES, 2)

    def _of_cameras(self, what: str, obs: Obs) -> Tensor:
        """``<what>.<camera>`` of every camera, [N, C, h, w]."""
        return torch.stack([obs[f"{what}.{camera}"] for camera in self.config.cameras], 1)

    def _role_masks(self, obs: Obs) -> Tensor:
        """1 where a picture shows a role, otherwise 0: float [N, C, ROLES, h, w]."""
        masks_NChw = self._of_cameras("masks", obs)
        return torch.stack([masks_NChw == role for role in Role if role != Role.NONE], 2).float()

    def _shares(self, masks_NCMhw: Tensor) -> Tensor:
        """How much of each patch each of M masks covers, [N, C * patches, M]."""
        model: Any = self.model
        num, _, count = masks_NCMhw.shape[:3]
        share = F.avg_pool2d(masks_NCMhw.flatten(0, 1), model.config.vlm_config.vision_config.patch_size)
        return share.flatten(2).transpose(1, 2).reshape(num, -1, count)

    # -- what is shared by the epochs of an update ---------------------------------------------------------------------

    @torch.no_grad()
    def precompute(self, obs: Obs) -> Obs:
        """The observations [B, ...] with the prefix, on the policy's device, in place of images and instruction, if it
        is frozen; otherwise as they are."""
        if not self.frozen or f"{PREFIX}key" in obs:
            return obs
        read = {key: value for key, value in obs.items() if key.startswith(("images.", "instruction"))}
        num, num_tokens = len(next(iter(read.values()))), self._instruction(obs)[0].shape[1]
        rest = {key: value for key, value in obs.items() if key not in read}
        device = self.tokens_IT.device
        rows = ({key: value[i : i + PIECE].to(device) for key, value in read.items()} for i in range(0, num, PIECE))
        pieces = [self._encode(piece, num_tokens)[0] for piece in rows]
        parts = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*pieces, strict=True))
        return rest | {PREFIX + name: part for name, part in zip(pi0.Prefix._fields, parts, strict=True)}

    def fits_cache(self, decisions: int) -> bool:
        """Whether their prefixes take no more than ``prefix_cache_mb``."""
        return decisions * self._prefix_bytes(self.tokens_IT.shape[1]) <= self.config.prefix_cache_mb * 2**20

    def _prefix_bytes(self, num_tokens: int) -> int:
        """Of the prefix of one decision: keys and values of every layer, and which tokens are real."""
        model: Any = self.model
        vision, text = model.config.vlm_config.vision_config, model.config.vlm_config.text_config
        tokens = len(self.config.cameras) * (vision.image_size // vision.patch_size) ** 2 + num_tokens
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        size: int = tokens * (numbers * self.prefix_dtype.itemsize + 1)
        return size

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save_architecture(self, path: Path) -> None:
        """What a run must keep beside its weights to be loaded again: the model's configuration and its tokenizer."""
        checkpoint.save_architecture(self.parts, path)

    def save_pretrained(self, path: Path) -> None:
        """A checkpoint that ``PI0ForConditionalGeneration.from_pretrained`` loads. Exploration and critic are not in
        it."""
        checkpoint.save_pretrained(self.parts, path)


@cache
def _compiled_denoise() -> Callable[..., Tensor]:
    return torch.compile(pi0.denoise)


def _presence_loss(logit_NPM: Tensor, share_NPM: Tensor) -> Tensor:
    """Cross entropy of what patches show: the sum over M masks, the mean over patches."""
    target = (share_NPM / PRESENT_SHARE).clamp(max=1.0)
    return F.binary_cross_entropy_with_logits(logit_NPM, target) * target.shape[-1]


def _centres(masks_NCRhw: Tensor) -> Tensor:
    """Of the pixels of each role in each picture, x and y from -1 to 1, [N, C, ROLES, 2]; 0 where there are none."""
    down, across = (torch.arange(n, device=masks_NCRhw.device) * 2.0 + 1.0 - n for n in masks_NCRhw.shape[-2:])
    count = masks_NCRhw.sum((-2, -1)).clamp_min(1.0)
    x = (masks_NCRhw.sum(-2) @ (across / len(across))) / count
    y = (masks_NCRhw.sum(-1) @ (down / len(down))) / count
    return torch.stack((x, y), -1)
