"""Make the episodes of an evaluation again: ``python -m embodied.replay eval=<run>/eval/<name>.json [key=value ...]``

  episode=17                  one episode alone, by its number in the evaluation; by default all of them
  video=true                  film that episode into the run's videos/, or the first four without episode=
  device=auto  num_threads=0  as for embodied.eval

Policy, environments, noise and delays are those of the evaluation. Each episode must have the same actions, bit for
bit, and the same return, length and outcomes. The figures of the file must be those of the episodes; with episode=,
its success alone is checked, by the kept records. Exit code 1: an episode or a figure differs. 2: the checkpoint has
changed or is gone. Last line of stdout: {"eval", "episodes", "success_at_end", "differing", "outcomes_differing",
"figures_differing", "made_with", "replayed_with", ...}; what differs has the values that it had and has. Other
machines, versions and instruction sets may round differently: see "made_with" and "replayed_with".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.errors import UserError, wrong_value
from embodied.core.options import DeviceName, NonNegativeInt, Text, config_dataclass
from embodied.report.progress import Line
from embodied.session.command import Failed, command
from embodied.session.config import read_acting
from embodied.session.files import check_run_dir, read_json

if TYPE_CHECKING:
    from embodied.core.episodes import EpisodePlans
    from embodied.session.config import RunConfig

SOLVED = "success_at_end"
SHOWN = 10  # differing episodes that are printed


@config_dataclass
class ReplayConfig:
    eval: Text
    episode: NonNegativeInt | None = None
    video: bool = False
    device: DeviceName = "auto"
    num_threads: NonNegativeInt = 0


@command(first="eval")
def main(options: ReplayConfig) -> dict[str, Any]:
    """Make the episodes again; return the contract's result. UserError for bad input, Failed if an episode differs."""
    path = Path(options.eval)
    result, run_dir = read_json(path), path.parent.parent if path.parent.name else path.absolute().parents[1]
    if "checkpoint_sha256" not in result:
        what = "is of an evaluation that kept no episodes" if result else "is not the result of an evaluation"
        what = what if path.exists() else "does not exist"
        raise UserError(f"eval={path} {what}: give a file that embodied.eval or the end of a training wrote into eval/")
    check_run_dir(run_dir)
    preset = result.get("randomization")
    config = read_acting(run_dir, options.device, result.get("sim"), None if preset == "run" else preset)
    from embodied.runtime.checkpoint import policy_hash
    from embodied.session import factories
    from embodied.session.kept_episodes import made_with, read_episodes
    from embodied.session.results import filming
    from embodied.session.results.page import flat

    if not (run_dir / "checkpoints" / result["checkpoint"]).is_dir():
        raise UserError(f"eval={path} is of checkpoint {result['checkpoint']}, which {run_dir} no longer has")
    found = factories.load_checkpoint(run_dir, result["checkpoint"])
    if (now := policy_hash(found.path)) != result["checkpoint_sha256"]:
        hashes = f"SHA-256 {now[:12]}..., it was {result['checkpoint_sha256'][:12]}..."
        raise UserError(f"{found.path} has changed since the evaluation: its policy has {hashes}")
    policy, spec = factories.load_policy(config, found), factories.make_spec(config)
    delay = factories.delay_steps(spec, config.max_delay, result.get("delay_ms"))
    before, chosen = read_episodes(path, result["episodes"]), options.episode
    if chosen is not None and chosen >= len(before):
        raise wrong_value("episode", str(chosen), f"0 to {len(before) - 1}")

    plans = factories.evaluation_plans(spec, len(before), result["seed"])
    if chosen is not None:
        plans = alone(config, plans, chosen, before[chosen]["env"])
    parts = [result, *([result["other_noise"]] if chosen is None and "other_noise" in result else [])]
    size = f"{len(parts) * len(before)} episodes" if chosen is None else f"episode {chosen}"
    with closing(Line()) as line:
        again, *others = factories.evaluate_policy(
            config, policy, plans, result["seed"], [part["noise"] for part in parts], options.num_threads, delay,
            line.evaluating(size, "replayed"), keep=True,
        )  # fmt: skip
    was, now = before if chosen is None else [before[chosen]], again.pop("records")
    differing = [row for pair in zip(was, now, strict=True) if (row := difference(*pair))]
    again |= {"other_noise": others[0]} if others else {}
    said, given = flat(result), flat(again)
    if chosen is not None:  # the rest of the figures takes a replay of all episodes
        given = {SOLVED: fmean(row[SOLVED] for row in before)} if SOLVED in before[0] else {}
    wrong = {key: {"was": said[key], "is": value} for key, value in given.items() if said.get(key, value) != value}
    report: dict[str, Any] = {
        "eval": str(path), "episodes": len(was), SOLVED: again.get(SOLVED), "differing": differing,
        "outcomes_differing": sum(any(key.endswith("_at_end") for key in row["was"]) for row in differing),
        "figures_differing": wrong, "made_with": result["made_with"], "replayed_with": made_with(),
    }  # fmt: skip
    if options.video:
        first, number = (0, min(filming.ENVS, len(before))) if chosen is None else (chosen, 1)
        video = run_dir / "videos" / f"{path.stem}_episode{first}.mp4"
        with filming.filming(config, number, delay) as filmed:
            filming.film_evaluation(*filmed, policy, video, result["seed"], result["noise"], first)
        report["video"] = str(video)
    return verdict(report, before)


def verdict(report: dict[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Say what differs, or that nothing does; return the report. Failed with exit code 1 if something differs."""
    differing, wrong, number = report["differing"], report["figures_differing"], report["episodes"]
    for row in differing[:SHOWN]:
        print(f"episode {row['episode']}: was {row['was']}, is {row['is']}", file=sys.stderr)
    for key, values in wrong.items():
        print(f"{key}: the file says {values['was']}, its episodes give {values['is']}", file=sys.stderr)
    if differing or wrong:
        what = f"episodes that differ: {len(differing)} of {number}, {report['outcomes_differing']} in an outcome"
        raise Failed(f"{what}; figures of the file that differ: {len(wrong)}", report, 1)
    text = "1 episode is" if number == 1 else f"{number} episodes and the figures are"
    text += " the same, action by action"
    if SOLVED in records[0]:
        one = f", with{'' if report[SOLVED] else 'out'} success at its end" if number == 1 else ""
        text += f"{one}; {sum(row[SOLVED] for row in records)} of {len(records)} end with success"
    print(text, file=sys.stderr)
    return report


def alone(config: RunConfig, plans: EpisodePlans, episode: int, env: int) -> EpisodePlans:
    """Return one episode in the env that it had. It also fills the other envs, so that products round alike."""
    from embodied.session.factories import acting_envs

    rows = np.arange(acting_envs(config, len(plans)))
    chosen = plans.rows(np.full(len(rows), episode))
    chosen.filler_n[:] = rows != min(env, rows[-1])  # earlier versions had more envs
    return chosen


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return in what an episode differs; None for nothing. Its number in a replay of one episode is another one."""
    keys = [key for key, value in was.items() if key != "episode" and now[key] != value]
    if not keys:
        return None
    return {"episode": was["episode"], "was": {key: was[key] for key in keys}, "is": {key: now[key] for key in keys}}


if __name__ == "__main__":
    sys.exit(main())
