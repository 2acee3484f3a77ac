"""Advantages and value targets of chunked decisions.

A decision executes ``num_steps`` (n) control steps. Both discounts are given *per control step*, so that the horizon
in seconds does not depend on the number of actions that a chunk executes:

    reward    R_t = sum_{i<n} gamma^i r_{t,i}
    discount  gamma^n
    trace     (gamma * lambda)^n         (for n = 1 this is the textbook GAE)

All values V are the behaviour critic's. The bootstrap value is 0 after a termination, V(final_obs) after a truncation,
and V(last_obs) at the end of the fragment. The end of an episode inside a fragment also cuts the trace.

Shapes: T decisions, N envs, E executed actions. Everything is vectorised over N; Python loops only over T.
"""

import torch
from torch import Tensor

from embodied.algos.sharing import mean_and_std
from embodied.core.algorithm import SINGLE_PROCESS, ProcessGroup
from embodied.core.types import Fragment

ROUNDING = 1e-5  # deviation that may be rounding of float32, in units of the summed numbers' size


def decision_reward(reward_TNE: Tensor, num_steps_TN: Tensor, gamma: float) -> Tensor:
    """Return each decision's discounted reward, [T, N]: the sum of gamma**i * r_i over its executed control steps."""
    step_E = torch.arange(reward_TNE.shape[-1], device=reward_TNE.device)
    weight_E = (gamma**step_E).to(reward_TNE.dtype)
    return (reward_TNE * (step_E < num_steps_TN[..., None])) @ weight_E


def next_value(fragment: Fragment) -> Tensor:
    """Return V at the end of each decision, [T, N].

    0 if terminated, V(final_obs) if truncated, otherwise V of the next observation.
    """
    follows_TN = torch.cat([fragment.value_TN[1:], fragment.bootstrap_value_N[None]])
    value_TN = torch.where(fragment.truncated_TN, fragment.final_value_TN, follows_TN)
    return value_TN.masked_fill(fragment.terminated_TN, 0.0)


def gae(fragment: Fragment, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Return advantage_TN and return_TN = advantage + value by GAE (Schulman et al. 2016)."""
    delta_TN = _td_error(fragment, gamma)
    advantage_TN = _accumulate(delta_TN, _trace(fragment, gamma, gae_lambda))
    return advantage_TN, advantage_TN + fragment.value_TN


def vtrace(
    fragment: Fragment, log_rho_TN: Tensor, gamma: float, gae_lambda: float, rho_bar: float, c_bar: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return advantage_TN, value target vs_TN and rho_TN by V-trace with lambda (IMPALA, Espeholt et al. 2018).

    log_rho_TN: log(pi / behaviour) of each decision. With rho = min(rho_bar, e^log_rho), c = min(c_bar, e^log_rho):

        vs_t - V_t = rho_t * delta_t + (gamma lambda)^n c_t (vs_{t+1} - V_{t+1})
        A_t        = delta_t + (gamma lambda)^n (vs_{t+1} - V_{t+1})

    A_t mixes vs and V of the next state by lambda (as rlax does), so that with rho = c = 1 both equal GAE(lambda) for
    every lambda. The objective of a decision is rho_t A_t, and the ratio of the loss must not repeat this weight.
    """
    weight_TN = log_rho_TN.exp()
    rho_TN = weight_TN.clamp(max=rho_bar)
    delta_TN = _td_error(fragment, gamma)
    trace_TN = _trace(fragment, gamma, gae_lambda)
    correction_TN = _accumulate(rho_TN * delta_TN, trace_TN * weight_TN.clamp(max=c_bar))
    following_TN = torch.cat([correction_TN[1:], torch.zeros_like(correction_TN[:1])])
    return delta_TN + trace_TN * following_TN, correction_TN + fragment.value_TN, rho_TN


def normalize(advantage_TN: Tensor, valid_TN: Tensor, group: ProcessGroup = SINGLE_PROCESS) -> Tensor:
    """Scale advantages to zero mean and unit variance over the valid decisions of the whole batch.

    All are 0 if those of the valid decisions are equal, up to ROUNDING.
    """
    mean, std = mean_and_std(advantage_TN[valid_TN], group)
    return torch.where(std > ROUNDING * mean.abs(), (advantage_TN - mean) / std, 0.0)


def explained_variance(value_B: Tensor, return_B: Tensor) -> float:
    """Return 1 - Var(return - value) / Var(return); 0 if the returns do not vary."""
    if return_B.numel() == 0 or float(return_B.var(correction=0)) == 0:
        return 0.0
    return 1 - float((return_B - value_B).var(correction=0) / return_B.var(correction=0))


def _td_error(fragment: Fragment, gamma: float) -> Tensor:
    """Return the temporal difference of each decision, R_t + gamma^n V_{t+1} - V_t, [T, N]."""
    reward_TN = decision_reward(fragment.reward_TNE, fragment.num_steps_TN, gamma)
    discount_TN = (gamma**fragment.num_steps_TN).to(reward_TN.dtype)
    return reward_TN + discount_TN * next_value(fragment) - fragment.value_TN


def _trace(fragment: Fragment, gamma: float, gae_lambda: float) -> Tensor:
    """Return the weight of the next decision's estimate, [T, N]: (gamma lambda)**num_steps, 0 if the episode ended."""
    trace_TN = ((gamma * gae_lambda) ** fragment.num_steps_TN).to(fragment.value_TN.dtype)
    return trace_TN.masked_fill(fragment.terminated_TN | fragment.truncated_TN, 0.0)


def _accumulate(delta_TN: Tensor, trace_TN: Tensor) -> Tensor:
    """Return x_t = delta_t + trace_t * x_{t+1}, from the last decision backwards, [T, N]."""
    out_TN = delta_TN.clone()
    for t in range(len(out_TN) - 2, -1, -1):
        out_TN[t].addcmul_(trace_TN[t], out_TN[t + 1])
    return out_TN


def group_relative(fragment: Fragment, group_size: int) -> tuple[Tensor, Tensor]:
    """Return advantage_N and valid_TN of the envs' first episodes, compared in groups of ``group_size`` neighbours.

    advantage_N = (return - group mean) / group standard deviation, of undiscounted returns (GRPO, Shao et al. 2024).
    A first episode ends with the fragment, or earlier as a termination; valid_TN is false for decisions after its end.
    It is false for all envs of a group if its returns are all equal, if one of its first episodes diverged or has
    another end, or if those that reach the end of the fragment differ in length. ValueError if N is not a multiple of
    group_size.
    """
    num_decisions, num_envs = fragment.value_TN.shape
    if num_envs % group_size:
        raise ValueError(f"{num_envs} envs cannot be split into groups of {group_size}")
    ended_TN = fragment.terminated_TN | fragment.truncated_TN
    first_TN = ended_TN.long().cumsum(0) - ended_TN.long() == 0
    failed_N = (fragment.terminated_TN & first_TN).any(0)
    last_N = ended_TN[-1] & first_TN[-1]
    length_N = (fragment.num_steps_TN * first_TN).sum(0)
    length_GM = torch.where(last_N & ~failed_N, length_N, -1).view(-1, group_size)
    whole_GM = (length_GM == length_GM.amax(1, keepdim=True)) | failed_N.view(-1, group_size)
    diverged_N = ((fragment.num_steps_TN == 0) & fragment.truncated_TN & first_TN).any(0)  # others are too old
    whole_GM &= ((last_N | failed_N) & ~diverged_N).view(-1, group_size)
    reward_TNE = fragment.reward_TNE * first_TN.unsqueeze(-1)
    return_GM = reward_TNE.sum((0, 2)).view(-1, group_size)
    centred_GM = return_GM - return_GM.mean(1, keepdim=True)
    std_G1 = centred_GM.square().mean(1, keepdim=True).sqrt()
    scale_G1 = reward_TNE.abs().sum((0, 2)).view(-1, group_size).mean(1, keepdim=True)
    valid_GM = (std_G1 > ROUNDING * scale_G1) & whole_GM.all(1, keepdim=True)
    advantage_GM = torch.where(valid_GM, centred_GM / std_G1, 0.0)
    valid_N = valid_GM.expand_as(centred_GM).flatten()
    return advantage_GM.flatten(), valid_N.expand(num_decisions, -1) & first_TN
