"""Train a policy: ``python -m embodied.train [task] [key=value ...]``

  task=pick_place          or task=<family>/<id>, an environment of another simulator
  policy=flow|gaussian|categorical|dsrl|vla|vla_tiny  algo=ppo|grpo|sft|grounding  runtime=local|sync|ray  sim=mujoco
  sampler=uniform          draws the training episodes
  randomization=none|sim2real   what varies between episodes, for policies that leave the simulator
  num_envs=...  total_steps=...  max_minutes=...  seed=0  device=auto|cpu|cuda  max_staleness=...
  task.robot=panda         robot of the task
  eval_episodes=200        episodes of the evaluation at the end; 0 for none
  checkpoint_minutes=2     minutes between two checkpoints
  trace=true               record what each part does in the first minute, as <run dir>/trace.json.gz for Perfetto
  stop_at_success=0.95     end early when an evaluation during training reaches this success rate
  data=<dir>               demonstrations (embodied.collect) for algo=sft, which imitates them; if their columns have
                           other names: data_keys.state=observation.qpos data_keys.action=action.joints; if they have
                           other units: data_keys.action.scale=[...] data_keys.action.offset=[...] (docs/flow_rl.md)
  init=<run dir>           start from the policy of a run of the same task and architecture
  out=<dir>                run directory, default runs/<task>/<policy>-<algo>-<time>
  resume=<run dir>         continue a run; total_steps and max_minutes count the whole run
  --config                 print the configuration that would be used, and end
  <group>.<option>=...     any option of a group, such as algo.learning_rate=1e-4 (files in configs/)

Last line of stdout: {"run", "env_steps", "wall_s", "iterations", "eval"}. Exit code 0, 1 (crash), 2 (bad input), 130
(Ctrl-C, SIGTERM or a closed terminal: the state is saved, and resume= continues).
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from embodied.core.clock import running_s, ticking
from embodied.core.config import parse_overrides
from embodied.session.command import run_command


def train(argv: Sequence[str]) -> dict[str, Any]:
    """Train and evaluate; return the contract's result. UserError for bad input, Stopped after a signal."""
    shown = "--config" in argv
    overrides = parse_overrides([word for word in argv if word != "--config"], "task")
    from embodied.session.config import resume_run, to_mapping, to_yaml
    from embodied.session.defaults import compose_new

    run = overrides.pop("resume", None)
    run_dir = None if run is None else Path(str(run))
    config = compose_new(overrides, print) if run_dir is None else resume_run(run_dir, overrides)
    if shown:
        print(to_yaml(config))
        return to_mapping(config)
    from embodied.session.session import Session  # torch and MuJoCo: seconds that --help and a typing error do not cost
    from embodied.trainers import trainer_of

    with ticking():
        start_s = running_s()
        session = Session.new(config, start_s) if run_dir is None else Session.resume(config, run_dir, start_s)
        trainer = trainer_of(session.config)
        with trainer(session.config, session.run_dir, new=session.found is None) as training:
            return session.run(training)


main = partial(run_command, train, __doc__)

if __name__ == "__main__":
    sys.exit(main())
