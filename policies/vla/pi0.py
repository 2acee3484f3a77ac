"""The forward passes of π0 (``PI0ForConditionalGeneration`` of transformers), arranged for reinforcement learning.

    images, words ─► vision tower, language model ─► keys and values of every layer          once a decision: Prefix
    state         ─► one token of the action expert ─► its keys and values beside them        once a decision
    x_t, t        ─► action tokens of the expert, which attend to all of that ─► velocity     K times a decision

The modules and their weights are those of transformers, and so are the numbers (a test compares them with
``sample_actions``). What differs: nothing is computed that nobody reads (the language model's last layer is needed for
its keys and values alone, the state token does not depend on x_t), acting copies the prefix once and not for each step,
and any number of denoise steps of the same decision go through the expert in one pass.

Suffixes: N decisions, C cameras, P prefix tokens, S denoise steps, H action tokens of a step, J of all steps, L layers,
G key-value heads, D size of a head, Q queries of a key-value head, T tokens that they attend to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHORT = 128  # tokens attended to; up to so many all scores at once are faster on a CPU than fused attention


class Prefix(NamedTuple):
    """What the action expert attends to: keys and values [N, L, G, P, D], and which tokens are real, bool [N, P]."""

    key: Tensor
    value: Tensor
    real: Tensor


class ImageTokens(NamedTuple):
    """Hidden states of the image tokens, [N, C * patches, hidden] each: as the language model gets them, and as its
    last layer does, which have read the instruction where there are two layers or more."""

    seen: Tensor
    read: Tensor


def encode_prefix(
    model: nn.Module, pixels_NC3hw: Tensor, tokens_NT: Tensor, real_NT: Tensor
) -> tuple[Prefix, ImageTokens]:
    """Keys and values of images and words, and the image tokens on the way to them. pixels: normalised as the vision
    tower expects them; real: bool."""
    vlm: Any = model.get_submodule("model.vlm")
    language = vlm.language_model
    image: Tensor = vlm.get_image_features(pixels_NC3hw.flatten(0, 1)).pooler_output
    image = image.reshape(len(tokens_NT), -1, image.shape[-1])
    words: Tensor = language.embed_tokens(tokens_NT)
    x = torch.cat((image.to(words.dtype), words), 1)
    real_NP = torch.cat((real_NT.new_ones(image.shape[:2]), real_NT), 1)
    rotation = _rotation(language, x, real_NP.cumsum(-1) - 1)
    bias = _bias(real_NP, x.dtype)
    keys, values = [], []
    for index, layer in enumerate(language.layers):
        normed = _rms(layer.input_layernorm, x)
        key, value = _keys_values(layer.self_attn, normed, rotation)
        keys.append(key)
        values.append(value)
        if index + 1 < len(language.layers):
            x = _through(layer, x, normed, rotation, key, value, bias)
    return Prefix(torch.stack(keys, 1), torch.stack(values, 1), real_NP), ImageTokens(image, x[:, : image.shape[1]])


class Context(NamedTuple):
    """What action tokens attend to. memory: keys and values of the prefix and, behind it, of the state token, of each
    layer, [N, G, P + 1, D] where a gradient is asked for, otherwise [N, G, P + 1 + H, D]: each denoise step writes what
    its action tokens have into the same place, and nothing else is copied. bias: their additive mask, [N, 1, 1, P + 1].
    position: of the first action token, [N]. feature: the state token's last hidden state, [N, hidden]."""

    memory: tuple[tuple[Tensor, Tensor], ...]
    bias: Tensor
    position: Tensor
    feature: Tensor


def encode_state(model: nn.Module, prefix: Prefix, state_NM: Tensor) -> Context:
    """The state token, which sees the prefix and itself. state: padded to the model's ``max_state_dim``."""
    expert: Any = model.get_submodule("model.dit")
    embed: Any = model.get_submodule("embed_action_time")
    config: Any = model.config
    x: Tensor = embed.state_proj(state_NM).unsqueeze(1)
    position_N = prefix.real.sum(-1)
    rotation = _rotation(expert, x, position_N[:, None])
    bias = F.pad(_bias(prefix.real, x.dtype), (0, 1))
    used, room = bias.shape[-1], 0 if torch.is_grad_enabled() else config.chunk_size
    memory = []
    for index, layer in enumerate(expert.layers):
        normed = _rms(layer.input_layernorm, x)
        parts = zip((prefix.key, prefix.value), _keys_values(layer.self_attn, normed, rotation), strict=True)
        key, value = (  # what stands in the room does not matter
            torch.cat((shared[:, index].to(x.dtype), own, own.expand(-1, -1, room, -1)), 2) for shared, own in parts
        )
        memory.append((key, value))
        x = _through(layer, x, normed, rotation, key[:, :, :used], value[:, :, :used], bias)
    return Context(tuple(memory), bias, position_N + 1, _rms(expert.norm, x).squeeze(1))


def denoise(model: nn.Module, context: Context, x_NSHW: Tensor, time_NS: Tensor) -> Tensor:
    """Last hidden states [N, S, H, hidden] of the expert's action tokens, for S denoise steps at flow times ``time``
    (broadcast to [N, S]) of each of N decisions. ``action_out_proj`` of them is the velocity."""
    expert: Any = model.get_submodule("model.dit")
    embed: Any = model.get_submodule("embed_action_time")
    num, steps, horizon, _ = x_NSHW.shape
    frequency = embed.sinusoid_embeds.sinusoid_freq
    angle = (time_NS.float().unsqueeze(-1) * frequency).to(x_NSHW.dtype)
    action = embed.action_in_proj(x_NSHW)
    first = embed.action_time_mlp_in  # of both, one beside the other; all actions of a step have the same time
    time = F.linear(torch.cat((angle.sin(), angle.cos()), -1), first.weight[:, action.shape[-1] :], first.bias)
    x = F.linear(action, first.weight[:, : action.shape[-1]]) + time.expand(num, steps, -1).unsqueeze(2)
    x = embed.action_time_mlp_out(F.silu(x)).flatten(1, 2)
    position_NJ = context.position[:, None] + torch.arange(horizon, device=x.device).repeat(steps)
    rotation = _rotation(expert, x, position_NJ)
    bias = _steps_bias(context.bias, steps, horizon, expert.layers[0].self_attn.num_key_value_groups)
    for layer, memory in zip(expert.layers, context.memory, strict=True):
        normed = _rms(layer.input_layernorm, x)
        parts = zip(memory, _keys_values(layer.self_attn, normed, rotation), strict=True)
        key, value = (_joined(past, own, context.bias.shape[-1]) for past, own in parts)
        x = _through(layer, x, normed, rotation, key, value, bias)
    return _rms(expert.norm, x).view(num, steps, horizon, -1)


def _joined(past: Tensor, own: Tensor, used: int) -> Tensor:
    """``own`` [N, G, J, D] behind the first ``used`` of ``past`` [N, G, used + room, D]: in its room if that is what it
    is for, otherwise in a copy."""
    if torch.is_grad_enabled() or past.shape[2] != used + own.shape[2]:
        return torch.cat((past[:, :, :used], own), 2)
    past[:, :, used:] = own
    return past


def _steps_bias(bias: Tensor, steps: int, horizon: int, heads: int) -> Tensor:
    """``bias`` [N, 1, 1, P + 1] with the action tokens of all steps behind it, where each sees those of its own step:
    [N, 1, 1, P + 1 + H] of one step, else [N, 1, S * H * heads, P + 1 + S * H]."""
    if steps == 1:
        return F.pad(bias, (0, horizon))
    step = torch.arange(steps, device=bias.device).repeat_interleave(horizon)
    own = _bias(step.repeat_interleave(heads)[:, None] == step, bias.dtype)[:, 0, 0]
    return torch.cat((bias.expand(-1, -1, len(own), -1), own.expand(len(bias), 1, -1, -1)), -1)


def _keys_values(attention: Any, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of tokens x [N, P, hidden], [N, G, P, D] each."""
    key, value = (
        projection(x).view(*x.shape[:2], -1, attention.head_dim) for projection in (attention.k_proj, attention.v_proj)
    )
    return _rotate(key, (rotation[0].unsqueeze(2), rotation[1].unsqueeze(2))).transpose(1, 2), value.transpose(1, 2)


def _queries(attention: Any, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Of tokens x [N, P, hidden], of each the heads that share a key-value head one after the other, [N, G, Pg, D]; for
    a single such head, as π0 has it, nothing is copied."""
    num, tokens = x.shape[:2]
    query = attention.q_proj(x).view(num, tokens, -1, attention.head_dim)
    query = _rotate(query, (rotation[0].unsqueeze(2), rotation[1].unsqueeze(2)))
    query = query.view(num, tokens, -1, attention.num_key_value_groups, attention.head_dim)
    return query.permute(0, 2, 1, 3, 4).flatten(2, 3)


def _through(
    layer: Any, x: Tensor, normed: Tensor, rotation: tuple[Tensor, Tensor], key: Tensor, value: Tensor, bias: Tensor
) -> Tensor:
    """What a layer makes of tokens x [N, P, hidden] that attend to keys and values; normed: x as attention reads it."""
    attention = layer.self_attn
    out = _attend(attention, _queries(attention, normed, rotation), key, value, bias)
    out = out.view(*out.shape[:2], x.shape[1], attention.num_key_value_groups, -1).permute(0, 2, 1, 3, 4).flatten(2)
    return _feed_forward(layer, x + attention.o_proj(out))


def _attend(attention: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Queries [N, G, Q, D] on keys and values [N, G, T, D] with an additive mask that broadcasts to [N, 1, Q, T]."""
    if key.shape[2] > SHORT:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=attention.scaling)
    bias = bias.expand(-1, query.shape[1], query.shape[2], -1).flatten(0, 1)
    scores = torch.baddbmm(bias, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=attention.scaling)
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view(query.shape)


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    """The gated network of a layer, on top of x. Where no gradient is asked for, the product is made in place."""
    mlp, normed = layer.mlp, _rms(layer.post_attention_layernorm, x)
    gate, up = mlp.act_fn(mlp.gate_proj(normed)), mlp.up_proj(normed)
    residual: Tensor = mlp.down_proj(gate * up if torch.is_grad_enabled() else gate.mul_(up))
    return x + residual


def _rms(norm: Any, x: Tensor) -> Tensor:
    """GemmaRMSNorm: computed in float32, its weight is around 1. F.rms_norm takes half as long again on a CPU."""
    wide = x.float()
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
    normed = wide * torch.rsqrt(mean_square + norm.eps)
    weight = 1.0 + norm.weight.float()
    return (normed * weight if torch.is_grad_enabled() else normed.mul_(weight)).to(x.dtype)


def _rotation(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., P, D] of rotary position embedding (Su et al. 2021), the first half of the sines with
    its sign turned: what a coordinate takes from its partner, D / 2 further."""
    cos, sin = module.rotary_emb(x, position_ids=position_ids)
    sign = torch.ones(sin.shape[-1], dtype=sin.dtype, device=sin.device)
    sign[: len(sign) // 2] = -1
    return cos, sin * sign


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    turned: Tensor = torch.addcmul(x * rotation[0], x.roll(x.shape[-1] // 2, -1), rotation[1])
    return turned


def _bias(real_NP: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [N, 1, 1, P] that keeps padding from being attended to."""
    return torch.where(real_NP, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]
