"""Base class of all policies: all that the runtime, the trainers and the exports call on one."""

import copy
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from embodied.core.types import Evaluation, Obs, PolicySample


class Policy(nn.Module):
    """A torch module that acts and computes the likelihood of its recorded decisions.

    A subclass has the next four attributes and implements the methods up to ``value``. All below is optional: by
    default it does nothing, or says that the policy does not have the capability.
    """

    horizon: int
    execute: int
    """H planned and E executed actions of a chunk."""
    noise_shape: tuple[int, ...]
    plan_noise_shape: tuple[int, ...]
    """Shapes of the standard normals that ``act`` needs and that ``plan`` takes for one decision."""

    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        """Plan a chunk [N, H, A] for each row of obs, as a deployed policy does. No gradient.

        Needs no privileged observation and runs no critic. noise: standard normals [N, *plan_noise_shape]; None plans
        deterministically.
        """
        raise NotImplementedError

    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        """Draw a chunk for each row of obs with noise [N, *noise_shape], to explore. No gradient."""
        raise NotImplementedError

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        """Return log-probability, entropy and value of recorded decisions, differentiable.

        chain: ``PolicySample.chain`` of the decisions.
        """
        raise NotImplementedError

    def kl_divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """Return KL(p || q) of B decisions in closed form, nats, differentiable, [B].

        p, q: ``Evaluation.distribution`` of the same decisions under two sets of weights.
        """
        raise NotImplementedError

    def value(self, obs: Obs) -> Tensor:
        """Return the critic's value of each row of obs, [N]."""
        raise NotImplementedError

    def scale_values(self, rms: Tensor, weight: float) -> float:
        """Fold the root mean square of a batch's value targets, a scalar, into the unit of the critic's network.

        weight: of the batch, 1 for the first. No value changes. Return the unit, by whose square the value loss is
        divided; 1 for a critic without one.
        """
        return 1.0

    def duplicate(self) -> Self:
        """Return a copy. It shares the memory of the weights that are not trained, which are most of a VLA's."""
        frozen = (weight for weight in self.parameters() if not weight.requires_grad)
        return copy.deepcopy(self, {id(weight): nn.Parameter(weight.data, requires_grad=False) for weight in frozen})

    # -- normaliser ----------------------------------------------------------------------------------------------------

    def update_normalizer(self, obs: Obs) -> None:
        """Fold a batch of observations [B, ...] into the running statistics (buffers of the module)."""

    def fit_normalizer(self, obs: Obs) -> None:
        """Fit the statistics of the keys present and freeze them: ``state`` [F, S] and the policy's learning targets.

        Learning targets that already have statistics keep them.
        """

    # -- warm start (init=) --------------------------------------------------------------------------------------------

    must_match: tuple[str, ...] = ()
    """Options that change what the weights mean without changing their shapes; both runs need the same values."""
    must_match_exploring: tuple[str, ...] = ()
    """The same for the weights of exploration, which are taken from a run that explored, but not from imitation."""
    optional_suffixes: tuple[str, ...] = ()
    """Suffixes of weights that the run named by ``init=`` may lack; the new run then keeps its own."""
    wraps: str | None = None
    """Prefix in ``state_dict`` of a wrapped policy, whose weights this one needs and never changes; None: no policy is
    wrapped."""
    wrapped: type["Policy"] | None = None
    """Class of the wrapped policy."""

    # -- imitation -----------------------------------------------------------------------------------------------------

    not_imitated: tuple[str, ...] | None = None
    """Prefixes of the weights that imitation does not train: those of exploration and critic. None: the policy cannot
    learn from demonstrations."""

    def imitation_loss(self, obs: Obs, action_NHA: Tensor, valid_NH: Tensor, generator: torch.Generator) -> Tensor:
        """Return the loss of demonstrated chunks [N, H, A], a differentiable scalar.

        valid_NH: bool, which actions to imitate: the first ones of every chunk, one at least. The loss is the mean over
        them, so that each of them counts alike in a batch.
        """
        raise NotImplementedError

    # -- a frozen part of the network ----------------------------------------------------------------------------------

    precompute_in_actor: bool = False
    """True: the actor precomputes, once per decision, and the learner never gets the inputs of the frozen part.
    False: the learner precomputes, once per batch."""

    def precompute(self, obs: Obs) -> Obs:
        """Replace the frozen part's inputs by its outputs in observations [B, ...]; do nothing if nothing is frozen.

        ``evaluate`` and the losses take observations of either kind.
        """
        return obs

    def fits_cache(self, decisions: int) -> bool:
        """Return whether the outputs of a frozen part for so many decisions are small enough to be kept."""
        return False

    # -- a model of another library ------------------------------------------------------------------------------------

    library: str | None = None
    """Library whose model the policy wraps and whose layout ``save_pretrained`` writes; None: the policy wraps none."""

    def save_architecture(self, path: Path) -> None:
        """Write all that is needed beside the policy's own weights to load it again, into a directory that may exist.

        Weights that ``save_pretrained`` has written there are removed: they are not those of the training to come.
        """

    def save_pretrained(self, path: Path) -> None:
        """Write all that the other library needs to load the model, into a directory that may exist."""

    # -- grounding -------------------------------------------------------------------------------------------------

    can_ground: bool = False
    """Whether it can learn from labelled images."""

    @property
    def grounded(self) -> bool:
        """Whether the policy has the statistics of ``target_positions``, without which it cannot predict them."""
        return False

    def grounding_loss(self, obs: Obs, with_positions: bool) -> Tensor:
        """Return the loss on labelled observations, a differentiable scalar. The labels are:

        - ``masks.<camera>``, uint8 [N, h, w]: the ``Role`` of each pixel;
        - ``described.<camera>``, uint8 [N, h, w]: description of each pixel, an index into ``EnvSpec.descriptions``
          counted from 1 (0: none);
        - ``target_positions``, float32 [N, 9]: the named object relative to the robot's base, the same object relative
          to its tool, and the named place relative to the base (m).

        with_positions: add the losses of positions in the image and of ``target_positions`` to those of the masks.
        """
        raise NotImplementedError

    def location_loss(self, obs: Obs) -> Tensor:
        """Return the loss of the predicted ``target_positions`` alone, unweighted, a differentiable scalar."""
        raise NotImplementedError

    def localization_hits(self, obs: Obs) -> dict[str, Tensor]:
        """Return whether the patch rated highest for the named object really shows it, bool [M], for each camera.

        M: number of observations in which the camera sees that object.
        """
        raise NotImplementedError

    def predict_positions(self, obs: Obs) -> Tensor:
        """Predict ``target_positions``, [N, 9], m."""
        raise NotImplementedError
