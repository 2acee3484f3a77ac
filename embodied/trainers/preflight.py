"""Examine demonstrations before imitation: replay their actions in the simulator, and overfit a policy to one episode.

plans and recorded actions ──► simulator ──► states ──compared with the recorded ones──► faults
               one episode ──► ImitationTrainer ──► policy ──► its error, and an episode from the same start

If the recorded actions do not lead to the recorded states, others are tried: all that differ from the recorded ones in
one step in time, one unit, one sign or one exchange; then those that differ from the best of them in one more.
"""

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import permutations
from math import pi
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
from embodied.data.columns import PERCENT, ROUNDING, Conversion, Unfit, option_words, physical
from embodied.data.faults import Fault, check_frames, listed
from embodied.data.lerobot import DISTURBANCE, PLAN, check_fits, read_features
from embodied.policies.normalizer import RunningNormalizer
from embodied.runtime import threads
from embodied.runtime.evaluator import run_episodes
from embodied.session import factories
from embodied.session.config import RunConfig
from embodied.trainers.imitation import ImitationTrainer

EPISODES = 3  # that are replayed
FITS, EXPLAINS = 1e-3, 0.05  # differences of states that rounding explains, and that a cure may leave
BETTER, MOST_FAULTS = 0.9, 4  # share of the difference that each further fault may leave; faults at once
UPDATES, SECONDS, LEARNED = 1000, 30.0, 0.5  # of the imitation of one episode: limits, and the largest error
SIGN = "the other sign"
FACTORS = {"degrees": pi / 180, "radians": 180 / pi, "mm": 1e-3, "m": 1e3, SIGN: -1.0}
Result = tuple[dict[str, Any], list[Fault]]


class Meaning(NamedTuple):
    """Numbers as they may be meant, and the names and descriptions of the faults that this undoes."""

    told: tuple[tuple[str, str], ...]
    matrix: Tensor
    """Homogeneous, [D + 1, D + 1]: maps recorded numbers to meant ones."""
    shift: int = 0
    state_shift: int = 0
    """Frames by which actions, and states, are meant to be earlier."""

    def apply(self, numbers: Tensor) -> Tensor:
        return numbers @ self.matrix[:-1, :-1].T + self.matrix[:-1, -1]

    def after(self, first: "Meaning") -> "Meaning":
        shifts = self.shift + first.shift, self.state_shift + first.state_shift
        return Meaning(first.told + self.told, self.matrix @ first.matrix, *shifts)

    def faults(self, what: str, names: Sequence[str], where: str) -> list[Fault]:
        """Return the faults of the column ``what``, state or action; each names the options that cure all."""
        linear = self.matrix[:-1, :-1]
        order = linear.abs().argmax(1, keepdim=True)
        entries = json.dumps([names[i] for i in order[:, 0]], separators=(",", ":"))
        cures = {"shift": "Each frame must have what was observed, and the action that was chosen then"}
        cures["order"] = f"'data_keys.{what}.entries={entries}'"
        cures["units"] = cures["sign"] = option_words(what, linear.gather(1, order)[:, 0], self.matrix[:-1, -1])
        return [Fault(f"{what} {name}", True, told, where, cures[name]) for name, told in self.told]


def meanings(best: Meaning, space: Box, action_ETA: Tensor) -> list[Meaning]:
    """Return what recorded actions may be meant as, if they have one fault more than those that ``best`` undoes."""
    names, eye, found = space.names, torch.eye(space.size + 1), list[Meaning]()
    for frames, late in ((1, "late"), (-1, "early")):
        found.append(Meaning((("shift", f"actions are one step {late}"),), eye, frames, 0))
        found.append(Meaning((("shift", f"states are one step {late}"),), eye, 0, frames))
    for first, *others in (places for count in (2, 3) for places in permutations(range(space.size), count)):
        if first < min(others):
            matrix, told = eye.clone(), ", ".join(names[i] for i in (first, *others))
            matrix[[first, *others]] = eye[[*others, first]]
            found.append(Meaning((("order", f"{told} are in each other's places"),), matrix))
    units: dict[tuple[str, int], dict[int, Conversion]] = {}
    for i, term in enumerate(space.terms):
        for source, conversions in enumerate((map(Conversion, FACTORS, FACTORS.values()), physical(term), PERCENT)):
            for conversion in conversions:
                units.setdefault((conversion.unit, source), {})[i] = conversion
    for (unit, _), of_unit in units.items():
        all_but_last = dict(list(of_unit.items())[:-1])  # the last is the gripper, whose unit is often another one
        for entries in filter(None, (of_unit, all_but_last, *({i: conversion} for i, conversion in of_unit.items()))):
            matrix, told = eye.clone(), ", ".join(names[i] for i in entries)
            for i, conversion in entries.items():
                matrix[i, i], matrix[i, -1] = conversion.scale, conversion.offset
            name, word = ("sign", "with") if unit == SIGN else ("units", "in")
            one = Meaning(((name, f"{told} {word} {unit}"),), matrix)
            if one.after(best).apply(action_ETA)[..., list(entries)].abs().max() <= 1 + ROUNDING:
                found.append(one)
    return [one.after(best) for one in found]


class Recording(NamedTuple):
    """The first recorded episodes with their plans, recorded actions, and what was added to these in execution.

    T: the longest length. M: the number of all frames.
    """

    config: RunConfig
    spec: EnvSpec
    plans: EpisodePlans
    length_E: Tensor
    action_ETA: Tensor
    added_ETA: Tensor
    state_MS: Tensor

    def replay(self, meant: Sequence[Meaning]) -> tuple[Tensor, Tensor]:
        """Execute the actions as they may be meant; return the states [V, M, S], and success after the ends [V, E]."""
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
        compared = [later(of_one, -one.state_shift) for of_one, one in zip(state_VETS, meant, strict=True)]
        ended_VE = solved_VET.gather(2, last_E1.expand(num, -1, 1)).squeeze(2)
        return torch.stack(compared)[:, frame_T <= last_E1], ended_VE


def recording(config: RunConfig, spec: EnvSpec, data: Demonstrations, found: Mapping[str, Tensor]) -> Recording | str:
    """Return what can be replayed, or why nothing can. found: features of the data set."""
    if not isinstance(spec.action, Box) or not spec.has_success or spec.repeats != "all":
        return f"not possible: episodes of task {spec.task} cannot be made again, or have no success"
    if PLAN not in found:
        return f"not possible: the data set does not keep how its episodes began ({PLAN}, as embodied.collect does)"
    rows = [data.frames([episode]) for episode in data.episode_F.unique().tolist()[:EPISODES]]
    *columns, filler_E = found[PLAN][torch.stack([row[0] for row in rows])].T.numpy().copy()
    plans, added_FA = EpisodePlans(*(*columns, filler_E.astype(np.bool_))), found[DISTURBANCE].float()
    action_ETA, added_ETA = (pad_sequence([of[row] for row in rows], True) for of in (data.action_FA, added_FA))
    lengths = torch.tensor([len(row) for row in rows])
    return Recording(config, spec, plans, lengths, action_ETA, added_ETA, data.state_FS[torch.cat(rows)])


def unlike(recorded_MS: Tensor, replayed_VMS: Tensor) -> Tensor:
    """Return sqrt(1 - r^2) with the correlation r of recorded entry j and replayed entry k, [V, S, S].

    It is 0 for the same quantity in any unit, and 1 for two that have nothing in common.
    """
    both = [values.double() - values.double().mean(-2, keepdim=True) for values in (recorded_MS, replayed_VMS)]
    ours, theirs = (values / values.norm(dim=-2, keepdim=True).clamp(min=1e-12) for values in both)
    r_VSS: Tensor = ours.mT @ theirs
    return (1 - r_VSS.square()).clamp(min=0).sqrt()


def check_replay(recorded: Recording) -> Result:
    """Replay the recorded actions; return the result, and faults that explain why other states follow."""
    space, state_MS, names = recorded.spec.action, recorded.state_MS, recorded.spec.state_names
    assert isinstance(space, Box)
    best, spread_S = Meaning((), torch.eye(space.size + 1)), state_MS.std(0)
    moves_S = spread_S > 1e-4 * state_MS.abs().amax(0).clamp(min=1e-6)  # not by rounding alone
    (replayed_MS,), (solved_E,) = recorded.replay([best])
    off = float(((replayed_MS - state_MS).square().mean(0).sqrt() / spread_S)[moves_S].mean())
    result = {"episodes": len(recorded.plans), "state_error": off, "solved": solved_E.tolist()}
    if off <= FITS or not moves_S.any():
        return result, []
    (unlike_SS,) = unlike(state_MS, replayed_MS[None])
    anywhere = float(unlike_SS.amin(0)[moves_S].mean())  # whatever the order of the recorded states is
    first = left = float(unlike_SS.diagonal()[moves_S].mean())
    while anywhere > FITS and left > FITS and len(best.told) < MOST_FAULTS:
        tried = meanings(best, space, recorded.action_ETA)
        state_VMS, _ = recorded.replay(tried)
        left_V = unlike(state_MS, state_VMS).diagonal(dim1=1, dim2=2)[:, moves_S].mean(1)
        least = int(left_V.argmin())
        if left_V[least] > BETTER * left:
            break
        best, left, replayed_MS = tried[least], float(left_V[least]), state_VMS[least]
    faults = []
    if left < 0.5 * first:
        where = f"states are off by {first:.2g} of their spread in replays as recorded, by {left:.2g} in others"
        faults += best.faults("action", space.names, where)
    if min(left, anywhere) <= EXPLAINS:
        faults += check_states(state_MS.double(), replayed_MS.double(), names, moves_S)
    if not faults:
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
    error = float((error_LE.sum() / valid_LE.sum() / one.action_LA.var(0).mean().clamp(min=1e-12)).sqrt())
    result: dict[str, Any] = {"updates": trainer.iteration, "error": error, "solved": None}
    if isinstance(recorded, Recording):
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
