"""The vision-language-action policy: the numbers of transformers, the promises of a flow policy."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec, EnvSpec, Instruction, Term
from embodied.core.types import Obs, Role
from embodied.policies.vla.checkpoint import tokenize, train_tokenizer
from embodied.policies.vla.grounding import centres
from embodied.policies.vla.policy import DRAWS_PER_OBSERVATION, VLAPolicy
from tests.algos.fragments import rollout
from tests.policies.vla_builders import FROZEN, MODEL, SPEC, TEXTS, build, observe, plain_loss, plain_sample

NUM = 12
EXPLORATIONS: dict[str, dict[str, Any]] = {
    "flow_noise": {},
    "flow_sde": {"exploration": "flow_sde"},
    "one step": {"exploration": "flow_sde", "stochastic_steps": "one"},
    "last step": {"exploration": "flow_sde", "stochastic_steps": "last"},
    "last step, learned noise": {"stochastic_steps": "last"},
    "part of the chunk": {"execute": 2},
    "checkpointed": {"checkpoint_steps": True},
    "lora": {"lora_rank": 2},
}


def draw(policy: VLAPolicy, obs: Obs, seed: int = 0) -> Any:
    num = len(obs["instruction"])
    return policy.act(obs, torch.randn(num, *policy.noise_shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("short", [0, 128], ids=["long prefix", "short prefix"])
def test_the_ode_is_that_of_transformers(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way attention is computed."""
    monkeypatch.setattr("embodied.policies.vla.pi0.MAX_UNFUSED_TOKENS", short)
    policy, obs = build(), observe(NUM)
    policy.update_normalizer(obs)
    start = torch.randn(NUM, 3, policy.width, generator=torch.Generator().manual_seed(3))
    expected = plain_sample(policy, obs, start)
    assert expected.std() > 0.3
    torch.testing.assert_close(policy.integrate_ode(obs, start)[:, -1], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.plan(obs), plain_sample(policy, obs, 0 * start)[..., :2], atol=1e-5, rtol=1e-5)


def test_image_words_and_state_all_matter() -> None:
    policy, obs = build(), observe(NUM)
    before = policy.plan(obs)
    for key in ("images.front", "images.wrist", "instruction", "state"):
        changed = obs | {key: obs[key].roll(1, 0)}
        assert (policy.plan(changed) - before).abs().amax((1, 2)).min() > 1e-4, key
    changed = obs | {"privileged": obs["privileged"].roll(1, 0)}
    assert torch.equal(policy.plan(changed), before)
    assert not torch.allclose(policy.value(changed), policy.value(obs))


@pytest.mark.parametrize("name", list(EXPLORATIONS))
def test_evaluate_repeats_the_sampler(name: str) -> None:
    policy, obs = build(**EXPLORATIONS[name]), observe(NUM)
    policy.update_normalizer(obs)
    sample = draw(policy, obs)
    assert sample.action_NHA.shape == (NUM, 3, 2)
    assert sample.chain.shape[2:] == (3, policy.width)
    evaluation = policy.evaluate(obs, sample.chain)
    torch.testing.assert_close(evaluation.log_prob_B, sample.log_prob_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.value_B, sample.value_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.value_B, policy.value(obs), atol=1e-5, rtol=1e-5)
    rows = torch.tensor([5, 2, 9])
    few = policy.evaluate({key: value[rows] for key, value in obs.items()}, sample.chain[rows])
    torch.testing.assert_close(few.log_prob_B, sample.log_prob_N[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("short", [0, 128], ids=["long prefix", "short prefix"])
def test_steps_side_by_side_do_not_see_each_other(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied.policies.vla.pi0.MAX_UNFUSED_TOKENS", short)
    policy, obs = build(), observe(NUM)
    x = torch.randn(NUM, 4, 3, policy.width, generator=torch.Generator().manual_seed(1))
    side_by_side = policy.velocity(policy.encode(obs), x, slice(None))
    with torch.no_grad():  # where each step writes its keys and values into the same place
        code = policy.encode(obs)
        alone = torch.stack([policy.velocity(code, x[:, k], k) for k in (3, 1, 0, 2)], 1)[:, [2, 1, 3, 0]]
    torch.testing.assert_close(side_by_side, alone, atol=1e-5, rtol=1e-5)


def test_compilation_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"policy\.compile=true needs a C\+\+ compiler"):
        build(compile=True)


@pytest.mark.slow(reason="compiles C++")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: install g++")
def test_compiled_denoise_steps_give_the_same() -> None:
    obs = observe(NUM)
    plain, compiled = build(), build(compile=True)
    compiled.load_state_dict(plain.state_dict())
    samples = [draw(policy, obs) for policy in (plain, compiled)]
    torch.testing.assert_close(samples[1].action_NHA, samples[0].action_NHA, atol=1e-4, rtol=1e-4)
    gradients = []
    for policy in (plain, compiled):
        policy.evaluate(obs, samples[0].chain).log_prob_B.mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-3, rtol=1e-3)


def test_padding_of_actions_never_counts() -> None:
    policy, obs = build(exploration="flow_sde"), observe(NUM)
    sample = draw(policy, obs)
    chain = sample.chain.clone()
    chain[:, -1, :, 2:] += 1.0  # nothing follows the last state
    before, after = (policy.evaluate(obs, part).log_prob_B for part in (sample.chain, chain))
    assert torch.equal(before, after)
    chain[:, -1, :, :2] += 1.0
    assert not torch.allclose(policy.evaluate(obs, chain).log_prob_B, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_prefix_is_computed_once(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, obs = build(freeze=FROZEN, dtype=dtype), observe(NUM)
    policy.update_normalizer(obs)
    sample = draw(policy, obs)
    cached = policy.precompute(obs)
    assert not [key for key in cached if key.startswith("images.") or key == "instruction"]
    size = sum(value.nbytes for key, value in cached.items() if key.startswith("prefix."))
    assert size == NUM * policy._prefix_bytes(policy.tokens_IT.shape[1]), "what the limit is compared with"
    monkeypatch.setattr(policy.model.get_submodule("model.vlm"), "get_image_features", None)
    evaluation = policy.evaluate(cached, sample.chain)
    torch.testing.assert_close(evaluation.log_prob_B, sample.log_prob_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.value(cached), sample.value_N, atol=1e-5, rtol=1e-5)
    assert policy.precompute(cached) is cached
    monkeypatch.undo()
    assert build(freeze=("vision",)).precompute(obs) is obs, "language still learns"
    assert not build(freeze=FROZEN, prefix_cache_mb=0).fits_cache(1)
    limited, most = build(freeze=FROZEN, dtype=dtype, prefix_cache_mb=1), 2**20 * NUM // size
    assert (limited.fits_cache(most), limited.fits_cache(most + 1)) == (True, False)


def test_what_is_frozen_gets_no_gradient() -> None:
    obs = observe(NUM)
    for freeze, learns in (((), True), (("vision",), True), (FROZEN, False)):
        policy = build(freeze=freeze)
        policy.evaluate(obs, draw(policy, obs).chain).log_prob_B.sum().backward()
        vlm: Any = policy.model.get_submodule("model.vlm")
        vision = [p.grad is not None for p in vlm.vision_tower.parameters()]
        assert any(vision) == (not freeze)
        assert (vlm.language_model.layers[0].self_attn.q_proj.weight.grad is not None) == learns
        assert policy.model.get_submodule("action_out_proj").weight.grad is not None


def test_lora_starts_as_the_identity_and_learns() -> None:
    plain, adapted, obs = build(), build(lora_rank=2), observe(NUM)
    weights = plain.state_dict()
    own = adapted.state_dict()
    extra = {key for key in own if key.endswith(adapted.optional_suffixes)}
    assert len(extra) == 2 * 4 * 2
    adapted.load_state_dict(weights | {key: 0 * own[key] if key.endswith("lora_b") else own[key] for key in extra})
    torch.testing.assert_close(adapted.plan(obs), plain.plan(obs), atol=1e-6, rtol=0)
    chain = draw(adapted, obs).chain
    adapted.evaluate(obs, chain).log_prob_B.sum().backward()
    layer: Any = adapted.model.get_submodule("model.dit.layers.0.self_attn.q_proj")
    assert layer.weight.grad is None
    assert layer.lora_b.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "options",
    [{}, {"freeze": FROZEN}, *({"exploration": "flow_sde", "stochastic_steps": name} for name in ("one", "last"))],
)
def test_two_updates_and_a_first_ratio_of_one(options: dict[str, Any]) -> None:
    policy = build(**options)
    ppo = PPO(policy, PPOConfig(epochs=2, num_minibatches=2), seed=0, device=torch.device("cpu"))
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    for version in range(2):
        metrics = ppo.update(
            [rollout(policy, seed=version, version=version, T=2, N=6, rows=observe(NUM, version))], version
        )
        assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
    moved = {key for key, value in policy.state_dict().items() if not torch.equal(value, before[key])}
    assert any("model.dit" in key for key in moved)
    assert any("vision_tower" in key for key in moved) == ("freeze" not in options)


def spec(**changes: Any) -> EnvSpec:
    return replace(SPEC, **changes)


def sized(text_config: dict[str, int] | None = None, **changes: int) -> dict[str, Any]:
    """MODEL with other sizes of its vision-language model."""
    vlm = MODEL["vlm_config"]
    return MODEL | {"vlm_config": vlm | {"text_config": vlm["text_config"] | (text_config or {})} | changes}


def kinds(vlm: str = "paligemma", text: str = "gemma", dit: str = "gemma") -> dict[str, Any]:
    """MODEL with networks of other kinds."""
    words = MODEL["vlm_config"]["text_config"] | {"model_type": text}
    vision_language = MODEL["vlm_config"] | {"model_type": vlm, "text_config": words}
    return MODEL | {"vlm_config": vision_language, "dit_config": MODEL["dit_config"] | {"model_type": dit}}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"cameras": ()}, {}, "built without cameras"),
        ({"cameras": (CameraSpec("front", 16, 16),)}, {}, "needs 'wrist' at 16x16; this environment has: front 16x16"),
        ({"cameras": (CameraSpec("front", 32, 32),)}, {"cameras": ("front",)}, "has: front 32x32"),
        ({"state": (Term("state", 7),)}, {}, "state of task words has 7 entries, the model takes 6"),
        ({"instructions": tuple(Instruction(text, "a") for text in ("lift it", " "))}, {}, "an instruction is empty"),
        (
            {"instructions": (Instruction("lift it now", "a"),)},
            {"max_tokens": 3},
            "has 5 tokens, policy.max_tokens allows 3",
        ),
        ({}, {"freeze": ("eyes",)}, "got 'eyes', allowed: 'vision' or 'language'"),
        ({}, {"dtype": "bfloat16"}, "dtype: got bfloat16, allowed: float32 unless freeze=.*vision.*language"),
        ({}, {"cameras": ("front", "front")}, "cameras: got .*allowed: each camera once"),
        ({}, {"pretrained": "/nowhere"}, "policy.pretrained=/nowhere lacks .* It has: no such directory"),
        ({}, {"image_size": 20}, "policy.image_size=20 must be a multiple of the model's patches, 8 pixels"),
        ({}, {"model": {}}, "policy=vla needs a trained model: give policy.pretrained="),
        ({}, {"model": MODEL | {"max_stat_dim": 9}}, "unknown key 'policy.model.max_stat_dim'"),
        ({}, {"model": sized(text_config={"hiden_size": 9})}, "'policy.model.vlm_config.text_config.hiden_size'"),
        ({}, {"model": kinds(text="gemma2")}, "model: vlm_config.text_config.model_type: got gemma2, allowed: gemma$"),
        ({}, {"model": kinds(text="llama")}, "vlm_config.text_config.model_type: got llama, allowed: gemma$"),
        ({}, {"model": kinds(dit="gemma3_text")}, "model: dit_config.model_type: got gemma3_text, allowed: gemma$"),
        ({}, {"model": kinds(vlm="llava")}, "model: vlm_config.model_type: got llava, allowed: paligemma$"),
        ({}, {"model": sized(projection_dim=8)}, r"projection_dim \(images\) is 8, text_config.hidden_size"),
        ({}, {"model": sized(text_config={"num_attention_heads": 3})}, "num_attention_heads, 3, must be a multiple"),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(spec=spec(**changes), **options)


def test_an_observation_without_a_camera_is_refused() -> None:
    policy, obs = build(), observe(2)
    del obs["images.wrist"]
    with pytest.raises(UserError, match=r"needs images of front, wrist; .* lacks wrist\. It has: front"):
        policy.plan(obs)


def test_words_that_were_not_trained_on_are_refused() -> None:
    tokenizer = train_tokenizer(TEXTS)
    tokens, real = tokenize(tokenizer, TEXTS, 48)
    assert real.sum(-1).tolist() == [7, 12, 4]  # <bos>, words and punctuation, newline
    assert tokenizer.decode(tokens[2, 1:3]) == "lift it"
    with pytest.raises(UserError, match="'lift the wombat' has words outside the vocabulary"):
        tokenize(tokenizer, ["lift the wombat"], 48)


def test_the_imitation_loss_is_that_of_transformers() -> None:
    """With padding: a robot of 2 actions in a network for 3."""
    policy, obs = build().float(), observe(6)
    action = torch.rand(6, 3, 2, generator=torch.Generator().manual_seed(2)) * 2 - 1
    valid = torch.ones(6, 3, dtype=torch.bool)
    ours = policy.imitation_loss(obs, action, valid, torch.Generator().manual_seed(3))
    each = {key: value.repeat_interleave(DRAWS_PER_OBSERVATION, 0) for key, value in obs.items()}
    padded = torch.nn.functional.pad(action, (0, 1)).repeat_interleave(DRAWS_PER_OBSERVATION, 0)
    noise, t = policy.draw_path(padded, torch.Generator().manual_seed(3))
    theirs = plain_loss(policy, each, padded, noise, t)
    assert ours.item() == pytest.approx(theirs.mean().item(), rel=1e-5)


def test_imitation_learns_what_the_words_say() -> None:
    """Two instructions, two actions: after imitation the words decide."""
    policy, obs = build(), observe(32)
    obs["instruction"] = torch.arange(32) % 2
    target = torch.where(obs["instruction"] == 0, -0.6, 0.6)[:, None, None].expand(-1, 3, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        optimizer.zero_grad()
        policy.imitation_loss(obs, target, torch.ones(32, 3, dtype=torch.bool), generator).backward()
        optimizer.step()
    assert (policy.plan(obs) - target).abs().mean() < 0.15


def red_and_blue_halves() -> tuple[Obs, Tensor]:
    """64 images of a red and a blue half in any order, with an instruction that names one colour: its half is the
    object. And whether that is the left one."""
    obs = observe(64)
    left_is_red, names_red = torch.arange(64) % 2 == 0, torch.arange(64) % 4 < 2
    obs["instruction"] = torch.where(names_red, 0, 1)
    red, blue = torch.tensor([255, 0, 0], dtype=torch.uint8), torch.tensor([0, 0, 255], dtype=torch.uint8)
    colors = torch.where(left_is_red[:, None], red, blue), torch.where(left_is_red[:, None], blue, red)
    named_left = left_is_red == names_red
    roles = [torch.where(named, Role.OBJECT, Role.OTHER_OBJECT) for named in (named_left, ~named_left)]
    texts = [torch.where(is_red, 1, 2) for is_red in (left_is_red, ~left_is_red)]
    for camera in ("front", "wrist"):
        image = torch.empty(64, 16, 16, 3, dtype=torch.uint8)
        mask, text = torch.empty(2, 64, 16, 16, dtype=torch.uint8)
        for side, columns in enumerate((slice(0, 8), slice(8, 16))):
            image[:, :, columns], mask[:, :, columns] = colors[side][:, None, None], roles[side][:, None, None]
            text[:, :, columns] = texts[side][:, None, None]
        obs |= {f"images.{camera}": image, f"masks.{camera}": mask, f"described.{camera}": text}
    return obs, named_left


def test_grounding_teaches_what_the_words_name_and_where_it_is() -> None:
    obs, named_left = red_and_blue_halves()
    policy = build(spec=spec(descriptions=("red half", "blue half")))
    obs["target_positions"] = torch.where(named_left, -1.0, 1.0)[:, None].expand(-1, 9)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    before = policy.grounding_loss(obs, with_positions=True).item()
    for _ in range(150):
        optimizer.zero_grad()
        policy.grounding_loss(obs, with_positions=True).backward()
        optimizer.step()
    assert before > 4.0
    assert policy.grounding_loss(obs, with_positions=True).item() < 0.2, (
        "colours without words leave log 2 for each of two roles, and more"
    )
    assert all(bool(hit_M.all()) and len(hit_M) == 64 for hit_M in policy.localization_hits(obs).values())
    assert (policy.predict_positions(obs) - obs["target_positions"]).abs().max() < 0.3
    other = obs | {"instruction": 1 - obs["instruction"]}
    assert not any(bool(hit_M.any()) for hit_M in policy.localization_hits(other).values()), "other words, other half"


def test_centres_by_hand() -> None:
    """Two pixels of the object, one at each end of the upper row, and one of another object in the lower left."""
    masks = torch.zeros(1, 2, 4, 8, dtype=torch.uint8)
    masks[0, 0, 0, 0] = masks[0, 0, 0, 7] = Role.OBJECT
    masks[0, 1, 3, 0] = Role.OTHER_OBJECT
    centre = centres(build().grounding.role_masks({"masks.front": masks[:, 0], "masks.wrist": masks[:, 1]}))
    assert centre.shape == (1, 2, 4, 2)
    torch.testing.assert_close(centre[0, 0, 0], torch.tensor([0.0, -0.75]))
    torch.testing.assert_close(centre[0, 1, 1], torch.tensor([-0.875, 0.75]))
    assert centre.count_nonzero() == 3


def test_only_images_that_show_the_object_are_judged() -> None:
    policy, obs = build(), observe(3)
    nothing = torch.zeros(3, 16, 16, dtype=torch.uint8)
    shown = nothing.clone()
    shown[1, 3, 12] = Role.OBJECT
    found = policy.localization_hits(obs | {"masks.front": shown, "masks.wrist": nothing})
    assert (len(found["front"]), len(found["wrist"])) == (1, 0)
