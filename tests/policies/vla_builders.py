"""A π0 of a few thousand random weights, and observations for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied.core.spec import CameraSpec, EnvSpec, Instruction
from embodied.core.types import Obs
from embodied.policies.config import VLAConfig
from embodied.policies.vla.checkpoint import tokenize
from embodied.policies.vla.policy import VLAPolicy

SIZE = 16
CAMERAS = (CameraSpec("front", SIZE, SIZE), CameraSpec("wrist", SIZE, SIZE))
TEXTS = ("pick up the red cube", "put the blue ball into the left tray, please", "lift it")
SPEC = EnvSpec.of_sizes(
    "words", state=5, privileged=3, action=2, max_episode_steps=40, cameras=CAMERAS,
    instructions=tuple(Instruction(text, goal=text) for text in TEXTS),
)  # fmt: skip
GEMMA = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "max_state_dim": 6,
    "max_action_dim": 3,
    "vlm_config": {
        "projection_dim": 16,
        "text_config": {"hidden_size": 16, **GEMMA},
        "vision_config": {
            "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
            "patch_size": 8, "vision_use_head": False,
        },
    },
    "dit_config": {"hidden_size": 20, **GEMMA},
}  # fmt: skip
FROZEN = ("vision", "language")


def config(**options: Any) -> VLAConfig:
    small: dict[str, Any] = {
        "image_size": SIZE, "horizon": 3, "execute": 3, "denoise_steps": 4, "critic_hidden": (16,), "model": MODEL,
    }  # fmt: skip
    return VLAConfig(**(small | options))


def build(seed: int = 0, spec: EnvSpec = SPEC, **options: Any) -> VLAPolicy:
    """Random weights that are large enough for everything to matter."""
    torch.manual_seed(seed)
    policy = VLAPolicy(spec, config(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if not name.startswith("critic."):
                weight.add_(0.15 * torch.randn(weight.shape, generator=generator).to(weight))
    return policy


def observe(num: int, seed: int = 1) -> Obs:
    generator = torch.Generator().manual_seed(seed)
    images = {
        f"images.{camera.name}": torch.randint(0, 256, (num, SIZE, SIZE, 3), generator=generator, dtype=torch.uint8)
        for camera in CAMERAS
    }
    return images | {
        "state": torch.randn(num, SPEC.state_dim, generator=generator),
        "privileged": torch.randn(num, SPEC.privileged_dim, generator=generator),
        "instruction": torch.arange(num) % len(TEXTS),
    }


def plain_inputs(policy: VLAPolicy, obs: Obs) -> dict[str, Tensor]:
    """What transformers' own model takes for these observations."""
    model, tokenizer = policy.parts.model, policy.parts.tokenizer
    num, cameras = len(obs["state"]), policy.config.cameras
    pixels = torch.stack([obs[f"images.{camera}"] for camera in cameras], 1).permute(0, 1, 4, 2, 3)
    patches = (policy.config.image_size // 8) ** 2 * len(cameras)
    image = torch.full((num, patches), model.config.vlm_config.image_token_id)
    words, real = (part[obs["instruction"]] for part in tokenize(tokenizer, TEXTS, 48))
    state = policy.normalized_state(obs)
    return {
        "state": torch.nn.functional.pad(state, (0, model.config.max_state_dim - state.shape[1])),
        "input_ids": torch.cat((image, words), 1),
        "attention_mask": torch.cat((torch.ones_like(image), real.long()), 1),
        "pixel_values": pixels.float() / 127.5 - 1.0,
        "pixel_attention_mask": torch.ones(num, len(cameras), dtype=torch.bool),
    }


def plain_sample(policy: VLAPolicy, obs: Obs, start: Tensor) -> Tensor:
    """What transformers' own ``sample_actions`` gives from the noise ``start``."""
    inputs = plain_inputs(policy, obs)
    return policy.parts.model.sample_actions(**inputs, noise=start, num_steps=policy.denoise_steps)


def plain_loss(policy: VLAPolicy, obs: Obs, actions: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """What transformers' own ``forward`` gives as the loss of padded actions, noise [N, H, W] and times [N]."""
    return policy.parts.model(**plain_inputs(policy, obs), actions=actions, noise=noise, timestep=t).loss
