"""Examine demonstrations before imitation: replay their actions in the simulator, and overfit a policy to one episode.

plans and recorded actions ──► simulator ──► states ──compared with the recorded ones──► faults
               one episode ──► ImitationTrainer ──► policy ──► its error, and an episode from the same start

If the recorded actions do not lead to the recorded states, others are tried: all that differ from the recorded ones in
one step in time, one unit, one sign or one exchange; then those that differ from the best of them in one more.
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
from embodied.data.columns import Unfit
from embodied.data.faults import Fault, check_frames, listed
from embodied.data.lerobot import DISTURBANCE, PLAN, check_fits, read_features
from embodied.data.meanings import Meaning, meanings
from embodied.envs import first_episodes
from embodied.policies.normalizer import RunningNormalizer
from embodied.runtime import threads
from embodied.runtime.evaluator import run_episodes
from embodied.session import factories
from embodied.session.config import RunConfig
from embodied.trainers.imitation import ImitationTrainer

EPISODES = 3  # that are replayed
FITS, EXPLAINS = 1e-3, 0.05  # differences of states that rounding explains, and that a cure may leave
BETTER, MUCH_BETTER = 0.9, 0.75  # share of the difference that each further fault may leave; if starts are others
MOST_FAULTS = 4  # at once
UPDATES, SECONDS, LEARNED = 1000, 30.0, 0.5  # of the imitation of one episode: limits, and the largest error
Result = tuple[dict[str, Any], list[Fault]]


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
        own_S = [term.source in ("measured", "kinematics") for term in self.spec.state for _ in range(term.size)]
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
    if exact:
        *columns, filler_E = found[PLAN][torch.stack([row[0] for row in rows])].T.numpy().copy()
        plans, added_FA = EpisodePlans(*(*columns, filler_E.astype(np.bool_))), found[DISTURBANCE].float()
    parts = [pad_sequence([of[row] for row in rows], True) for of in (data.action_FA, added_FA, data.state_FS)]
    return Recording(config, spec, plans, exact, torch.tensor([len(row) for row in rows]), *parts)


def unlike(recorded_MS: Tensor, replayed_VMS: Tensor, signed: bool = False) -> Tensor:
    """Return sqrt(1 - r^2) with the correlation r of recorded entry j and replayed entry k, [V, S, S].

    It is 0 for the same quantity in any unit, and 1 for two that have nothing in common. signed: or other signs.
    """
    both = [values.double() - values.double().mean(-2, keepdim=True) for values in (recorded_MS, replayed_VMS)]
    ours, theirs = (values / values.norm(dim=-2, keepdim=True).clamp(min=1e-12) for values in both)
    r_VSS: Tensor = ours.mT @ theirs
    return (1 - (r_VSS.clamp(min=0) if signed else r_VSS).square()).clamp(min=0).sqrt()


def check_replay(recorded: Recording) -> Result:
    """Replay the recorded actions; return the result, and faults that explain why other states follow."""
    space, exact, (state_MS,) = recorded.spec.action, recorded.exact, recorded.compared(recorded.state_ETS[None])
    assert isinstance(space, Box)
    best, spread_S = Meaning((), torch.eye(space.size + 1)), state_MS.std(0)
    moves_S = spread_S > 1e-4 * state_MS.abs().amax(0).clamp(min=1e-6)  # not by rounding alone
    (replayed_MS,), (solved_E,) = recorded.replay([best])
    off_S = (replayed_MS - state_MS).square().mean(0).sqrt() / spread_S
    off = float(off_S[moves_S].mean()) if moves_S.any() else 0.0
    result = {"episodes": len(recorded.plans), "starts": "recorded", "state_error": off, "solved": solved_E.tolist()}
    if not exact:
        result = {"episodes": len(recorded.plans), "starts": f"others: the data set lacks {PLAN}, as collect writes it"}
    if off <= FITS:
        return result, []
    (unlike_SS,) = unlike(state_MS, replayed_MS[None], not exact)
    anywhere = float(unlike_SS.amin(0)[moves_S].mean())  # whatever the order of the recorded states is
    first = left = float(unlike_SS.diagonal()[moves_S].mean())
    while anywhere > FITS and left > FITS and len(best.told) < MOST_FAULTS:
        tried = meanings(best, space, recorded.action_ETA)
        state_VMS, _ = recorded.replay(tried)
        left_V = unlike(state_MS, state_VMS, not exact).diagonal(dim1=1, dim2=2)[:, moves_S].mean(1)
        least = int(left_V.argmin())
        if left_V[least] > (BETTER if exact else MUCH_BETTER) * left:
            break
        best, left, replayed_MS = tried[least], float(left_V[least]), state_VMS[least]
    faults = []
    if left < 0.5 * first or not exact:
        what = "states" if exact else "steps of the robot, from other starts,"
        where = f"{what} are off by {first:.2g} of their spread in replays as recorded, by {left:.2g} in others"
        faults += [fault._replace(serious=exact) for fault in best.faults("action", space.names, where)]
    if exact and min(left, anywhere) <= EXPLAINS:
        faults += check_states(state_MS.double(), replayed_MS.double(), recorded.spec.state_names, moves_S)
    if exact and not faults:
        frame = int(((replayed_MS - state_MS).abs() > 0.01 * spread_S)[:, moves_S].any(1).int().argmax())
        told = f"recorded actions do not lead to the recorded states, which are off by {off:.2g} of their spread"
        cure = "Give the options that it was recorded with, such as task.robot or randomization"
        faults = [Fault("replay", off > EXPLAINS, told, f"from frame {frame} of the data set on", cure)]
    return result, faults


def check_states(state_MS: Tensor, replayed_MS: Tensor, names: Sequence[str], moves_S: Tensor) -> list[Fault]:
    """Compare each replayed entry with the recorded one that is most alike: another one, or one in another unit."""
    unlike_SS, matrix, told = unlike(state_MS, replayed_MS[None])[0], torch.eye(len(names) + 1), dict[str, list[str]]()
    for k in moves_S.nonzero()[:, 0].tolist():
        j = int(unlike_SS[:, k].argmin())
        j = k if unlike_SS[k, k] <= max(FITS, 2 * float(unlike_SS[j, k])) else j
        if unlike_SS[j, k] > EXPLAINS:
            continue
        if j != k:
            told.setdefault("order", []).append(f"{names[k]} in the place of {names[j]}")
        x, y, scale, start = state_MS[:, j], replayed_MS[:, k], 1.0, 0.0
        if (y - x).square().mean().sqrt() > EXPLAINS * y.std():
            scale = float(torch.stack((x, y)).cov()[0, 1] / x.var())
            start = float(y.mean() - scale * x.mean())
            kind = "sign" if abs(scale + 1) < EXPLAINS else "units"
            told.setdefault(kind, []).append(f"{names[k]} times {1 / scale:.4g}")
        matrix[k, k], matrix[k, -1] = 0.0, start if abs(start) > FITS * y.std() else 0.0
        matrix[k, j] = scale
    meant = Meaning(tuple((name, f"not as in the simulator: {listed(texts)}") for name, texts in told.items()), matrix)
    return meant.faults("state", names, "compared with the states of replays")


def check_imitation(config: RunConfig, data: Demonstrations, recorded: Recording | str) -> Result:
    """Imitate the first episode alone, and act from its start if that is known."""
    frames = data.frames([int(data.episode_F[0])])
    nothing_L, text = torch.zeros(len(frames)), data.instructions[int(data.instruction_F[0])]
    images = {camera: images[frames] for camera, images in data.images.items()}
    one = Episode(data.state_FS[frames], data.action_FA[frames], nothing_L, nothing_L.bool(), text, images)
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
    result: dict[str, Any] = {"updates": trainer.iteration, "error": error, "solved": None}
    if isinstance(recorded, Recording) and recorded.exact:
        with closing(factories.make_acting_env(config, 1, 1)) as env:
            ended = run_episodes(policy, env, recorded.plans.rows(slice(1)), config.runtime.eval_noise)
            result["solved"] = ended is not None and bool(ended.once[SUCCESS][0])
    told = f"imitating one episode with {trainer.iteration} updates leaves {error:.2g} of the spread of its actions"
    where = f"in the first episode, most of all in its frame {int(error_LE.sum(1).argmax())}"
    cure = "Actions differ where observations do not, or depend on something that is not observed"
    return result, [Fault("overfit", trainer.iteration == updates, told, where, cure)] if error > LEARNED else []


def check_numbers(data: Demonstrations, time_F1: Tensor | None, config: RunConfig, spec: EnvSpec) -> list[Fault]:
    """Return the faults that the numbers alone show. UserError for data of another task."""
    try:
        doubts = check_fits(data, spec, Path(str(config.data)), config.data_keys)
        faults = [Fault("units", False, doubt, "in all frames", "") for doubt in doubts]
    except Unfit as error:
        faults = [Fault("numbers", True, str(error), "in all frames", "")]
    normalizer = RunningNormalizer(spec.state_dim)
    normalizer.fit(data.state_FS)
    clipped_S = (normalizer(data.state_FS).abs() >= normalizer.clip).float().mean(0)
    if names := [f"{spec.state_names[i]} in {clipped_S[i]:.2%} of the frames" for i in clipped_S.nonzero()[:, 0]]:
        told = f"the normaliser clips {len(names)} entries of the state, at {normalizer.clip:g} standard deviations"
        faults.append(Fault("outliers", False, told, listed(names), "Remove false measurements"))
    return faults + check_frames(data, time_F1, spec)


def examine(config: RunConfig) -> Result:
    """Examine the run's data set; return what was done, and the faults, serious ones first.

    UserError if there is no data set, or it is one of another task.
    """
    path, spec = Path(str(config.data)), factories.make_spec(config)
    result: dict[str, Any] = {"data": str(path), "task": spec.task, "replay": None, "overfit": None}
    try:
        data = read(path, config.data_keys, [camera.name for camera in spec.cameras])
    except Unfit as error:
        faults = [Fault("numbers", True, str(error), "in the frame that is named", "Remove or mend such frames")]
    else:
        result |= {"episodes": len(data.episode_F.unique()), "frames": len(data.episode_F)}
        found = read_features(path, ("timestamp", DISTURBANCE, PLAN))
        recorded = recording(config, spec, data, found)
        numbers = check_numbers(data, found.get("timestamp"), config, spec)
        fits = all(fault.name != "numbers" for fault in numbers)
        result["replay"], wrong = check_replay(recorded) if isinstance(recorded, Recording) else (recorded, [])
        result["overfit"], unlearned = check_imitation(config, data, recorded) if fits else (None, [])
        faults = [*wrong, *unlearned, *numbers]
    faults.sort(key=lambda fault: not fault.serious)
    given = " (of the numbers that your data_keys give)" if config.data_keys else ""
    faults = [fault._replace(cure=fault.cure + given * ("data_keys" in fault.cure)) for fault in faults]
    return result, faults
