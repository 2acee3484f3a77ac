"""Proximal policy optimisation on fragments that may be older than the weights (docs/architecture.md, Mathematics).

fragments ── merge ──► Fragment [T, N] ── prepare ──► Batch [B = T * N]
                       evaluate: log-probabilities and distributions before the update
                       estimate: advantages, value targets (GAE, V-trace; groups in GRPO)

epochs:  Batch ── shuffle, select ──► minibatch ── loss ──► backward ──► clip ──► Adam
                                                    └─ KL ──► learning rate, end of the epochs

observations of the batch ──► normaliser of the policy ;  weights ──► average that is deployed
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embodied.algos import losses, returns, sharing
from embodied.algos.adam import adapt_learning_rate, anneal, build_adam, put_rates, set_fixed_rates, update_average
from embodied.algos.batch import Batch, evaluate_in_pieces, merge_fragments
from embodied.algos.config import PPOConfig
from embodied.core.algorithm import SINGLE_PROCESS, Algorithm, Metrics, ProcessGroup
from embodied.core.device import copied_to_cpu
from embodied.core.errors import UserError
from embodied.core.graphs import Recorded
from embodied.core.policy import Policy
from embodied.core.types import Evaluation, Fragment

UNIT_WEIGHT = 0.1  # of a batch's value targets in the unit of the values, at least
MIN_KL_SAMPLE = 256  # decisions in which the KL is measured; its closed form varies little between decisions

EPOCH_METRICS = (
    "train/policy_loss", "train/value_loss", "train/approx_kl", "train/clip_fraction", "train/entropy",
    "train/grad_norm", "train/ratio_first", "async/ess", "train/epochs",
)  # fmt: skip


class PPO(Algorithm):
    """PPO with one Adam optimiser. The policy is moved to ``device`` and trained in place.

    ``deployed`` is evaluated and kept. It is the policy itself or, with ``ema_decay``, an exponential moving average of
    its weights over updates, with the policy's newest normaliser. The average varies less than PPO's iterates.
    ``seed`` seeds the shuffling of minibatches, the only randomness here. Not thread-safe: one learner thread.
    ``learners``: see ``embodied.core.algorithm.Algorithm``; every use is a call of algos/sharing.py.
    """

    recordable = True

    def __init__(self, policy: Policy, config: PPOConfig, *, seed: int, device: torch.device) -> None:
        self.policy = policy.to(device)
        self.config = config
        self.device = device
        self.optimizer = build_adam(policy, config, device)
        self._actor_parameters = [p for name, p in policy.named_parameters() if not name.startswith("critic.")]
        self.reference = policy.duplicate().requires_grad_(False).eval() if config.reference_kl_coef > 0 else None
        self.deployed = policy.duplicate().requires_grad_(False).eval() if config.ema_decay > 0 else policy
        self._generator = torch.Generator().manual_seed(seed)
        self._record()
        self.learners: ProcessGroup = SINGLE_PROCESS
        self._value_unit = torch.ones((), device=device)  # read by recorded kernels, as the next
        self._share_left = torch.ones((), dtype=self.optimizer.param_groups[0]["lr"].dtype, device=device)

    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        """Run the epochs on the fragments, then fold their observations into the policy's normaliser.

        The normaliser changes after the epochs and not before, so that the first ratio is exactly 1. ValueError for
        fragments that do not fit together. FloatingPointError if a loss is not finite: the weights must then not be
        published.
        """
        config, fragment = self.config, merge_fragments(fragments)
        staleness_TN, valid_TN = version - fragment.version_TN, fragment.num_steps_TN > 0
        executed_M = staleness_TN[valid_TN]
        if config.max_staleness is not None:
            valid_TN = valid_TN & (staleness_TN <= config.max_staleness)
        batch = self.prepare(fragment, staleness_TN, valid_TN)
        weight_B, value_B, return_B = map(batch.column, ("weight", "value", "return"))
        counts = sharing.count_decisions(weight_B, executed_M, config.max_staleness, self.learners)
        if counts.valid:
            rms = torch.hypot(*sharing.mean_and_std(return_B[weight_B > 0], self.learners))  # root mean square
            self._value_unit.fill_(self.policy.scale_values(rms, max(UNIT_WEIGHT, 1 / (version + 1))))
        if self.total_updates is not None:
            anneal(self.optimizer, self._share_left, config, version, self.total_updates)
        warming = version < config.critic_warmup
        if version == config.critic_warmup > 0 and config.schedule == "adaptive":
            # An imitated policy is narrow: the initial rate would move it by several nats. The schedule raises the
            # lower bound again as far as the KL allows.
            rate = min(config.min_learning_rate, config.learning_rate)
            self.optimizer.param_groups[0]["lr"].fill_(rate * self._share_left)
        num_minibatches = min(config.num_minibatches, counts.fewest)
        learned = self._epochs(batch, num_minibatches, warming) if counts.valid else dict.fromkeys(EPOCH_METRICS, 0.0)
        learned["train/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        explained = returns.explained_variance(value_B[weight_B > 0], return_B[weight_B > 0])
        learned["train/explained_variance"] = explained if config.value_coef else 0.0
        metrics = counts.metrics | sharing.average_metrics(learned, weight_B.sum(), self.learners)
        self.policy.update_normalizer(sharing.gather_normalized(batch.obs, self.learners))
        broken = [f"{key}={value}" for key, value in metrics.items() if not math.isfinite(value)]
        if broken:
            raise FloatingPointError(f"PPO update {version} is not finite: {', '.join(broken)}")
        if self.deployed is not self.policy:
            decay = min(config.ema_decay, (version + 1) / (version + 10))  # lower at first, to forget the start
            update_average(self.deployed, self.policy, decay)
        return metrics

    # -- prepare -------------------------------------------------------------------------------------------------------
    def prepare(self, fragment: Fragment, staleness_TN: Tensor, valid_TN: Tensor) -> Batch:
        """Compute proximal log-probabilities, advantages and value targets; flatten them to B rows on the device.

        staleness_TN: versions since each decision was drawn. valid_TN: bool, decisions that count.
        """
        config = self.config
        obs = {key: value.flatten(0, 1).to(self.device, non_blocking=True) for key, value in fragment.obs.items()}
        chain = fragment.chain.flatten(0, 1).to(self.device, non_blocking=True)
        if self.policy.fits_cache(len(chain)):
            obs = self.policy.precompute(obs)
        behaviour_TN, value_TN = fragment.log_prob_TN, fragment.value_TN
        # Decisions drawn by the present weights have the proximal log-probability already.
        stale = bool((staleness_TN[valid_TN] != 0).any())
        recompute = stale and config.correction in ("decoupled", "vtrace") and config.proximal == "recompute"
        piece = -(-len(chain) // config.num_minibatches)  # rows of a forward pass: those of a minibatch
        # Without a recomputation, a random subset is evaluated, to measure the KL.
        rows, num_measured = torch.arange(len(chain)), max(piece, MIN_KL_SAMPLE)
        some_obs, some_chain = obs, chain
        if not recompute and config.reduction == "sum" and num_measured < len(chain):
            rows = torch.randperm(len(chain), generator=self._generator)[:num_measured]
            some_obs = {key: value.index_select(0, rows.to(self.device)) for key, value in obs.items()}
            some_chain = chain.index_select(0, rows.to(self.device))
        before = evaluate_in_pieces(self.policy, some_obs, some_chain, piece)
        proximal_TN = before.log_prob_B.to(value_TN.device).view_as(behaviour_TN) if recompute else behaviour_TN
        log_rho_TN = losses.log_ratio(proximal_TN, behaviour_TN)
        advantage_TN, return_TN, valid_TN = self.estimate(fragment, log_rho_TN, valid_TN)
        measured_TN = torch.zeros_like(valid_TN).flatten().index_fill_(0, rows, True).view_as(valid_TN)
        columns = (  # in the order of Batch.COLUMNS
            behaviour_TN, proximal_TN, losses.interpolation_alpha(staleness_TN), advantage_TN, return_TN, value_TN,
            valid_TN, valid_TN & measured_TN,
        )  # fmt: skip
        flat = torch.stack([column.flatten().to(value_TN.dtype) for column in columns])
        distribution = before.distribution.new_zeros(len(chain), *before.distribution.shape[1:])
        distribution.index_copy_(0, rows.to(self.device), before.distribution)
        reference = None
        if self.reference is not None:
            reference = evaluate_in_pieces(self.reference, obs, chain, piece).distribution
        reduced_BR = losses.reduce_log_prob(before, config.reduction)[0] if config.reduction != "sum" else None
        return Batch(obs, chain, flat.to(self.device, non_blocking=True), distribution, reference, reduced_BR)

    def estimate(self, fragment: Fragment, log_rho_TN: Tensor, valid_TN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return advantages, the critic's targets and the mask of the decisions that count, all [T, N].

        log_rho_TN: log of proximal / behaviour. With V-trace the advantages contain its importance weight.
        """
        config = self.config
        weight_TN = None
        if config.correction == "vtrace":
            advantage_TN, return_TN, weight_TN = returns.vtrace(
                fragment, log_rho_TN, config.gamma, config.gae_lambda, config.rho_bar, config.c_bar
            )
        else:
            advantage_TN, return_TN = returns.gae(fragment, config.gamma, config.gae_lambda)
        if config.normalize_advantage:
            advantage_TN = returns.normalize(advantage_TN, valid_TN, self.learners)
        if weight_TN is not None:  # after the mean was subtracted: before, that would bias the gradient
            advantage_TN = weight_TN * advantage_TN
        return advantage_TN, return_TN, valid_TN

    # -- epochs --------------------------------------------------------------------------------------------------------
    def _epochs(self, batch: Batch, num_minibatches: int, warming: bool) -> Metrics:
        """Run the passes over a batch; return the means of EPOCH_METRICS. warming: only the critic learns."""
        config = self.config
        adapts = config.schedule == "adaptive" and not warming
        may_adapt = torch.tensor([False, adapts], device=self.device)  # of the first minibatch, of others
        step = self._step if self.learners.size == 1 else self._one_step  # sums over processes are not recorded
        rows: list[Tensor] = []  # statistics and gradient norm of each minibatch; reading them waits for the device
        measured: list[Tensor] = []  # whether the KL of any decision of the minibatch was measured
        first: Tensor | None = None
        epochs = 0
        while epochs < config.epochs:
            epochs += 1
            order = torch.randperm(len(batch), generator=self._generator).to(self.device)
            for index in order.tensor_split(num_minibatches):
                minibatch = batch.select(index)
                statistics, is_measured, log_ratio_B, log_prob_B = step(
                    warming, may_adapt[int(first is not None)], minibatch
                )
                if first is None:  # before any step
                    counted_B = minibatch.column("weight") > 0
                    log_weight_B = losses.log_ratio(log_prob_B, minibatch.column("behaviour"))[counted_B]
                    first = torch.stack([log_ratio_B.exp().mean(), losses.effective_sample_size(log_weight_B)])
                rows.append(statistics)
                measured.append(is_measured)
            epoch_kl = losses.mean_statistics(rows[-num_minibatches:], measured[-num_minibatches:])[losses.KL]
            if config.target_kl is not None and float(epoch_kl) > config.target_kl:
                break
        if adapts and len(rows) == 1:  # no further minibatch shows how far the only step went
            with torch.no_grad():
                kl = self.trust_region_kl(minibatch, self.policy.evaluate(minibatch.obs, minibatch.chain))
            kl = sharing.average(kl, minibatch.column("kl_weight").sum(), self.learners)
            adapt_learning_rate(self.optimizer, kl, may_adapt[1], self._share_left, config)
        assert first is not None
        values = torch.cat([losses.mean_statistics(rows, measured), first]).tolist()
        return dict(zip(EPOCH_METRICS, [*values, float(epochs)], strict=True))

    def _record(self) -> None:
        """Forget recorded kernels, which read and write the optimiser's present tensors."""
        self._differentiate = Recorded(self._gradients, self.device, self, self.policy)
        self._step = Recorded(self._one_step, self.device, self, self.policy)

    def _one_step(self, warming: bool, adapts: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Adapt the learning rate to the KL of a minibatch if ``adapts``, and step the optimiser.

        Returns statistics with the norm of the gradient, whether the KL was measured, log-ratios, log-probabilities.
        """
        groups = self.optimizer.param_groups  # the actor, and the critic where it has its own rate
        trained = [parameter for group in groups for parameter in group["params"]]
        differentiate = self._gradients if self.learners.size == 1 else self._differentiate
        statistics, log_ratio_B, log_prob_B, gradients = differentiate(batch)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        weight_B, kl_weight_B = map(batch.column, ("weight", "kl_weight"))
        statistics, is_measured = sharing.reduce_step(trained, statistics, weight_B, kl_weight_B, self.learners)
        adapt_learning_rate(self.optimizer, statistics[losses.KL], adapts & is_measured, self._share_left, self.config)
        if warming:
            for parameter in self._actor_parameters:
                parameter.grad = None
        norms = [nn.utils.clip_grad_norm_(group["params"], self.config.max_grad_norm) for group in groups]
        self.optimizer.step()
        moves = any(parameter.grad is not None for parameter in groups[0]["params"])
        norm = norms[0] if moves else statistics.new_zeros(())  # torch's is on the CPU then
        return torch.cat([statistics, norm[None]]), is_measured, log_ratio_B, log_prob_B

    def _gradients(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        """Return what ``loss`` tells of a minibatch, and the gradients of the trained parameters."""
        loss = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss.total)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return loss.statistics, loss.log_ratio_B, loss.log_prob_B, [parameter.grad for parameter in trained]

    # -- loss ----------------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> losses.MinibatchLoss:
        """Return the differentiable loss of a minibatch under the current weights, with its statistics."""
        config = self.config
        return_B, value_B, weight_B = map(batch.column, ("return", "value", "weight"))
        now = self.policy.evaluate(batch.obs, batch.chain)
        term = self.policy_term(batch, now)
        huber_delta = config.huber_delta if config.value_loss == "huber" else None
        error_B = losses.value_error(now.value_B, value_B, return_B, config.value_clip, huber_delta)
        policy_loss = -losses.masked_mean(term.objective_B, weight_B)
        value_loss = losses.masked_mean(error_B, weight_B)
        entropy = losses.masked_mean(now.entropy_B, weight_B)
        total = policy_loss + config.value_coef / self._value_unit.square() * value_loss - config.entropy_coef * entropy
        if self.reference is not None:
            assert batch.reference is not None
            # Over the scored transitions only, like the policy term, so that their relative weight does not change.
            reference_kl_B = self.policy.kl_divergence(now.distribution, batch.reference)
            total = total + config.reference_kl_coef * losses.masked_mean(reference_kl_B, weight_B)
        with torch.no_grad():
            kl = self.trust_region_kl(batch, now)
            clipped = losses.valid_mean(term.clipped_B, weight_B)
            statistics = torch.stack([policy_loss, value_loss, kl, clipped, entropy])
        return losses.MinibatchLoss(total, statistics, term.log_ratio_B.detach(), now.log_prob_B.detach())

    def policy_term(self, batch: Batch, now: Evaluation) -> losses.PolicyTerm:
        """Return the policy's part of the loss; ``loss`` adds the rest. now: under the current weights.

        An algorithm with another objective overrides this alone (docs/extending/algorithm.md).
        """
        config = self.config
        behaviour_B, proximal_B, alpha_B, advantage_B = map(
            batch.column, ("behaviour", "proximal", "alpha", "advantage")
        )
        if config.proximal == "interpolate":
            proximal_B = losses.interpolate_proximal(now.log_prob_B, behaviour_B, alpha_B)
        reduced_BR, reduced_scale = losses.reduce_log_prob(now, config.reduction)
        reduced_ratio_BR = None if batch.reduced_BR is None else losses.log_ratio(reduced_BR, batch.reduced_BR)
        return losses.policy_term(
            config.correction,
            now.log_prob_B,
            behaviour_B,
            proximal_B,
            advantage_B,
            reduced_ratio_BR=reduced_ratio_BR,
            reduced_scale=reduced_scale,
            clip_range=self.clip_range(now),
            dual_clip=config.dual_clip,
            behaviour_cap=config.behaviour_cap,
        )

    def clip_range(self, now: Evaluation) -> float:
        """Return ``clip_range`` for the share of the transitions that the ratio contains."""
        return self.config.clip_range * math.sqrt(now.scored_share)

    def trust_region_kl(self, batch: Batch, now: Evaluation) -> Tensor:
        """Return the mean KL(policy at the start of the update || current policy) of a decision, nats, a scalar.

        Computed in closed form from the recorded transitions. It means the same for every correction and every share of
        scored transitions. Mean and gradient are those of the decisions with a ``kl_weight``, a random part of a batch
        of fresh decisions; 0 if there is none.
        """
        weight_B, current = batch.column("kl_weight"), now.distribution
        measured = (weight_B > 0).view(-1, *[1] * (current.dim() - 1))
        start = torch.where(measured, batch.proximal, current.detach())  # elsewhere a KL of 0, with a gradient of 0
        return losses.valid_mean(self.policy.kl_divergence(start, current) / now.scored_share, weight_B)

    # -- state ---------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return copies, on the CPU, of the optimiser's state with its learning rates and of the shuffling generator.

        The reference policy is in it if there is one, the policy's weights if they are not the deployed ones.
        """
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "generator": self._generator.get_state()}
        for group in state["optimizer"]["param_groups"]:
            group["lr"] = float(group["lr"])
        if self.config.final_rate < 1:
            state["share_left"] = float(self._share_left)
        if self.reference is not None:
            state["reference"] = self.reference.state_dict()
        if self.deployed is not self.policy:
            state["weights"] = self.policy.state_dict()
        return copied_to_cpu(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from what ``state_dict`` returned. UserError if it is not such a state.

        The weights of ``deployed`` must be loaded before.
        """
        if self.reference is not None and "reference" not in state:
            raise UserError("algo.reference_kl_coef cannot be turned on by resume=: the first policy is not kept")
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            self._generator.set_state(state["generator"].cpu())
            if self.reference is not None:
                self.reference.load_state_dict(state["reference"])
            self.policy.load_state_dict(state.get("weights", self.deployed.state_dict()))
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise UserError(f"this is not the state of a PPO on this policy: {error}") from error
        put_rates(self.optimizer, self.device)
        share_left = state.get("share_left", 1.0)  # absent where rates do not fall
        self._share_left.fill_(share_left)
        set_fixed_rates(self.optimizer, self.config, share_left)
        self._record()
