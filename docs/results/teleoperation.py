"""Record the scripted expert as LeRobot records teleoperation: joints in degrees, the gripper from 0 to 100.

    python docs/results/teleoperation.py task=pick_place robot=so101 episodes=20 seed=0 hz=25 out=demos/teleop

The expert displaces the tool, and the data set has the joint targets that this led to. Places of the objects are in
``observation.environment_state``, as a person with a camera over the table could provide them. ``embodied.convert``
makes a data set of a task of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from embodied.core.config import parse_overrides
from embodied.core.episodes import PlanList
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import SUCCESS, ActionTerm, Box, EnvSpec, Term
from embodied.data import Episode, write
from embodied.deployment.control.arm import StateBuilder
from embodied.deployment.robots.mapping import gripper_entry
from embodied.envs.episodes.sampler import first_episodes
from embodied.session.config import compose_run
from embodied.session.factories import make_env

EXTERNAL, HOLD = "observation.environment_state", 8  # control steps that are kept after a success


def record(task: str, robot: str, episodes: int, seed: int, hz: float, out: Path) -> None:
    config = compose_run({"task": task, "task.robot": robot, "task.control_dt_s": 1 / hz})
    env = make_env(config, episodes, 1)
    spec, arm, grip = env.spec, env.arm, gripper_entry(env.spec.arm, "gripper.pos")
    external_names = StateBuilder(spec).external_names
    places = [spec.state_names.index(name) for name in external_names]
    scale = torch.from_numpy(spec.state_scale)

    def numbers(joints: torch.Tensor, finger: torch.Tensor) -> torch.Tensor:
        return torch.cat([joints.rad2deg(), ((finger - grip.zero) / grip.factor).unsqueeze(1)], 1).float()

    plans = first_episodes(spec, episodes, first_env_seed(Purpose.DEMONSTRATIONS, seed))
    obs = env.reset(PlanList(plans, episodes))
    rows: list[tuple[torch.Tensor, ...]] = []
    for _ in range(spec.max_episode_steps - 1):
        state, external = numbers(arm.joint_pos, arm.gripper_pos[:, 0]), (obs["state"] / scale)[:, places]
        step = env.step(env.expert())
        obs = step.obs
        targets = numbers(arm.joint_targets(), arm.finger_targets[:, 0])
        rows.append((state, targets, external, step.info[SUCCESS].clone()))
    env.close()
    state, action, external, solved = (torch.stack(column, 1) for column in zip(*rows, strict=True))
    names = [f"{joint.name}.pos" for joint in spec.arm.joints] + ["gripper.pos"]
    lengths = [min(len(row), int(row.int().argmax()) + HOLD) for row in solved if row.any()]
    kept = [
        Episode(state[i, :n], action[i, :n], torch.zeros(n), solved[i, :n], task, extra={EXTERNAL: external[i, :n]})
        for i, n in zip(solved.any(1).nonzero().squeeze(1).tolist(), lengths, strict=True)
    ]
    described = EnvSpec(task, tuple(Term(name, 1) for name in names), Box(tuple(map(ActionTerm, names))), 1 / hz, 1000)
    write(out, kept, described)
    info = json.loads((out / "meta" / "info.json").read_text(encoding="utf-8"))
    info["features"]["observation.state"]["names"] = names
    info["features"][EXTERNAL]["names"] = external_names
    (out / "meta" / "info.json").write_text(json.dumps(info, indent=4), encoding="utf-8")
    (out / "meta" / "units.json").unlink()  # LeRobot states no units
    print(f"{len(kept)} of {episodes} episodes were solved")


if __name__ == "__main__":
    words = {
        "task": "pick_place",
        "robot": "so101",
        "episodes": 20,
        "seed": 0,
        "hz": 25,
        **parse_overrides(sys.argv[1:]),
    }
    record(**{**words, "out": Path(words["out"])})
