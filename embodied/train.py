"""Train a policy: ``python -m embodied.train [task] [key=value ...]``

  task=pick_place          or task=<family>/<id>, an environment of another simulator, or task=my_task.py:MyTask, a task
                           in a file of your own (docs/extending/task.md)
  policy=flow|gaussian|categorical|dsrl|vla|vla_tiny  algo=ppo|grpo|sft|grounding  runtime=local|sync|ray  sim=mujoco
  sampler=uniform          draws the training episodes
  randomization=none|sim2real   what varies between episodes, for policies that leave the simulator
  num_envs=...  total_steps=...  max_minutes=...  seed=0  device=auto|cpu|cuda  max_staleness=...
  seed=0,1,2               one run after the other; out=<dir> is then the directory of the runs
  task.robot=panda         robot of the task
  task.scene=kitchen.xml   furniture and obstacles around the table (docs/environments.md)
  eval_episodes=200        episodes of the evaluation at the end; 0 for none
  checkpoint_minutes=2     minutes between two checkpoints
  trace=true               record what each part does in the first minute, as <run dir>/trace.json.gz for Perfetto
  stop_at_success=0.95     end early when an evaluation during training reaches this success rate, and a second one on
                           fresh episodes confirms it
  data=<dir>               demonstrations (embodied.collect) for algo=sft, which imitates them; if their columns have
                           other names: data_keys.state=observation.qpos data_keys.action=action.joints; if they have
                           other units: data_keys.action.scale=[...] data_keys.action.offset=[...] (docs/flow_rl.md)
  init=<run dir>           start from the policy of a run of the same task and architecture
  out=<dir>                run directory, default runs/<task>/<policy>-<algo>-<time>
  resume=<run dir>         continue a run; total_steps and max_minutes count the whole run
  --config                 print the configuration that would be used, with the meaning of each option, and end
  <group>.<option>=...     any option of a group, such as algo.learning_rate=1e-4 (files in configs/)

Last line of stdout: {"run", "env_steps", "wall_s", "iterations", "stop", "eval", "page"}. "stop" has the evaluation
that reached stop_at_success and its confirmation, if they ended training; "eval" is of episodes that no stopping rule
saw; "page" is an HTML file that shows the run (embodied.report).
After a training of more than a minute, "certificate" says whether all checks of embodied.audit hold, and which are open
for lack of time: they take at most a tenth of the training, and 30 seconds.
Of several seeds {"runs", "metric", "values", "mean", "ci95", "page"}, with the t interval over the seeds, where runs
are results of one seed. Exit code 0, 1 (crash), 2 (bad input), 130 (Ctrl-C, SIGTERM or a closed terminal: the state is
saved, and resume= continues).
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from embodied.core.clock import ticking
from embodied.core.config import parse_overrides
from embodied.core.errors import UserError
from embodied.core.user_files import refuse_places
from embodied.session.command import Stopped, interrupt_on_signals, run_command

CERTIFIED_FROM_S, CERTIFIED_WITHIN_S = 60.0, 30.0  # seconds of a training, and of its certificate


def train(argv: Sequence[str]) -> dict[str, Any]:
    """Train and evaluate; return the contract's result. UserError for bad input, Stopped after a signal."""
    seeds = next((word.partition("=")[2].split(",") for word in reversed(argv) if word.startswith("seed=")), [])
    if len(seeds) > 1:
        return train_seeds([word for word in argv if not word.startswith("seed=")], seeds)
    shown = "--config" in argv
    overrides = parse_overrides([word for word in argv if word != "--config"])
    from embodied.session.config import resume_run, to_mapping
    from embodied.session.defaults import compose_new

    run = overrides.pop("resume", None)
    run_dir = None if run is None else Path(str(run))
    if run_dir is None and overrides.get("init") is None:
        refuse_places()
    config = compose_new(overrides, print) if run_dir is None else resume_run(run_dir, overrides)
    if shown:
        from embodied.session.explain import explain

        print(explain(config))
        return to_mapping(config)
    from embodied.session.files import CERTIFICATE_FILE
    from embodied.session.session import Session  # torch and MuJoCo: seconds that --help and a typing error do not cost
    from embodied.trainers import trainer_of

    with ticking():
        session = Session(config, run_dir)
        trainer = trainer_of(session.config)
        with trainer(session.config, session.run_dir, new=session.found is None) as training:
            try:
                result = session.run(training)
            except Stopped as stopped:
                with_page(stopped.result)
                raise
    kept = session.reached and (session.run_dir / CERTIFICATE_FILE).exists()  # one made now might have less time
    return with_page(result if kept else with_certificate(result))


def with_certificate(result: dict[str, Any]) -> dict[str, Any]:
    """Certify a run that took long enough, and add the verdict to the result. Stopped with the result by a signal."""
    if result["wall_s"] <= CERTIFIED_FROM_S:
        return result
    from embodied.audit import certify

    seconds = min(CERTIFIED_WITHIN_S, result["wall_s"] / 10)
    print(f"certifying within {seconds:.0f} s; without a limit: embodied audit {result['run']}", file=sys.stderr)
    try:
        with interrupt_on_signals():
            certificate = certify(Path(result["run"]), seconds)
        result["certificate"] = {key: certificate[key] for key in ("passed", "open")}
    except KeyboardInterrupt:
        print("interrupted: the run has no certificate", file=sys.stderr)
        raise Stopped(with_page(result)) from None
    except (OSError, UserError) as error:  # the training counts all the same
        print(f"no certificate could be written: {error}", file=sys.stderr)
    return result


def with_page(result: dict[str, Any]) -> dict[str, Any]:
    """Write the page of a run, or of the runs of several seeds, and add its path to the result; None without a page."""
    from embodied.session.results.page import write_page

    result["page"] = None
    try:
        result["page"] = str(write_page([Path(run["run"]) for run in result.get("runs", [result])]))
        print(f"page: {result['page']}")
    except (OSError, UserError) as error:  # the training counts all the same
        print(f"no page could be written: {error}")
    return result


def train_seeds(argv: Sequence[str], seeds: Sequence[str]) -> dict[str, Any]:
    """Train with each seed in turn; return their results with mean and interval. Stopped after a signal."""
    from embodied.core.statistics import t_interval

    if not all(seed.isdecimal() for seed in seeds) or len({*seeds}) < len(seeds):
        raise UserError(f"seed: got {','.join(seeds)}, allowed: different numbers, separated by commas")
    if any(word.startswith("resume=") for word in argv):
        raise UserError("seed: several seeds are for new runs; resume= one run after the other")
    if "--config" in argv:  # that of the first one
        return train([*argv, f"seed={seeds[0]}"])
    of_seeds = [[f"{word}/seed_{seed}" if word.startswith("out=") else word for word in argv] for seed in seeds]
    for word in (word for words in of_seeds for word in words):
        if word.startswith("out=") and Path(word.partition("=")[2]).exists():
            raise UserError(f"{word} exists; give a new directory")
    runs: list[dict[str, Any]] = []
    stopped = False
    for seed, words in zip(seeds, of_seeds, strict=True):
        try:
            runs.append(train([*words, f"seed={seed}"]))
        except Stopped as stop:
            runs.append(stop.result)
            stopped = True
            break
    found = [run["eval"] for run in runs if run["eval"]]
    metric = "success_at_end" if any("success_at_end" in result for result in found) else "return_mean"
    values = [result[metric] for result in found]
    result = {
        "runs": runs, "metric": metric, "values": values, "mean": mean(values) if values else None,
        "ci95": t_interval(values) if len(values) > 1 else None,
    }  # fmt: skip
    with_page(result)
    if stopped:
        raise Stopped(result)
    return result


main = partial(run_command, train, __doc__, first="task")

if __name__ == "__main__":
    sys.exit(main())
