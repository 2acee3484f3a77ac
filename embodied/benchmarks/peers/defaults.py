"""PPO of stable-baselines3 with its defaults, on our view of a task with one env.

python -m embodied.benchmarks.peers.defaults <task> <steps> <seed> <episodes of the evaluation at the end>
"""

import json
import sys
import time
from contextlib import closing
from statistics import fmean
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy

from embodied.envs.views.sb3 import Sb3VecEnv
from embodied.envs.views.stepper import open_task
from embodied.report.progress import Progress


class Curve(BaseCallback):
    """Steps, seconds and the mean return of the latest 100 training episodes, at the end of every rollout."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self.values: dict[str, list[float]] = {"env_steps": [], "wall_s": [], "return": []}
        self._began_s = time.monotonic()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        wall_s = time.monotonic() - self._began_s
        row = {"env_steps": self.num_timesteps, "wall_s": wall_s, "perf/env_steps_per_s": self.num_timesteps / wall_s}
        latest = [episode["r"] for episode in self.model.ep_info_buffer]
        if latest:
            row["rollout/return_mean"] = fmean(latest)
            for values, key in zip(self.values.values(), ("env_steps", "wall_s", "rollout/return_mean"), strict=True):
                values.append(row[key])
        self._progress.update(row)


def train_sb3(task: str, total_steps: int, seed: int, episodes: int) -> dict[str, Any]:
    """Train, and evaluate the deterministic policy in ``episodes`` episodes of other seeds."""
    success: list[bool] = []
    with closing(Progress(total_steps, None, has_success=False)) as progress:
        curve, began_s = Curve(progress), time.monotonic()
        model = PPO("MlpPolicy", Sb3VecEnv(open_task(task, 1, seed=seed)), seed=seed, device="cpu")
        model.learn(total_steps, curve)
        wall_s, stepper = time.monotonic() - began_s, open_task(task, min(episodes, 10), seed=10_000 + seed)
        watch = progress.evaluating(f"{episodes} episodes")

        def on_step(local: dict[str, Any], _: dict[str, Any]) -> None:
            if local["done"]:
                success.append(local["info"]["is_success"])
                watch(len(success) / episodes)

        mean, _ = evaluate_policy(model, Sb3VecEnv(stepper), episodes, callback=on_step)
    final = {"task": task, "episodes": episodes, "return_mean": float(mean), "seed": 10_000 + seed}
    final |= {"success_at_end": fmean(success)} if stepper.spec.has_success else {}
    return {"env_steps": model.num_timesteps, "wall_s": round(wall_s, 1), "eval": final, "curve": curve.values}


if __name__ == "__main__":
    print(json.dumps(train_sb3(sys.argv[1], *map(int, sys.argv[2:]))))
