"""Speed of the vision-language-action policy, with and without each of its optimisations.

    infer_over_sample_actions      decisions per second of ``act`` / of ``sample_actions`` of transformers, same model
    learner_cached_over_recompute  updates per second with the frozen prefix computed once per decision / in each epoch

The policy is ``vla_tiny`` as docs/vla.md trains it by reinforcement learning: vision and language frozen, PPO options.
Observations are random images and instructions of different lengths. ``act`` also explores, normalises images and state
and computes likelihood and value; ``sample_actions`` does not. ``sample_actions`` gets its tokens as ``PI0Processor``
pads them.

Further rows of inference: ``sample_actions`` with tokens padded to the longest instruction, as in ``act`` (the same if
the image tokens alone are more than 48); the prefix recomputed in every denoise step; a batch in four calls; images as
float32 instead of uint8. Further rows of updates: the prefix computed once by the learner instead of by the actor; both
updates of the ratio with Flow-Noise, where all denoise steps are stochastic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embodied.algos.ppo import PPO
from embodied.benchmarks.fragments import fragment_of
from embodied.benchmarks.measure import Report, paired, timed
from embodied.core.spec import EnvSpec, Instruction
from embodied.core.types import Obs
from embodied.policies import POLICIES
from embodied.runtime import threads
from embodied.session.config import compose_run

if TYPE_CHECKING:  # it imports transformers, which takes seconds that other benchmarks should not cost
    from embodied.policies.vla.policy import VLAPolicy

INSTRUCTIONS = tuple(
    f"{words} the {colour} {shape}" for colour in ("red", "green", "blue", "yellow") for shape in ("cube", "ball")
    for words in ("take", "pick up", "please reach out for and pick up")
)  # fmt: skip
PADDED = 48  # tokens of images and words that PI0Processor pads a prompt to
RECIPE = {"task": "tabletop", "policy": "vla_tiny", "init": "a run of imitation"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the benchmark."""

    batch: int = 64
    """Decisions per call of ``act``."""
    envs: int | None = None
    """Envs of an update; None is those of the recipe."""
    rounds: int = 9
    """Rounds that count, see measure.py."""


def measure(short: bool) -> Report:
    """Measure all ratios and rows; ``short`` only shows that it works."""
    sizes = Sizes(batch=4, envs=2, rounds=2) if short else Sizes()
    report = Report("vla")
    threads.use(threads.torch_cores())
    inference(report, sizes)
    updates(report, sizes)
    return report


def make_policy(**options: Any) -> VLAPolicy:
    """Build the policy of the recipe with other ``options``, for a task with two cameras."""
    from embodied.policies.vla.policy import VLAPolicy

    found = compose_run(RECIPE).policy
    config = replace(found.options, **options)
    spec = EnvSpec.of_sizes(
        "bench", state=23, privileged=40, action=4, max_episode_steps=80, cameras=config.observed_cameras,
        instructions=tuple(Instruction(text, goal=text) for text in INSTRUCTIONS),
    )  # fmt: skip
    torch.manual_seed(0)
    policy = POLICIES[found.name].build(spec, config)
    assert isinstance(policy, VLAPolicy)
    return policy


def observe(policy: VLAPolicy, num: int) -> Obs:
    """Draw random observations of ``num`` envs."""
    generator = torch.Generator().manual_seed(0)
    obs = {
        f"images.{camera.name}": torch.randint(
            0, 256, (num, camera.height, camera.width, 3), generator=generator, dtype=torch.uint8
        )
        for camera in policy.spec.cameras
    }
    return obs | {
        "state": torch.randn(num, policy.spec.state_dim, generator=generator),
        "privileged": torch.randn(num, policy.spec.privileged_dim, generator=generator),
        "instruction": torch.randint(0, len(INSTRUCTIONS), (num,), generator=generator),
    }


def inference(report: Report, sizes: Sizes) -> None:
    """Measure ``act`` and its variants."""
    policy = make_policy()
    obs = observe(policy, sizes.batch)
    noise = torch.randn(sizes.batch, *policy.noise_shape, generator=torch.Generator().manual_seed(0))
    model: Any = policy.parts.model
    inputs, shortest = plain_inputs(policy, obs, PADDED), plain_inputs(policy, obs)
    quarter = -(-sizes.batch // 4)
    parts = [{key: value[start : start + quarter] for key, value in obs.items()}
             for start in range(0, sizes.batch, quarter)]  # fmt: skip
    as_floats = obs | {key: value.float() for key, value in obs.items() if key.startswith("images.")}

    @torch.no_grad()
    def without_prefix() -> None:
        x = noise[:, 0]
        for k in range(policy.denoise_steps):
            x = x - policy.velocity(policy.encode(obs), x, k) / policy.denoise_steps

    works: dict[str, Callable[[], object]] = {
        "act": lambda: policy.act(obs, noise),
        "sample_actions": lambda: model.sample_actions(**inputs, noise=noise[:, 0], num_steps=policy.denoise_steps),
        "sample_actions_shortest": lambda: model.sample_actions(
            **shortest, noise=noise[:, 0], num_steps=policy.denoise_steps
        ),
        "prefix_every_step": without_prefix,
        "act_in_quarters": lambda: [policy.act(part, noise[: len(part["state"])]) for part in parts],
        "act_float_images": lambda: policy.act(as_floats, noise),
    }
    measures = {name: partial(_speed, sizes.batch, work) for name, work in works.items()}
    settings = {"batch": sizes.batch, "threads": threads.torch_cores()}
    results = report.measure(measures, sizes.rounds, "decisions/s", settings)
    report.add("image_bytes", sum(v.nbytes for k, v in obs.items() if k.startswith("images.")) / sizes.batch,
               "bytes/decision")  # fmt: skip
    report.ratio("infer_over_sample_actions", paired(results["act"], results["sample_actions"]))


def plain_inputs(policy: VLAPolicy, obs: Obs, num_tokens: int = 0) -> dict[str, Tensor]:
    """Return observations as arguments of ``PI0ForConditionalGeneration.sample_actions``.

    Tokens are padded to the longest instruction, or to ``num_tokens`` including those of images if that is more.
    """
    model: Any = policy.parts.model
    config = model.config
    images = torch.stack([obs[f"images.{camera}"] for camera in policy.config.cameras], 1)
    vision = config.vlm_config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2 * images.shape[1]
    image = torch.full((len(images), patches), config.vlm_config.image_token_id)
    found = (part[obs["instruction"]] for part in (policy.tokens_IT, policy.real_IT))
    words, real = (F.pad(part, (0, max(0, num_tokens - patches - part.shape[1]))) for part in found)
    return {
        "state": F.pad(policy.normalized_state(obs), (0, config.max_state_dim - policy.spec.state_dim)),
        "input_ids": torch.cat((image, words), 1),
        "attention_mask": torch.cat((torch.ones_like(image), real.long()), 1),
        "pixel_values": images.permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0,
        "pixel_attention_mask": torch.ones(images.shape[:2], dtype=torch.bool),
    }


def updates(report: Report, sizes: Sizes) -> None:
    """Measure PPO's update on a batch drawn by weights one version older, as in asynchronous training."""
    recipe = compose_run(RECIPE)
    decisions, envs = recipe.runtime.decisions, sizes.envs or recipe.num_envs
    still = {"learning_rate": 0.0, "critic_learning_rate": 0.0, "schedule": "fixed", "critic_warmup": 0}
    config = replace(recipe.algo.options, **still)
    again = {"prefix_from_actor": False, "prefix_cache_mb": 0}
    all_steps = {"exploration": "flow_noise", "stochastic_steps": "all"}
    kinds: dict[str, dict[str, Any]] = {
        "cached": {}, "recompute": again, "cached_by_learner": {"prefix_from_actor": False},
        "cached_flow_noise": all_steps, "recompute_flow_noise": all_steps | again,
    }  # fmt: skip
    works: dict[str, Callable[[], float]] = {}
    for name, changes in kinds.items():
        policy = make_policy(**changes)
        algorithm = PPO(policy, config, seed=0, device=torch.device("cpu"))
        rows = observe(policy, decisions * envs)
        rows = policy.precompute(rows) if policy.precompute_in_actor else rows
        fragment = fragment_of(policy, rows, decisions, torch.Generator().manual_seed(0))
        works[name] = partial(_speed, 1, partial(algorithm.update, [fragment], 1))
    batch, sizes_of = decisions * envs, {"epochs": config.epochs, "minibatches": config.num_minibatches}
    rounds = max(2, sizes.rounds // 3)
    results = report.measure(works, rounds, "decisions/s", {"decisions": batch, **sizes_of}, "update_{}", batch)
    cached = make_policy()
    prefix = cached.precompute(observe(cached, 1))
    report.add("prefix_bytes", sum(v.nbytes for k, v in prefix.items() if k.startswith("prefix.")), "bytes/decision")
    report.ratio("learner_cached_over_recompute", paired(results["cached"], results["recompute"]))


def _speed(count: int, work: Callable[[], object]) -> float:
    """Return ``count`` per second of ``work``."""
    return count / timed(work)
