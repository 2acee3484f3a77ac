"""What travels between env workers and the actor server."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embodied.core.types import Obs, PolicySample


@dataclass(frozen=True, slots=True)
class ActRequest:
    """One env group asks for its next decision.

    obs: N rows to act on. noise: what ``Policy.act`` draws with, [N, ...]; None asks for values only, not for actions
    (end of a fragment). final_obs: M rows, last observations of episodes that ended at the previous decision.
    """

    worker: int
    group: int
    obs: Obs
    noise: Tensor | None
    final_obs: Obs | None = None


@dataclass(frozen=True, slots=True)
class ActReply:
    """The answer, on the CPU. sample is None for a request of values only, value_N None for a request to act
    (``sample.value_N`` has it); final_value_M: None without final_obs. obs, final_obs: what the learner is to get in
    place of the request's, from a policy that precomputes in the actor."""

    worker: int
    group: int
    sample: PolicySample | None
    obs: Obs | None
    value_N: Tensor | None
    final_value_M: Tensor | None
    final_obs: Obs | None = None
