"""Does a policy take the object at its hand for the named one? Asked of scenes in which it is another.

python docs/results/hand_is_named.py <run directory> <file to write>

The expert moves the hand to the object that the instruction names. Then the instruction is exchanged for one that names
the distractor of the same colour, of goals that are trained on, and the policy says where that is. Beside it the same
with the hand at rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from embodied.core.spec import TRAIN
from embodied.envs import make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.tasks.tabletop import SLOTS, Tabletop
from embodied.report.metrics import write_json
from embodied.session.config import read_run
from embodied.session.factories import load_checkpoint, load_policy, make_env

NUM_ENVS, SEED = 256, 5
APPROACH = 10  # control steps: the hand is at the object and has not lifted it
SAME_COLOUR = 2  # slot of the distractor that has the colour of the named object
WRONG_M = 0.04


@torch.no_grad()
def measure(run: Path) -> dict[str, object]:
    """Medians and shares over the scenes whose new instruction is of the split ``train`` and in which nothing is held
    yet."""
    config = read_run(run)
    policy = load_policy(config, load_checkpoint(run, "last"))
    found = {}
    for name, steps in (("hand_at_rest", 0), ("hand_at_first_object", APPROACH)):
        env = make_env(config, NUM_ENVS, 1)
        assert isinstance(env, MujocoPool)
        assert isinstance(env.task, Tabletop)
        env.reset(make_sampler(env, SEED))
        env.observe_images = False
        for _ in range(steps):
            env.step(env.task.expert())
        env.observe_images = True
        first_N3 = env.view.body_qpos("target")[:, :3] - env.view.tcp_pos
        exchange(env.task)
        trained = torch.tensor([split == TRAIN for split in env.spec.splits])[env.task.instruction_N]
        obs = env.step(torch.zeros(NUM_ENVS, env.spec.action_dim)).obs
        named_N3 = env.view.body_qpos(SLOTS[SAME_COLOUR])[:, :3] - env.view.tcp_pos
        predicted_N3 = policy.predict_positions(obs)[:, 3:6]
        rows = trained & ~env.view.grasped("target")
        error, to_first = ((predicted_N3 - where)[rows].norm(dim=-1) for where in (named_N3, first_N3))
        found[name] = {
            "pictures": int(rows.sum()),
            "tool_from_first_object_cm": round(100 * float(first_N3[rows].norm(dim=-1).median()), 2),
            "error_cm": round(100 * float(error.median()), 2),
            "error_over_4_cm": round(float((error > WRONG_M).double().mean()), 4),
            "first_object_taken_for_the_named_one": round(
                float(((error > WRONG_M) & (to_first < WRONG_M)).double().mean()), 4
            ),
        }
        env.close()
    return {"scenes": {"num_envs": NUM_ENVS, "seed": SEED}, **found}


def exchange(task: Tabletop) -> None:
    """Every env is told to put the distractor of the same colour into the tray that it was told before."""
    tray_N = task.goal_I3[task.instruction_N, 2]
    wanted_N3 = torch.stack((task.color_NB[:, SAME_COLOUR], task.shape_NB[:, SAME_COLOUR], tray_N), -1)
    task.instruction_N.copy_((task.goal_I3 == wanted_N3[:, None]).all(-1).int().argmax(-1))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    write_json(Path(sys.argv[2]), measure(Path(sys.argv[1])))
