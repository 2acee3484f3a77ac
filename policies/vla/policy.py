"""A policy of images, an instruction and the state: π0 of transformers, with the exploration of the flow policies."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs, PolicySample
from embodied.policies.config import PARTS, VLAConfig
from embodied.policies.flow.chains import FlowChains
from embodied.policies.flow.prefix import draw_prefix, learned_rows, noisy_chunk
from embodied.policies.normalizer import RunningNormalizer
from embodied.policies.vla import checkpoint, pi0
from embodied.policies.vla.grounding import HUBER_BETA, POSITION_SIZE, POSITION_WEIGHT, GroundingHeads
from embodied.policies.vla.lora import adapt

PREFIX = "prefix."  # of the keys that ``precompute`` puts into observations in place of images and instruction
DRAWS_PER_OBSERVATION = 4  # draws of noise and time for each observation in the imitation loss
PREFIX_ROWS = 64  # decisions whose prefix is computed at once: 3.5 GB of activations for the published size


class VLAContext(NamedTuple):
    """An encoded observation: all that the denoise steps of a decision share."""

    context: pi0.Context
    """Input of the action expert besides x and t."""
    state: Tensor
    """Normalised state, [N, S]."""
    fixed: Tensor | None = None
    """Rows of the chunk that the prefix of the actions gives, bool [N, H, 1]; None without one."""


class VLAPolicy(FlowChains):
    """π0 (Black et al. 2024): SigLIP and Gemma read images and words, an action expert denoises chunks [H, W].

    Observations: ``images.<camera>`` uint8 [N, h, w, 3], ``instruction`` int64 [N] (an index into
    ``spec.instructions``), ``state`` [N, S].

    The critic reads the last hidden state of the state token, the state and the privileged observation. The state token
    has attended to images and words; no gradient of the critic flows back into it.

    The prefix is the output of vision and language: keys and values of images and words for the action expert. If both
    are frozen, ``precompute`` puts it into the observations, so that the epochs of an update do not recompute it.
    """

    recordable = True
    must_match = ("activation", "cameras")
    must_match_exploring = ("sigma_min", "sigma_max")
    not_imitated = ("critic.", "noise_network.")
    optional_suffixes = (".lora_a", ".lora_b")
    can_ground = True
    library = "transformers"

    tokens_IT: Tensor
    real_IT: Tensor
    """Tokens of ``spec.instructions``, int64, and whether each is no padding, bool."""
    pixel_mean: Tensor
    pixel_std: Tensor
    """Mean and standard deviation of the pixels (0 to 255) that the vision tower expects, [1 or 3, 1, 1]."""

    def __init__(self, spec: EnvSpec, config: VLAConfig) -> None:
        """Build or load the model. UserError if it does not fit the task or the options."""
        if not spec.cameras:
            raise UserError(f"policy.cameras: task {spec.task} was built without cameras, the policy needs some")
        if config.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
            raise UserError(
                "policy.compile=true needs a C++ compiler, and there is none: g++, clang++ or the variable CXX"
            )
        parts = checkpoint.build(spec, config)
        checkpoint.check_fits(parts, spec, config)
        model = parts.model
        model.config.num_inference_steps = config.denoise_steps
        width, hidden = model.config.max_action_dim, model.config.dit_config.hidden_size
        super().__init__(spec, config, (hidden, width), width, hidden + spec.state_dim)
        self.config, self.parts = config, parts
        self.model: nn.Module = parts.model
        self.state_width: int = model.config.max_state_dim
        text_width = model.config.vlm_config.text_config.hidden_size
        patch_size = model.config.vlm_config.vision_config.patch_size
        self.grounding = GroundingHeads(text_width, hidden, patch_size, config.cameras, spec.descriptions)
        self.named_normalizer = RunningNormalizer(POSITION_SIZE)
        tokens_IT, real_IT = checkpoint.tokenize(parts.tokenizer, spec.texts, config.max_tokens)
        self.register_buffer("tokens_IT", tokens_IT, persistent=False)
        self.register_buffer("real_IT", real_IT, persistent=False)
        for name, colours in zip(("pixel_mean", "pixel_std"), parts.pixels, strict=True):
            alike = colours[:1] if len(set(colours)) == 1 else colours  # one number for all colours is faster
            self.register_buffer(name, 255.0 * torch.tensor(alike)[:, None, None], persistent=False)
        vlm = model.model.vlm
        if "vision" in config.freeze:
            vlm.vision_tower.requires_grad_(False)
        if "language" in config.freeze:
            vlm.language_model.requires_grad_(False)
            vlm.multi_modal_projector.requires_grad_(False)
        if config.lora_rank:
            adapt(model.model.dit.layers, config.lora_rank)
        self.frozen = set(config.freeze) == set(PARTS)
        self.precompute_in_actor = self.frozen and config.prefix_from_actor
        self.prefix_dtype = getattr(torch, config.dtype)
        if self.frozen:
            vlm.to(self.prefix_dtype)
        if config.expert_dtype == "tfloat32":
            torch.backends.cuda.matmul.allow_tf32 = True

    # -- the network ---------------------------------------------------------------------------------------------------

    def prefix(self, obs: Obs) -> pi0.Prefix:
        """Return the prefix of N observations: the one in ``obs`` if it is there, otherwise computed from images."""
        if f"{PREFIX}key" in obs:
            return pi0.Prefix(*(obs[PREFIX + name] for name in pi0.Prefix._fields))
        real = self._instruction(obs)[1]
        waits = real.device.type != "cpu" or torch.compiler.is_exporting()  # for what is longest here
        longest = real.shape[1] if waits else int(real.sum(-1).max())
        return self._encode_prefix(obs, longest)[0]

    def _encode_prefix(self, obs: Obs, num_tokens: int) -> tuple[pi0.Prefix, pi0.ImageTokens]:
        """Compute the prefix of images and instructions; return it with the image tokens.

        num_tokens: length to which instructions are cut; the tokens beyond it must be padding. No gradient if vision
        and language are frozen. UserError if a camera is missing.
        """
        missing = [camera for camera in self.config.cameras if f"images.{camera}" not in obs]
        if missing:
            present = ", ".join(key.removeprefix("images.") for key in obs if key.startswith("images.")) or "none"
            needed, lacking = ", ".join(self.config.cameras), ", ".join(missing)
            raise UserError(f"the policy needs images of {needed}; the observation lacks {lacking}. It has: {present}")
        images = torch.stack([obs[f"images.{camera}"] for camera in self.config.cameras], 1)
        pixels = images.permute(0, 1, 4, 2, 3).float().sub_(self.pixel_mean).div_(self.pixel_std)
        tokens, real = (part[:, :num_tokens] for part in self._instruction(obs))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return pi0.encode_prefix(self.model, pixels.to(self.prefix_dtype), tokens, real)

    def _instruction(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Return the tokens of the instructions and the mask of those that are no padding, [N, L] each."""
        return self.tokens_IT[obs["instruction"]], self.real_IT[obs["instruction"]]

    def encode(self, obs: Obs) -> VLAContext:
        return self._encode_state(self.prefix(obs), obs)._replace(fixed=self.fixed_rows(obs))

    def _encode_state(self, prefix: pi0.Prefix, obs: Obs) -> VLAContext:
        """Run the state token of N observations on their prefix."""
        state = self.normalized_state(obs)
        padded = F.pad(state, (0, self.state_width - state.shape[-1]))
        with self._autocast():
            return VLAContext(pi0.encode_state(self.model, prefix, padded), state)

    def expand_steps(self, encoding: VLAContext) -> VLAContext:
        """Return ``encoding``: ``features`` takes it for any number of steps."""
        return encoding

    def encoded_value(self, encoding: VLAContext, obs: Obs) -> Tensor:
        features = torch.cat((encoding.context.feature.detach(), encoding.state), -1)
        return self.state_value(self.with_prefix(features, obs), obs)

    def features(self, encoding: VLAContext, x: Tensor, t: Tensor) -> Tensor:
        """Return the last hidden states of the action tokens, [..., H, hidden].

        x: [N, H, W] with one time t [], or [N, steps, H, W] with t that broadcasts with [N, steps]. Fixed rows have
        time 0.
        """
        if x.ndim == 3:
            return self.features(encoding, x.unsqueeze(1), t).squeeze(1)
        denoise = pi0.compiled_denoise() if self.config.compile else pi0.denoise
        time = t.expand(x.shape[:2]).unsqueeze(-1)
        if encoding.fixed is not None:
            time = torch.where(encoding.fixed.transpose(1, 2), 0.0, time)
        with self._autocast():
            return denoise(self.model, encoding.context, x, time)

    def _autocast(self) -> torch.autocast:
        """Return the context of the action expert's matrix products."""
        return torch.autocast(self.grid.device.type, torch.bfloat16, self.config.expert_dtype == "bfloat16")

    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        with torch.autocast(self.grid.device.type, enabled=False):  # the cast weights are kept until the end of this
            return super().act(obs, noise)

    def integrate_ode(self, obs: Obs, start: Tensor) -> Tensor:
        with torch.autocast(self.grid.device.type, enabled=False):  # as in ``act``
            return super().integrate_ode(obs, start)

    def to_velocity(self, features: Tensor) -> Tensor:
        """Return the velocity [..., W] for last hidden states [..., hidden]."""
        velocity: Tensor = self.model.get_submodule("action_out_proj")(features)
        return velocity

    def velocity(self, encoding: VLAContext, x: Tensor, k: int | slice | Tensor) -> Tensor:
        return self.to_velocity(self.features(encoding, x, self.grid[k]))

    def noisy_velocity(self, encoding: VLAContext, x: Tensor, k: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        assert self.noise_network is not None
        features = self.features(encoding, x, self.grid[k])
        return self.to_velocity(features), self.noise_network(features)

    def imitation_loss(self, obs: Obs, action_NHA: Tensor, valid_NH: Tensor, generator: torch.Generator) -> Tensor:
        """Return the flow-matching loss of demonstrated chunks, a scalar.

        It is the mean squared error of the velocity ``noise - action`` in valid rows. Actions are padded with zeros to
        the width of the network, and the padding counts as any dimension, as in π0: it is an input of every denoise
        step and must stay what the network was trained on. Each observation is encoded once and denoised from
        DRAWS_PER_OBSERVATION points, because most of the cost is in its images. With ``max_delay`` an action prefix of
        random length is given, and the loss is that of the other valid rows.
        """
        obs = draw_prefix(obs, action_NHA, valid_NH, self.max_delay, generator)
        encoding = self.encode(obs)
        action = F.pad(action_NHA, (0, self.width - action_NHA.shape[-1])).repeat_interleave(DRAWS_PER_OBSERVATION, 0)
        valid = valid_NH.repeat_interleave(DRAWS_PER_OBSERVATION, 0)
        fixed = None if encoding.fixed is None else encoding.fixed.repeat_interleave(DRAWS_PER_OBSERVATION, 0)
        noise, t = self.draw_path(action, generator)
        x = noisy_chunk(action, noise, t[:, None, None], valid, fixed)
        t = t.view(-1, DRAWS_PER_OBSERVATION)
        features = self.features(encoding, x.view(-1, DRAWS_PER_OBSERVATION, *x.shape[1:]), t)
        velocity = self.to_velocity(features).flatten(0, 1)
        return (velocity - (noise - action)).square()[learned_rows(valid, fixed)].mean()

    def fit_normalizer(self, obs: Obs) -> None:
        """Fit the statistics of ``state`` and ``target_positions`` to those in ``obs`` and freeze them.

        Statistics of ``target_positions`` are kept if there are any.
        """
        super().fit_normalizer(obs)
        if "target_positions" in obs and not bool(self.named_normalizer.fixed):
            self.named_normalizer.fit(obs["target_positions"])

    # -- grounding -----------------------------------------------------------------------------------------------------

    def grounding_loss(self, obs: Obs, with_positions: bool) -> Tensor:
        """Return the loss on labelled observations; see ``GroundingHeads``."""
        prefix, tokens = self._encode_prefix(obs, self.tokens_IT.shape[1])
        loss = self.grounding.image_loss(tokens, obs, with_centres=with_positions)
        if not with_positions:
            return loss
        return loss + POSITION_WEIGHT * self.location_loss(obs, prefix)

    @property
    def grounded(self) -> bool:
        return bool(self.named_normalizer.fixed)

    def location_loss(self, obs: Obs, prefix: pi0.Prefix | None = None) -> Tensor:
        """Return the loss of the predicted ``target_positions``, unweighted. prefix: that of ``obs``, if it is known.

        It is the smooth L1 error (Girshick 2015, equation 3) of standardised positions.
        """
        feature = self._encode_state(prefix or self.prefix(obs), obs).context.feature
        target_N9 = self.named_normalizer(obs["target_positions"])
        return F.smooth_l1_loss(self.grounding.named(feature), target_N9, beta=HUBER_BETA)

    def localization_hits(self, obs: Obs) -> dict[str, Tensor]:
        return self.grounding.localization_hits(self._encode_prefix(obs, self.tokens_IT.shape[1])[1], obs)

    def predict_positions(self, obs: Obs) -> Tensor:
        feature = self._encode_state(self.prefix(obs), obs).context.feature
        return self.named_normalizer.inverse(self.grounding.named(feature))

    # -- the frozen part -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def precompute(self, obs: Obs) -> Obs:
        """Replace images and instruction of observations [B, ...] by their prefix, on the policy's device.

        Do nothing unless vision and language are frozen, or if ``obs`` has the prefix already.
        """
        if not self.frozen or f"{PREFIX}key" in obs:
            return obs
        inputs = {key: value for key, value in obs.items() if key.startswith(("images.", "instruction"))}
        num, num_tokens = len(next(iter(inputs.values()))), self._instruction(obs)[0].shape[1]
        rest = {key: value for key, value in obs.items() if key not in inputs}
        whole: list[Tensor] = []  # filled in pieces: joined at the end, they would take twice the memory
        for first in range(0, num, PREFIX_ROWS):
            rows = {key: value[first : first + PREFIX_ROWS].to(self.tokens_IT.device) for key, value in inputs.items()}
            piece = self._encode_prefix(rows, num_tokens)[0]
            whole = whole or [part.new_empty(num, *part.shape[1:]) for part in piece]
            for all_rows, part in zip(whole, piece, strict=True):
                all_rows[first : first + PREFIX_ROWS] = part
        return rest | {PREFIX + name: part for name, part in zip(pi0.Prefix._fields, whole, strict=True)}

    def fits_cache(self, decisions: int) -> bool:
        """Return whether the prefixes of so many decisions take no more than ``prefix_cache_mb``."""
        return decisions * self._prefix_bytes(self.tokens_IT.shape[1]) <= self.config.prefix_cache_mb * 2**20

    def _prefix_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one decision's prefix: keys and values of every layer, and the mask of its tokens."""
        vlm = self.parts.model.config.vlm_config
        vision, text = vlm.vision_config, vlm.text_config
        tokens = len(self.config.cameras) * (vision.image_size // vision.patch_size) ** 2 + num_tokens
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        size: int = tokens * (numbers * self.prefix_dtype.itemsize + 1)
        return size

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save_architecture(self, path: Path) -> None:
        checkpoint.save_architecture(self.parts, path)

    def save_pretrained(self, path: Path) -> None:
        """Write a checkpoint without exploration and critic that ``PI0ForConditionalGeneration`` loads."""
        checkpoint.save_pretrained(self.parts, path)
