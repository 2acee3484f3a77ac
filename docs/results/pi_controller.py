"""Return of gym-electric-motor's own PI controller on ``Cont-CC-PMSM-v0``, 20 episodes of 1,000 steps.

pip install gym-electric-motor control-block-diagram
python docs/results/pi_controller.py > docs/results/gym/Cont-CC-PMSM-v0-pi.json
"""

from __future__ import annotations

import json
from statistics import fmean

import gem_controllers
import gym_electric_motor

TASK = "Cont-CC-PMSM-v0"
EPISODES, STEPS = 20, 1000


def main() -> None:
    env = gym_electric_motor.make(TASK)
    controller = gem_controllers.GemController.make(env, TASK)
    returns = []
    for seed in range(EPISODES):
        (state, reference), _ = env.reset(seed=seed)
        controller.reset()
        total = 0.0
        for _ in range(STEPS):
            (state, reference), reward, ended, *_ = env.step(controller.control(state, reference))
            total += float(reward)
            if ended:
                break
        returns.append(round(total, 2))
    print(json.dumps({"task": TASK, "steps": STEPS, "return_mean": round(fmean(returns), 2), "returns": returns}))


if __name__ == "__main__":
    main()
