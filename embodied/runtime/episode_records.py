"""Records of evaluated episodes: plan, outcomes, and a hash of the actions, so that each can be made again."""

import hashlib
from typing import Any

from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodeStats
from embodied.core.spec import EnvSpec
from embodied.core.types import Timestep


class ActionHashes:
    """SHA-256 of the actions that every episode executed, or with delays of all that were planned, by its plan."""

    def __init__(self, env: VecEnv) -> None:
        self._whole = env.max_delay > 0
        self._open = [hashlib.sha256() for _ in range(env.num_envs)]
        self.of_plan: dict[tuple[int, int], str] = {}

    def add(self, action_NEA: Tensor, step: Timestep) -> None:
        """Add the actions of a decision, and close the hashes of the episodes that it ended."""
        action, num_steps = action_NEA.cpu().numpy(), step.num_steps_N.tolist()
        for n, digest in enumerate(self._open):
            digest.update(action[n, : None if self._whole else num_steps[n]].tobytes())
        ended = step.episodes.counted()
        for n, seed, number in zip(ended.env_id_M, ended.plans.seed_n, ended.plans.number_n, strict=True):
            self.of_plan[int(seed), int(number)] = self._open[n].hexdigest()
        for n in step.final_ids.tolist():
            self._open[n] = hashlib.sha256()


def records(stats: EpisodeStats, spec: EnvSpec, hashes: ActionHashes) -> list[dict[str, Any]]:
    """Return a record of each of M episodes: its plan and env, outcomes, return, length, and hash of its actions."""
    rows = []
    for i, (seed, number) in enumerate(zip(stats.plans.seed_n.tolist(), stats.plans.number_n.tolist(), strict=True)):
        plan = {"episode": i, "seed": seed, "number": number, "env": int(stats.env_id_M[i])}
        text = spec.texts[stats.plans.instruction_n[i]] if spec.texts else None
        ends = {f"{name}_at_end": bool(held_M[i]) for name, held_M in stats.at_end.items()}
        numbers = {"return": float(stats.return_M[i]), "length": int(stats.length_M[i])}
        rows.append(plan | {"instruction": text} | ends | numbers | {"actions": hashes.of_plan[seed, number]})
    return rows
