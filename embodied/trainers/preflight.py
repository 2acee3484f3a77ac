"""Examine demonstrations before imitation: replay their actions in the simulator, and overfit a policy to one episode.

plans and recorded actions ──► simulator ──► states ──compared with the recorded ones──► faults
               one episode ──► ImitationTrainer ──► policy ──► its error, and what it does from the recorded start

If the recorded actions do not lead to the recorded states, others are tried: all that differ from the recorded ones in
one step in time, one unit, one sign or one exchange; then those that differ from the best of them in one more. What is
found in replays of recorded starts is undone for the rest of the examination.
"""

import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from embodied.core.clock import running_s
from embodied.core.episodes import EpisodePlans, PlanList
from embodied.core.spec import SUCCESS, Box, EnvSpec
from embodied.data import Demonstrations, Episode, read, write
from embodied.data.columns import IF_SO, ROUNDING, Unfit
from embodied.data.faults import Fault, Meaning, check_frames, listed, meanings
from embodied.data.lerobot import DISTURBANCE, PLAN, check_fits, read_features
from embodied.envs.episodes.sampler import first_episodes
from embodied.policies.normalizer import RunningNormalizer
from embodied.runtime import threads
from embodied.runtime.evaluator import run_episodes
from embodied.session import factories
from embodied.session.config import RunConfig
from embodied.trainers.imitation import ImitationTrainer, unused_cameras

EPISODES = 3  # that are replayed
FITS, EXPLAINS = 1e-3, 0.05  # differences of states that rounding explains, and that a cure may leave
BETTER, MUCH_BETTER = 0.9, 0.75  # share of the difference that each further fault may leave; if starts are others
UNLIKE, EXPLAINED = 0.2, 0.35  # least correlation of steps in replays from other starts, of a part and of all
READ = ("action units", "action order", "action sign")  # faults whose cures are options for all of the action
OWN = ("measured", "kinematics")  # sources of what the robot measures of itself
UPDATES, SECONDS, LEARNED = 1000, 30.0, 0.5  # of the imitation of one episode: limits, and the largest error


class Recording(NamedTuple):
    """The first recorded episodes, their actions, and what was added to these in execution. T: the longest length."""

    config: RunConfig
    spec: EnvSpec
    plans: EpisodePlans
    exact: bool
    """Whether the plans are those of the recorded episodes; others begin in other states."""
    length_E: Tensor
    action_ETA: Tensor
    added_ETA: Tensor
    state_ETS: Tensor

    def compared(self, state_VETS: Tensor) -> Tensor:
        """Return what is compared, [V, M, S]: states, or if plans are others the steps of what the robot measures."""
        frame_T, last_E1 = torch.arange(state_VETS.shape[2]), self.length_E[:, None] - 1
        if self.exact:
            return state_VETS[:, frame_T <= last_E1]
        own_S = [term.source in OWN for term in self.spec.state for _ in range(term.size)]
        return state_VETS.diff(dim=2)[..., own_S][:, frame_T[1:] <= last_E1]

    def replay(self, meant: Sequence[Meaning]) -> tuple[Tensor, Tensor]:
        """Execute the actions as they may be meant; return what is compared [V, M, S], and final success [V, E]."""
        num, frame_T, last_E1 = len(meant), torch.arange(self.action_ETA.shape[1]), self.length_E[:, None] - 1

        def later(values_ETD: Tensor, frames: int) -> Tensor:
            frame_ET = (frame_T + frames).clamp(min=0).minimum(last_E1)
            return values_ETD.gather(1, frame_ET[..., None].expand(-1, -1, values_ETD.shape[2]))

        actions = [one.apply(later(self.action_ETA, one.shift)) + self.added_ETA for one in meant]
        plans, states, solved = EpisodePlans.concatenate([self.plans] * num), list[Tensor](), list[Tensor]()
        with closing(factories.make_env(self.config, len(plans), threads.available_cores(), cameras=())) as env:
            seen = [env.spec.state_names.index(name) for name in self.spec.state_names]
            obs = env.reset(PlanList(plans, len(plans)))
            for action_NA in torch.cat(actions).unbind(1):
                states.append(obs["state"].cpu()[:, seen])
                step = env.step(action_NA.to(env.device))
                obs = step.obs
                solved.append(step.info[SUCCESS].cpu())
        state_VETS, solved_VET = (torch.stack(rows, 1).unflatten(0, (num, -1)) for rows in (states, solved))
        moved = [later(of_one, -one.state_shift) for of_one, one in zip(state_VETS, meant, strict=True)]
        ended_VE = solved_VET.gather(2, last_E1.expand(num, -1, 1)).squeeze(2)
        return self.compared(torch.stack(moved)), ended_VE


def recording(config: RunConfig, spec: EnvSpec, data: Demonstrations, found: Mapping[str, Tensor]) -> Recording | str:
    """Return what can be replayed, or why nothing can. found: features of the data set."""
    if not isinstance(spec.action, Box) or not spec.has_success or spec.repeats != "all":
        return f"not possible: episodes of task {spec.task} cannot be made again, or have no success"
    rows = [data.frames([episode]) for episode in data.episode_F.unique().tolist()[:EPISODES]]
    if max(map(len, rows)) == 1:
        return "not possible: the first episodes have one frame"
    plans, added_FA, exact = first_episodes(spec, len(rows), 0), torch.zeros_like(data.action_FA), PLAN in found
    if not exact and not any(term.source in OWN for term in spec.state):
        return f"not possible: the data set lacks {PLAN}, and the task does not say what of its state a robot measures"
    if exact:
        plans = plans_of(found[PLAN][torch.stack([row[0] for row in rows])])
        added_FA = found[DISTURBANCE].float() if DISTURBANCE in found else added_FA
    parts = [pad_sequence([of[row] for row in rows], True) for of in (data.action_FA, added_FA, data.state_FS)]
    return Recording(config, spec, plans, exact, torch.tensor([len(row) for row in rows]), *parts)


def plans_of(plan_EP: Tensor) -> EpisodePlans:
    """Return the plans of episodes from the feature that ``collect`` writes."""
    *columns, filler_E = plan_EP.T.numpy().copy()
    return EpisodePlans(*(*columns, filler_E.astype(np.bool_)))


def unlike(recorded_MS: Tensor, replayed_VMS: Tensor, signed: bool = False) -> Tensor:
    """Return sqrt(1 - r^2) with the correlation r of recorded entry j and replayed entry k, [V, S, S].

    It is 0 for the same quantity in any unit, and 1 for two that have nothing in common. signed: or other signs.
    """
    both = [values.double() - values.double().mean(-2, keepdim=True) for values in (recorded_MS, replayed_VMS)]
    ours, theirs = (values / values.norm(dim=-2, keepdim=True).clamp(min=1e-12) for values in both)
    r_VSS: Tensor = ours.mT @ theirs
    return (1 - (r_VSS.clamp(min=0) if signed else r_VSS).square()).clamp(min=0).sqrt()


def unshifted(values_FD: Tensor, episode_F: Tensor, frames: int) -> Tensor:
    """Return the values of so many frames later, [F, D], or of the first or last frame of the episode."""
    _, lengths = episode_F.unique_consecutive(return_counts=True)
    end_F = lengths.cumsum(0).repeat_interleave(lengths)
    first_F = end_F - lengths.repeat_interleave(lengths)
    return values_FD[(torch.arange(len(values_FD)) + frames).maximum(first_F).minimum(end_F - 1)]


def check_replay(
    config: RunConfig, spec: EnvSpec, data: Demonstrations, found: Mapping[str, Tensor]
) -> tuple[dict[str, Any], list[Fault], Demonstrations]:
    """Replay the recorded actions; return the result, faults that explain why other states follow, and cured data."""
    recorded = recording(config, spec, data, found)
    if isinstance(recorded, str):
        return {"told": recorded}, [], data
    space, exact, (state_MS,) = spec.action, recorded.exact, recorded.compared(recorded.state_ETS[None])
    assert isinstance(space, Box)
    best, spread_S = Meaning((), torch.eye(space.size + 1)), state_MS.std(0)
    moves_S = spread_S > 1e-4 * state_MS.abs().amax(0).clamp(min=1e-6)  # not by rounding alone
    (replayed_MS,), (solved_E,) = recorded.replay([best])
    off_S = (replayed_MS - state_MS).square().mean(0).sqrt() / spread_S
    off = float(off_S[moves_S].mean()) if moves_S.any() else 0.0
    result: dict[str, Any] = {"told": f"from other starts, since the data set lacks {PLAN}, as collect writes it"}
    if exact:
        result = {"episodes": len(solved_E), "solved": int(solved_E.sum()), "state_error": off}
        told = "{solved} of {episodes} episodes end solved, states are off by {state_error:.1g} of their spread"
        result["told"] = told.format(**result)
        if DISTURBANCE not in found:
            result["told"] += f"; the data set lacks {DISTURBANCE}, so these are replays of its actions alone"
    if off <= FITS:
        return result, [], data
    (unlike_SS,) = unlike(state_MS, replayed_MS[None], not exact)
    alike_S = (1 - unlike_SS.diagonal().square()).sqrt()
    anywhere = float(unlike_SS.amin(0)[moves_S].mean())  # whatever the order of the recorded states is
    first = left = float(unlike_SS.diagonal()[moves_S].mean())
    while anywhere > FITS and left > FITS and len(best.told) < 4:
        tried = meanings(best, space, torch.stack(data.action_FA.aminmax(dim=0)))
        state_VMS, _ = recorded.replay(tried)
        left_V = unlike(state_MS, state_VMS, not exact).diagonal(dim1=1, dim2=2)[:, moves_S].mean(1)
        least = int((left_V <= left_V.min() + FITS).int().argmax())  # the usual one first
        if left_V[least] > (BETTER if exact else MUCH_BETTER) * left:
            break
        best, left, replayed_MS = tried[least], float(left_V[least]), state_VMS[least]
    faults = []
    if not exact or (left < 0.5 * first and (left <= EXPLAINS or best.shift)):  # early actions lack the first one
        where = f"states of replays differ by {first:.2g} of their spread as recorded, by {left:.2g} with this undone"
        serious = exact or bool(data.action_FA.abs().max() > 1 + ROUNDING)
        faults += [one._replace(serious=serious) for one in best.faults("action", space.names, config.data_keys, where)]
        if exact:
            action_FA = best.apply(unshifted(data.action_FA, data.episode_F, best.shift))
            state_FS = unshifted(data.state_FS, data.episode_F, best.state_shift)
            data = replace(data, action_FA=action_FA, state_FS=state_FS)
    if exact and min(left, anywhere) <= EXPLAINS:
        meant = read_states(state_MS.double(), replayed_MS.double(), spec.state_names, moves_S)
        faults += meant.faults("state", spec.state_names, config.data_keys, "compared with the states of replays")
        data = replace(data, state_FS=meant.apply(data.state_FS))
    if not exact and not faults:
        result["alike"] = alike = float(alike_S[moves_S].mean())
        result["told"] += f"; in these the robot's steps are alike to {alike:.2f} (1: the same, 0: nothing in common)"
        faults = unexplained(alike_S, moves_S, spec)
    if exact and not faults:
        frame = int(((replayed_MS - state_MS).abs() > 0.01 * spread_S)[:, moves_S].any(1).int().argmax())
        told = f"recorded actions do not lead to the recorded states, which are off by {off:.2g} of their spread"
        cure = "Give the options that it was recorded with, such as task.robot or randomization"
        cure += "; leave out data_keys to have them searched" if config.data_keys else ""
        faults = [Fault("replay", off > EXPLAINS, told, f"from frame {frame} of the data set on", cure)]
    return result, faults, data


def unexplained(alike_S: Tensor, moves_S: Tensor, spec: EnvSpec) -> list[Fault]:
    """Return a doubt if what the robot measures moves otherwise in replays from other starts: all of it, or a part."""
    own = [term for term in spec.state if term.source in OWN]
    parts = zip(own, *(values_S.split([term.size for term in own]) for values_S in (alike_S, moves_S)), strict=True)
    others = [term.name for term, alike, moves in parts if moves.any() and float(alike[moves].mean()) < UNLIKE]
    if float(alike_S[moves_S].mean()) < EXPLAINED:
        told, where = "recorded actions do not explain how the recorded robot moves", "in replays from other starts"
        cure = "Check that they are actions of this task: not positions, or another robot's"
    elif others:
        told, where = "a part of the robot moves otherwise than in replays from other starts", ", ".join(others)
        cure = "Check sign, unit and order of the actions that move it"
    else:
        return []
    return [Fault("replay", False, told, where, cure)]


def read_states(state_MS: Tensor, replayed_MS: Tensor, names: Sequence[str], moves_S: Tensor) -> Meaning:
    """Compare each replayed entry with the recorded one that is most alike: another one, or one in another unit."""
    unlike_SS, own_S = unlike(state_MS, replayed_MS[None])[0], torch.arange(len(names))
    least_S, nearest_S = unlike_SS.min(0)
    own = (unlike_SS.diagonal() <= (2 * least_S).clamp(min=FITS)) | (least_S > EXPLAINS) | ~moves_S
    from_S = torch.where(own, own_S, nearest_S).tolist()
    x_MS, y_MS = state_MS[:, from_S], replayed_MS
    scale_S = ((x_MS - x_MS.mean(0)) * (y_MS - y_MS.mean(0))).mean(0) / x_MS.var(0, correction=0)
    start_S, spread_S = y_MS.mean(0) - scale_S * x_MS.mean(0), y_MS.std(0)
    other = moves_S & (least_S <= EXPLAINS) & ((y_MS - x_MS).square().mean(0).sqrt() > EXPLAINS * spread_S)
    matrix = torch.eye(len(names) + 1)[[*from_S, -1]]
    matrix[:-1, :-1] *= torch.where(other, scale_S, 1.0)[:, None]
    matrix[:-1, -1] = torch.where(other & (start_S.abs() > FITS * spread_S), start_S, 0.0)
    told = {
        "order": [f"{names[k]} in the place of {names[from_S[k]]}" for k in range(len(names)) if from_S[k] != k],
        "units": [f"{names[k]} times {1 / scale_S[k]:.4g}" for k in own_S[other].tolist()],
    }
    return Meaning(tuple((x, f"not as in the simulator: {listed(told[x])}") for x in told if told[x]), matrix)


def check_imitation(
    config: RunConfig, data: Demonstrations, found: Mapping[str, Tensor]
) -> tuple[dict[str, Any], list[Fault]]:
    """Imitate the first episode alone, and act from its start if that is known."""
    frames = data.frames([int(data.episode_F[0])])
    nothing_L, text = torch.zeros(len(frames)), data.instructions[int(data.instruction_F[0])]
    images = {camera: images[frames] for camera, images in data.images.items()}
    extra = {DISTURBANCE: found[DISTURBANCE][frames]} if DISTURBANCE in found else {}
    one = Episode(data.state_FS[frames], data.action_FA[frames], nothing_L, nothing_L.bool(), text, images, extra)
    updates = min(UPDATES, config.algo.options.updates)
    algo = replace(config.algo, options=replace(config.algo.options, updates=updates, validate_every=updates))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "episode"
        write(path, [one, one], factories.make_spec(config))  # to train on, and to validate on
        trainer = ImitationTrainer(replace(config, data=str(path), data_keys={}, algo=algo), path, new=True)
        with trainer:
            for _ in trainer.iterations(threading.Event(), running_s() + SECONDS):
                pass
            trainer.finish()
    policy, rows = trainer.policy, torch.arange(len(frames))
    wanted_LEA, valid_LE = trainer.data.chunks(rows, policy.execute)
    with torch.no_grad():
        planned_LEA = policy.plan(trainer.data.obs(rows))[:, : policy.execute].clamp(-1, 1)
    error_LE = (planned_LEA - wanted_LEA).square().mean(-1).masked_fill(~valid_LE, 0.0)
    error = float((error_LE.sum() / valid_LE.sum() / one.action_LA.var(0, correction=0).mean().clamp(min=1e-2)).sqrt())
    told = f"imitating one episode with {trainer.iteration} updates leaves {error:.2g} of the spread of its actions"
    where = f"in the first episode, most of all in its frame {int(error_LE.sum(1).argmax())}"
    cure = "Look for actions that differ where observations do not, or that depend on something that is not observed"
    fault = Fault("overfit", trainer.iteration == updates, told, where, cure)
    result: dict[str, Any] = {"updates": trainer.iteration, "error": error, "solved": None}
    if PLAN in found:
        with closing(factories.make_acting_env(config, 1, 1)) as env:
            ended = run_episodes(policy, env, plans_of(found[PLAN][frames[:1]]), config.runtime.eval_noise)
            result["solved"] = ended is not None and bool(ended.once[SUCCESS][0])
        seen = "solves it too" if result["solved"] else "does not solve it: one episode does not show how to come back"
        told = f"{told}; acting from its start, the policy {seen}"
    return result | {"told": told}, [fault] if error > LEARNED else []


def check_numbers(data: Demonstrations, time_F1: Tensor | None, config: RunConfig, spec: EnvSpec) -> list[Fault]:
    """Return the faults that the numbers alone show. UserError for data of another task."""
    try:
        doubts, serious = check_fits(data, spec, Path(str(config.data)), config.data_keys), False
    except Unfit as error:
        doubts, serious = [str(error)], True
    faults = []
    for doubt in doubts:
        what, _, options = doubt.partition(IF_SO)
        cure = f"If so, give {options}" if options else "Check how it was recorded"
        faults.append(Fault("numbers", serious, what, "in all frames", cure))
    if unused := unused_cameras(config, spec):
        faults.append(Fault("cameras", False, unused[0], "in all frames", unused[1]))
    normalizer = RunningNormalizer(spec.state_dim)
    normalizer.fit(data.state_FS)
    clipped_S = (normalizer(data.state_FS).abs() >= normalizer.clip).float().mean(0)
    if names := [f"{spec.state_names[i]} in {clipped_S[i]:.2%} of the frames" for i in clipped_S.nonzero()[:, 0]]:
        told = f"the normaliser clips entries of the state at {normalizer.clip:g} standard deviations: {len(names)}"
        faults.append(Fault("outliers", False, told, listed(names), "Check these measurements"))
    return faults + check_frames(data, time_F1, spec)


def examine(config: RunConfig) -> tuple[dict[str, Any], list[Fault]]:
    """Examine the run's data set; return what was done, and the faults, serious ones first.

    UserError if there is no data set, or it is one of another task.
    """
    path, spec = Path(str(config.data)), factories.make_spec(config)
    result: dict[str, Any] = {"data": str(path), "task": spec.task, "replay": None, "overfit": None}
    try:
        data = read(path, config.data_keys, [camera.name for camera in spec.cameras])
    except Unfit as error:
        return result, [Fault("numbers", True, error.what, "in the frame that is named", error.cure)]
    result |= {"episodes": len(data.episode_F.unique()), "frames": len(data.episode_F)}
    found = read_features(path, ("timestamp", DISTURBANCE, PLAN))
    numbers = check_numbers(data, found.get("timestamp"), config, spec)
    result["replay"], faults, data = check_replay(config, spec, data, found)
    tried = "state_error" in result["replay"] or any(fault.name in READ for fault in faults)
    if tried:  # what numbers suggest
        numbers = check_numbers(data, found.get("timestamp"), config, spec)
        numbers = [one._replace(cure="Check how it was recorded") if one.name == "numbers" else one for one in numbers]
    if not any(fault.serious and fault.name == "numbers" for fault in numbers):
        result["overfit"], unlearned = check_imitation(config, data, found)
        faults += unlearned
    return result, sorted([*faults, *numbers], key=lambda fault: not fault.serious)
