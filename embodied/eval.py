"""Evaluate a trained policy: ``python -m embodied.eval <run dir> [key=value ...]``

  episodes=200  seed=0        number of full-length episodes; their initial states depend on the seed alone. With the
                              seed and number of the run they are those of its final evaluation
  checkpoint=last|step_<n>    checkpoint to evaluate
  noise=zero|seeded           noise that a decision starts from: none, or random from the seed of its episode; the
                              default is the run's runtime.eval_noise
  delay_ms=100                latency of inference from an episode's second decision on, in whole control steps; the
                              default is that of training: none without policy.max_delay
  randomization=none          what varies between episodes: none, or sim2real; the default is that of the run
  sim=warp                    simulator, with its default options; the default is that of the run
  video=true                  also write videos/<checkpoint>_seed<seed>.mp4 in the run directory, with the instructions
  device=auto                 device of the policy, and of a simulator that has one: cpu, cuda or cuda:<index>; auto is
                              CUDA if there is one
  num_threads=0               threads of the simulation; 0 is all cores

With either kind of noise, an evaluation repeats exactly. Last line of stdout, also written to the run's eval/: {"task",
"episodes", "success_once", "success_at_end", "success_at_end_ci95", "return_mean", "episode_length_mean", "seed",
"noise", "delay_ms", "randomization", "sim", ...}. If some instructions are held out from training, "splits" has the
success per split of the instructions and per goal. A delay_ms of null was drawn in each decision, as in training.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from embodied.core.options import DeviceName, NonNegative, NonNegativeInt, PositiveInt, Seed, Text, config_dataclass
from embodied.report.progress import Line, success_text
from embodied.runtime.config import EvalNoise
from embodied.session.command import command
from embodied.session.config import read_acting
from embodied.session.files import read_json


@config_dataclass
class EvalConfig:
    run: str
    episodes: PositiveInt = 200
    seed: Seed = 0
    checkpoint: str = "last"
    video: bool = False
    noise: EvalNoise | None = None
    delay_ms: NonNegative | None = None
    randomization: Text | None = None
    sim: Text | None = None
    device: DeviceName = "auto"
    num_threads: NonNegativeInt = 0


@command(first="run")
def main(options: EvalConfig) -> dict[str, Any]:
    """Evaluate a checkpoint of a run; return the contract's result. UserError for bad input."""
    run_dir = Path(options.run)
    config = read_acting(run_dir, options.device, options.sim, options.randomization)
    from embodied.session import factories  # imports torch
    from embodied.session.kept_episodes import write_evaluation
    from embodied.session.results import filming

    found, spec = factories.load_checkpoint(run_dir, options.checkpoint), factories.make_spec(config)
    policy = factories.load_policy(config, found)
    delay = factories.delay_steps(spec, config.max_delay, options.delay_ms)
    plans = factories.evaluation_plans(spec, options.episodes, options.seed)
    noise = options.noise or config.runtime.eval_noise
    with ExitStack() as opened:
        filmed = opened.enter_context(filming.filming(config, filming.ENVS, delay)) if options.video else None
        episodes = f"{options.episodes} episodes"
        print(f"evaluating {found.path} on {config.task.title}: {episodes}, seed {options.seed}", file=sys.stderr)
        with closing(Line()) as line:
            [result] = factories.evaluate_policy(
                config, policy, plans, options.seed, [noise], options.num_threads, delay,
                line.evaluating(episodes), keep=True,
            )  # fmt: skip
        delay_ms = options.delay_ms if config.max_delay else options.delay_ms or 0.0
        result |= {"delay_ms": delay_ms, "randomization": options.randomization or "run", "sim": config.sim.name}
        for split, rates in result.get("splits", {}).items():
            if "success_at_end" in rates:
                print(f"instructions of split {split}: success {success_text(rates)}", file=sys.stderr)
        result |= {"run": str(run_dir), "checkpoint": found.path.name, "env_steps": found.env_steps}
        name = f"{found.path.name}_seed{options.seed}" + ("_seeded" if noise == "seeded" else "")
        name += "" if options.delay_ms is None else f"_delay{options.delay_ms:g}ms"
        name += "".join("" if choice is None else f"_{choice}" for choice in (options.randomization, options.sim))
        path = run_dir / "eval" / f"{name}_episodes{options.episodes}.json"
        result = write_evaluation(path, result, found.path)
        final = read_json(run_dir / "eval" / f"final_{found.env_steps}.json")
        if final and all(result.get(key) == value for key, value in final.items() if key != "other_noise"):
            others = f"seed={options.seed + 1} draws other episodes"
            print(f"these are the episodes and figures of the final evaluation; {others}", file=sys.stderr)
        if filmed is not None:
            path, where = run_dir / "videos" / f"{name}.mp4", "where pictures are ray cast"
            note = f"filming {filming.ENVS} episodes into {path}; {where}, this takes a minute or two"
            success = f"success {result['success_at_end']:.1%}; " if "success_at_end" in result else ""
            print(f"{success}{note}", file=sys.stderr)
            filming.film_evaluation(*filmed, policy, path, options.seed, noise)
            result["video"] = str(path)
    return result


if __name__ == "__main__":
    sys.exit(main())
