"""The forward passes of π0 (``PI0ForConditionalGeneration`` of transformers), arranged for reinforcement learning.

    images, words ─► vision tower, language model ─► keys and values of every layer: Prefix   once per decision
    state         ─► one token of the action expert ─► its keys and values: Context           once per decision
    x_t, t        ─► action tokens of the expert, which attend to the Context ─► velocity     K times per decision

The modules, weights and results are those of transformers; a test compares them with ``sample_actions``. Four things
differ, to save time. The language model's last layer computes only keys and values. The state token, which does not
depend on x_t, runs once. Acting copies the prefix once and not for each step. The expert takes any number of denoise
steps of a decision in one pass.

Suffixes: N decisions, C cameras, P prefix tokens, S denoise steps, H action tokens of a step, J action tokens of all
steps, L layers, G key-value heads, D size of a head, Q queries of a key-value head, T tokens that they attend to.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_UNFUSED_TOKENS = 128  # for at most so many keys, fused attention is slower on a CPU than plain matrix products
MAX_UNFUSED_QUERIES = 1024  # and on a GPU for at most so many queries, which occupy a few of its processors


class Prefix(NamedTuple):
    """Output of vision and language for the action expert to attend to."""

    key: Tensor
    value: Tensor
    """Keys and values of the tokens of images and words in every layer, [N, L, G, P, D]."""
    real: Tensor
    """Whether a token is no padding, bool [N, P]."""


class ImageTokens(NamedTuple):
    """Hidden states of the image tokens, [N, C * patches, hidden] each."""

    visual: Tensor
    """Input of the language model."""
    contextual: Tensor
    """Input of its last layer; has attended to the instruction if the model has two or more layers."""


def encode_prefix(
    model: nn.Module, pixels_NC3hw: Tensor, tokens_NT: Tensor, real_NT: Tensor
) -> tuple[Prefix, ImageTokens]:
    """Return the prefix of images and words, and the image tokens.

    pixels: normalised as the vision tower expects them. real: whether a token is no padding, bool.
    """
    vlm: Any = model.get_submodule("model.vlm")
    language = vlm.language_model
    image: Tensor = vlm.get_image_features(pixels_NC3hw.flatten(0, 1)).pooler_output
    image = image.reshape(tokens_NT.shape[0], -1, image.shape[-1])
    words: Tensor = language.embed_tokens(tokens_NT)
    x = torch.cat((image.to(words.dtype), words), 1)
    real_NP = torch.cat((real_NT.new_ones(image.shape[:2]), real_NT), 1)
    rotation = _rotation(language, x, real_NP.cumsum(-1) - 1)
    bias = _padding_bias(real_NP, x.dtype)
    keys, values = [], []
    for index, layer in enumerate(language.layers):
        normed = _rms_norm(layer.input_layernorm, x, norm_scales([layer.input_layernorm])[0])
        key, value = _keys_values(layer.self_attn, normed, rotation)
        keys.append(key)
        values.append(value)
        if index + 1 < len(language.layers):
            x = _layer(layer, x, normed, rotation, key, value, bias, *norm_scales([layer.post_attention_layernorm]))
    return Prefix(torch.stack(keys, 1), torch.stack(values, 1), real_NP), ImageTokens(image, x[:, : image.shape[1]])


def norm_scales(norms: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return the factors of norms, 1 + weight in float32, by two kernels: one for each would be felt on a GPU."""
    return (1.0 + torch.stack([norm.weight for norm in norms]).float()).unbind()


class Context(NamedTuple):
    """Prefix and state token, which action tokens attend to."""

    memory: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values of the prefix, then of the state token, for each layer, [N, G, P + 1, D].

    Without a gradient [N, G, P + 1 + H, D]: every denoise step overwrites the last H by those of its action tokens, so
    that nothing else is copied."""
    bias: Tensor
    """Additive mask of these tokens, [N, 1, 1, P + 1]."""
    position: Tensor
    """Position of the first action token, int64 [N]."""
    feature: Tensor
    """Last hidden state of the state token, [N, hidden]."""
    scales: tuple[tuple[Tensor, ...], ...]
    """``norm_scales`` of the action expert: of both norms of every layer, and of the last norm."""


def encode_state(model: nn.Module, prefix: Prefix, state_NM: Tensor) -> Context:
    """Run the state token, which attends to the prefix and itself. state: padded to the model's ``max_state_dim``."""
    expert: Any = model.get_submodule("model.dit")
    embed: Any = model.get_submodule("embed_action_time")
    config: Any = model.config
    x: Tensor = embed.state_proj(state_NM).unsqueeze(1).to(state_NM.dtype)
    dtype = _compute_dtype(x)
    position_N = prefix.real.sum(-1)
    rotation = _rotation(expert, x, position_N[:, None])
    bias = F.pad(_padding_bias(prefix.real, dtype), (0, 1))
    layers = expert.layers
    scales = first, second, (last,) = (
        norm_scales(layer.input_layernorm for layer in layers),
        norm_scales(layer.post_attention_layernorm for layer in layers),
        norm_scales([expert.norm]),
    )
    used, spare = bias.shape[-1], 0 if torch.is_grad_enabled() else config.chunk_size
    plain = spare > 0 and not _fuses(x, config.dit_config.num_attention_heads * spare, used + spare, dtype)
    kept = torch.float32 if plain else dtype  # as ``_attention`` needs them
    memory = []
    for index, layer in enumerate(layers):
        normed = _rms_norm(layer.input_layernorm, x, first[index], dtype)
        parts = zip((prefix.key, prefix.value), _keys_values(layer.self_attn, normed, rotation), strict=True)
        key, value = (  # any content of the spare rows will do
            torch.cat((shared[:, index].to(kept), own.to(kept), own.to(kept).expand(-1, -1, spare, -1)), 2)
            for shared, own in parts
        )
        memory.append((key, value))
        x = _layer(layer, x, normed, rotation, key[:, :, :used], value[:, :, :used], bias, second[index])
    return Context(tuple(memory), bias, position_N + 1, _rms_norm(expert.norm, x, last).squeeze(1), scales)


def denoise(model: nn.Module, context: Context, x_NSHW: Tensor, time_NSR: Tensor) -> Tensor:
    """Return the last hidden states [N, S, H, hidden] of the action tokens, for S denoise steps of N decisions.

    time: flow times of the steps, R = 1, or of each action token, R = H. ``action_out_proj`` of the model maps the
    hidden states to the velocity.
    """
    expert: Any = model.get_submodule("model.dit")
    embed: Any = model.get_submodule("embed_action_time")
    num, steps, horizon, _ = x_NSHW.shape
    frequency = embed.sinusoid_embeds.sinusoid_freq
    angle = (time_NSR.float().unsqueeze(-1) * frequency).to(x_NSHW.dtype)
    action = embed.action_in_proj(x_NSHW)
    first = embed.action_time_mlp_in  # reads action and time; tokens with the same time share its part
    time = F.linear(torch.cat((angle.sin(), angle.cos()), -1), first.weight[:, action.shape[-1] :], first.bias)
    x = F.linear(action, first.weight[:, : action.shape[-1]]) + time
    x = embed.action_time_mlp_out(F.silu(x)).flatten(1, 2).to(x_NSHW.dtype)
    dtype = _compute_dtype(x)
    position_NJ = context.position[:, None] + torch.arange(horizon, device=x.device).repeat(steps)
    rotation = _rotation(expert, x, position_NJ)
    bias = _add_step_bias(context.bias, steps, horizon, expert.layers[0].self_attn.num_key_value_groups)
    first, second, (last,) = context.scales
    for index, (layer, memory) in enumerate(zip(expert.layers, context.memory, strict=True)):
        normed = _rms_norm(layer.input_layernorm, x, first[index], dtype)
        parts = zip(memory, _keys_values(layer.self_attn, normed, rotation), strict=True)
        key, value = (_append(past, own, context.bias.shape[-1]) for past, own in parts)
        x = _layer(layer, x, normed, rotation, key, value, bias, second[index])
    return _rms_norm(expert.norm, x, last).view(num, steps, horizon, -1)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type of matrix products of x: that of ``torch.autocast``, in which the residual x stays wide."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


@cache
def compiled_denoise() -> Callable[..., Tensor]:
    return torch.compile(denoise)


def _append(past: Tensor, own: Tensor, used: int) -> Tensor:
    """Append ``own`` [N, G, J, D] to the first ``used`` rows of ``past`` [N, G, used + spare, D].

    In place if no gradient is needed and ``past`` has J spare rows; otherwise in a copy.
    """
    if torch.is_grad_enabled() or past.shape[2] != used + own.shape[2]:
        return torch.cat((past[:, :, :used], own), 2)
    past[:, :, used:] = own
    return past


def _add_step_bias(bias: Tensor, steps: int, horizon: int, heads: int) -> Tensor:
    """Extend ``bias`` [N, 1, 1, P + 1] by the action tokens, each of which attends to those of its own step.

    Returns [N, 1, 1, P + 1 + H] for one step, otherwise [N, 1, S * H * heads, P + 1 + S * H].
    """
    if steps == 1:
        return F.pad(bias, (0, horizon))
    step = torch.arange(steps, device=bias.device).repeat_interleave(horizon)
    own = _padding_bias(step.repeat_interleave(heads)[:, None] == step, bias.dtype)[:, 0, 0]
    return torch.cat((bias.expand(-1, -1, len(own), -1), own.expand(bias.shape[0], 1, -1, -1)), -1)


def _keys_values(attention: Any, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return keys and values of tokens x [N, P, hidden], [N, G, P, D] each."""
    key, value = (
        projection(x).view(*x.shape[:2], -1, attention.head_dim) for projection in (attention.k_proj, attention.v_proj)
    )
    rotated = _rotate(key, (rotation[0].unsqueeze(2), rotation[1].unsqueeze(2)))
    return rotated.to(value.dtype).transpose(1, 2), value.transpose(1, 2)


def _layer(
    layer: Any,
    x: Tensor,
    normed: Tensor,
    rotation: tuple[Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scale: Tensor,
) -> Tensor:
    """Run a layer on tokens x [N, P, hidden] that attend to keys and values.

    normed: x after the first norm. scale: factor of the second norm.

    Queries are [N, G, P * g, D] for g query heads per key-value head; the g queries of a token are neighbours. With one
    key-value head, as in π0, nothing is copied. Without a gradient the gated product is computed in place.
    """
    attention, mlp = layer.self_attn, layer.mlp
    heads = (*x.shape[:2], -1, attention.num_key_value_groups, attention.head_dim)
    query = attention.q_proj(normed).view(*x.shape[:2], -1, attention.head_dim)
    query = _rotate(query, (rotation[0].unsqueeze(2), rotation[1].unsqueeze(2))).to(query.dtype)
    out = _attention(attention, query.view(heads).permute(0, 2, 1, 3, 4).flatten(2, 3), key, value, bias)
    out = out.view(*out.shape[:2], x.shape[1], attention.num_key_value_groups, -1).permute(0, 2, 1, 3, 4).flatten(2)
    x = x + attention.o_proj(out)
    normed = _rms_norm(layer.post_attention_layernorm, x, scale, normed.dtype)
    gate, up = mlp.act_fn(mlp.gate_proj(normed)), mlp.up_proj(normed)
    residual: Tensor = mlp.down_proj(gate * up if torch.is_grad_enabled() else gate.mul_(up))
    return x + residual


def _attention(attention: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Return the attention of queries [N, G, Q, D] to keys and values [N, G, T, D], [N, G, Q, D].

    bias: additive mask that broadcasts to [N, 1, Q, T].
    """
    if _fuses(query, query.shape[1] * query.shape[2], key.shape[2], query.dtype):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=attention.scaling)
    bias = bias.expand(-1, query.shape[1], query.shape[2], -1)
    with torch.autocast(query.device.type, enabled=False):  # scores in bfloat16 would depend on the number of rows
        bias, wide, keys, values = (x.flatten(0, 1).float() for x in (bias, query, key, value))
        scores = torch.baddbmm(bias, wide, keys.transpose(1, 2), alpha=attention.scaling)
        return torch.bmm(scores.softmax(-1), values).to(query.dtype).view(query.shape)


def _fuses(x: Tensor, queries: int, keys: int, dtype: torch.dtype) -> bool:
    """Return whether fused attention of so many queries and keys per row of x is faster than plain matrix products.

    It never is on a GPU in float32: fused attention knows no tensor cores there.
    """
    if x.is_cuda:
        return dtype != torch.float32 and x.shape[0] * queries > MAX_UNFUSED_QUERIES
    return keys > MAX_UNFUSED_TOKENS


def _rms_norm(norm: Any, x: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Apply GemmaRMSNorm: computed in float32, scaled by ``scale`` [hidden], in ``dtype`` (None: that of x).

    F.rms_norm is one kernel on a GPU, but takes 1.5 times as long on a CPU.
    """
    wide = x.float()
    if x.is_cuda:
        return F.rms_norm(wide, x.shape[-1:], scale, norm.eps).to(dtype or x.dtype)
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
    normed = wide * torch.rsqrt(mean_square + norm.eps)
    return (normed * scale if torch.is_grad_enabled() else normed.mul_(scale)).to(dtype or x.dtype)


def _rotation(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [..., P, D] of the rotary position embedding (Su et al. 2021).

    The first half of the sines is negated, because ``_rotate`` multiplies them by the partner of each coordinate, the
    one D / 2 further.
    """
    cos, sin = module.rotary_emb(x, position_ids=position_ids)
    sign = torch.ones(sin.shape[-1], dtype=sin.dtype, device=sin.device)
    sign[: len(sign) // 2] = -1
    return cos, sin * sign


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [..., D] by the cosines and sines of ``_rotation``."""
    turned: Tensor = torch.addcmul(x * rotation[0], x.roll(x.shape[-1] // 2, -1), rotation[1])
    return turned


def _padding_bias(real_NP: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [N, 1, 1, P] that excludes padding from attention."""
    return torch.where(real_NP, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]
