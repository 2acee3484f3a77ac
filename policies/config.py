"""Options and registry of the policies. Importing this imports neither torch nor transformers."""

from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from omegaconf import OmegaConf
from pydantic import Field

from embodied.core.errors import UserError
from embodied.core.options import NonNegativeInt, Positive, PositiveInt, Widths, config_dataclass
from embodied.core.registry import Registry
from embodied.core.spec import CameraSpec

if TYPE_CHECKING:
    from embodied.core.policy import Policy

Part = Literal["vision", "language"]
PARTS: tuple[Part, ...] = get_args(Part)
ARCHITECTURE = ".architecture"
"""File in place of the weights in a run's copy of its model. A policy whose option ``pretrained`` ends with it is built
with random weights, to load those of a checkpoint of the run."""
SMALLEST_IMAGE = 36  # pixels per side that the convolutions of pixels.py need


def _check_between(options: Any, low: str, name: str, high: str) -> None:
    """Raise UserError unless the option ``low`` is below ``name``, and that below ``high``."""
    least, value, most = (getattr(options, key) for key in (low, name, high))
    if least >= most:
        raise UserError(f"{low}: got {least}, allowed: below {high}={most}")
    if not least < value < most:
        raise UserError(f"{name}: got {value}, allowed: above {low}={least} and below {high}={most}")


@config_dataclass
class ActorCriticConfig:
    """Options that all policies share."""

    horizon: PositiveInt = 4
    """H, planned actions of a chunk. A flow policy with E < H imitates worse (docs/flow_rl.md)."""
    execute: PositiveInt = 4
    """E, executed actions of a chunk, at most horizon."""
    critic_hidden: Widths = (128, 128)
    """Widths of the critic's hidden layers."""
    scale_values: bool = False
    """Whether the critic's network gives values in units of the returns' root mean square, so that the size of rewards
    does not matter (as in PopArt, van Hasselt et al. 2016)."""
    activation: Literal["elu", "relu", "silu", "tanh"] = "relu"
    """Activation of the hidden layers."""

    def __post_init__(self) -> None:
        if self.execute > self.horizon:
            raise UserError(f"execute: got {self.execute}, allowed: at most horizon={self.horizon}")

    @property
    def observed_cameras(self) -> tuple[CameraSpec, ...]:
        """Cameras that the policy needs; none for a policy that observes a state vector alone."""
        return ()


@config_dataclass
class CameraConfig(ActorCriticConfig):
    """Options of policies with cameras."""

    cameras: tuple[str, ...] = ()
    """Cameras whose images the policy observes, in this order; none: the state vector alone."""
    image_size: PositiveInt = 64
    """Pixels of the square images."""

    @property
    def observed_cameras(self) -> tuple[CameraSpec, ...]:
        return tuple(CameraSpec.square(name, self.image_size) for name in self.cameras)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.cameras)) < len(self.cameras):
            raise UserError(f"cameras: got {list(self.cameras)}, allowed: each camera once")


@config_dataclass
class PixelConfig(CameraConfig):
    """Options of policies with small networks, which need no cameras."""

    image_size: Annotated[int, Field(ge=SMALLEST_IMAGE)] = 64
    """Pixels of the square images."""
    grey: bool = False
    """Whether the colours of an image are averaged, which makes the first convolution cheaper."""


@config_dataclass
class GaussianConfig(PixelConfig):
    """Options of GaussianPolicy; standard deviations are in action units ([-1, 1])."""

    actor_hidden: Widths = (128, 128)
    """Widths of the actor's hidden layers."""
    init_std: Positive = 0.25
    """Initial standard deviation of every action dimension."""
    min_std: Positive = 0.05
    """Lower bound of the learned standard deviation."""
    max_std: Positive = 1.0
    """Upper bound of the learned standard deviation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_between(self, "min_std", "init_std", "max_std")


@config_dataclass
class CategoricalConfig(PixelConfig):
    """Options of CategoricalPolicy."""

    horizon: PositiveInt = 1
    """H, planned actions of a chunk."""
    execute: PositiveInt = 1
    """E, executed actions of a chunk, at most horizon."""
    actor_hidden: Widths = (128, 128)
    """Widths of the actor's hidden layers."""


@config_dataclass
class ChainConfig(ActorCriticConfig):
    """Options of FlowChains; standard deviations are in action units ([-1, 1])."""

    denoise_steps: PositiveInt = 4
    """K, steps from noise to action."""
    exploration: Literal["flow_noise", "flow_sde"] = "flow_noise"
    """flow_noise: steps with a learned standard deviation. flow_sde: steps of the SDE with the ODE's marginals."""
    stochastic_steps: Literal["all", "one", "last"] = "all"
    """Denoise steps with noise; the other steps follow the ODE. all: every step. one: a step drawn at random for each
    decision; after imitation no KL then bounds how far the action moves. last: the last step, which explores less the
    more denoise steps there are (docs/flow_rl.md)."""
    sde_noise: Positive = 0.5
    """Factor a of the diffusion a * sqrt(t / (1 - t)) of flow_sde."""
    sigma_min: Positive = 0.05
    """Lower bound of the standard deviation that flow_noise learns for a denoise step."""
    sigma_max: Positive = 1.0
    """Upper bound of the learned standard deviation."""
    sigma_init: Positive = 0.25
    """Initial value of the learned standard deviation."""
    max_delay: NonNegativeInt = 0
    """D, greatest delay of inference in control steps: the first actions of a chunk that are already decided when it is
    computed. At most execute, and at most horizon - execute; 0: inference takes no time (docs/flow_rl.md)."""
    checkpoint_steps: bool = False
    """Save memory: recompute each denoise step for its gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        room = min(self.execute, self.horizon - self.execute)
        if self.max_delay > room:
            limits = f"execute={self.execute} and horizon - execute={self.horizon - self.execute}"
            raise UserError(f"max_delay: got {self.max_delay}, allowed: at most {room}, the smaller of {limits}")
        _check_between(self, "sigma_min", "sigma_init", "sigma_max")


@config_dataclass
class FlowConfig(ChainConfig):
    """Options of FlowPolicy."""

    actor_hidden: Widths = (128, 128)
    """Widths of the hidden layers of the state encoder, which runs once per decision."""
    head_hidden: Widths = (128,)
    """Widths of the hidden layers of the denoiser, which runs K times per decision."""
    prediction: Literal["action", "velocity"] = "action"
    """Output of the network: the clean action (for RL from scratch) or the velocity (as in π0)."""


@config_dataclass
class DSRLConfig(FlowConfig):
    """Options of DSRLPolicy: those of the actor that chooses the noise, and those of the frozen flow.

    The flow's options must be the ones that it was trained with; those of its exploration have no effect.
    """

    noise_hidden: Widths = (128, 128)
    """Widths of the hidden layers of the actor."""
    noise_bound: Positive = 2.0
    """Largest absolute mean of the noise, which was a standard normal in imitation."""
    noise_std: Positive = 0.5
    """Initial standard deviation of the noise around its mean."""
    noise_std_min: Positive = 0.1
    """Lower bound of the standard deviation of the noise."""
    noise_std_max: Positive = 2.0
    """Upper bound of the standard deviation of the noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_delay:
            raise UserError(f"max_delay: got {self.max_delay}, allowed: 0, as dsrl steers policies without delays only")
        _check_between(self, "noise_std_min", "noise_std", "noise_std_max")


@config_dataclass
class VLAConfig(ChainConfig, CameraConfig):
    """Options of VLAPolicy."""

    cameras: Annotated[tuple[str, ...], Field(min_length=1)] = ("front", "wrist")
    """Cameras whose images the policy observes, in this order."""
    image_size: PositiveInt = 224
    """Pixels of the square images."""
    max_tokens: PositiveInt = 48
    """Largest number of tokens of an instruction."""
    pretrained: str | None = None
    """Directory of a checkpoint of transformers, with tokenizer and processor."""
    model: dict[str, Any] = field(default_factory=dict)
    """Options of transformers' PI0Config. Language model and action expert need the same number of layers."""
    freeze: tuple[Part, ...] = ()
    """Parts that are not trained. If both are frozen, their outputs are computed once per update."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA on the attention of the action expert; 0: all weights of the expert are trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights of vision and language; bfloat16 needs both to be frozen."""
    expert_dtype: Literal["float32", "tfloat32", "bfloat16"] = "float32"
    """Type of the matrix products of the action expert; its weights, their optimiser and the sums of its layers stay
    float32. On a GPU the others are faster (docs/gpu.md). With bfloat16 the log-probability of a decision moves by up
    to 0.1 with the number of decisions that are computed together. tfloat32 holds for the whole process."""
    compile: bool = False
    """Compile the action expert by torch.compile."""
    prefix_cache_mb: NonNegativeInt = 1024
    """Memory (MB) that the outputs of the frozen part may take for a learner's batch, a data set or the scenes of
    imitation. If they need more, they are recomputed whenever they are used. Outputs that the actor passes on are not
    checked."""
    prefix_from_actor: bool = False
    """The actor passes the outputs of the frozen part to the learner in place of the images. For vla_tiny they take
    34 kB per decision, the images 25 kB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype != "float32" and set(self.freeze) != set(PARTS):
            raise UserError(f"dtype: got {self.dtype}, allowed: float32 unless freeze={list(PARTS)}")

    def architecture(self, action_dim: int, vocabulary: int, image_token: int, pad_token: int) -> dict[str, Any]:
        """Return keyword arguments of PI0Config for a fresh model: ``model``, with defaults derived from the task."""
        own: dict[str, Any] = {
            "chunk_size": self.horizon,
            "max_action_dim": action_dim,
            "num_inference_steps": self.denoise_steps,
            "vlm_config": {
                "model_type": "paligemma",
                "image_token_id": image_token,
                "text_config": {"model_type": "gemma", "vocab_size": vocabulary, "pad_token_id": pad_token},
                "vision_config": {"model_type": "siglip_vision_model", "image_size": self.image_size},
            },
            "dit_config": {"model_type": "gemma", "pad_token_id": pad_token},
        }
        merged: Any = OmegaConf.to_container(OmegaConf.merge(own, self.model))
        return dict(merged)


POLICIES: "Registry[Callable[..., Policy]]" = Registry("policy", group="embodied.policies")
"""Builders, called as ``build(spec, config)`` with an EnvSpec and an instance of the entry's config dataclass."""

POLICIES.declare("gaussian", "embodied.policies.gaussian:GaussianPolicy", GaussianConfig)
POLICIES.declare("flow", "embodied.policies.flow.policy:FlowPolicy", FlowConfig)
POLICIES.declare("dsrl", "embodied.policies.dsrl:DSRLPolicy", DSRLConfig)
POLICIES.declare("categorical", "embodied.policies.categorical:CategoricalPolicy", CategoricalConfig)
POLICIES.declare("vla", "embodied.policies.vla.policy:VLAPolicy", VLAConfig)
POLICIES.declare("vla_tiny", "embodied.policies.vla.policy:VLAPolicy", VLAConfig)
