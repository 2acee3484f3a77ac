"""What is doubtful about episodes that were made of joint positions (joint_dataset.py)."""

from collections.abc import Sequence

import numpy as np

from embodied.core.arm import Array
from embodied.core.spec import ArmSpec, EnvSpec, slices_of
from embodied.data import Episode

OUTSIDE_M, FAR = 0.02, 0.2  # how far outside of the workspace counts, and in how many control steps it is doubtful
NEAR_M = 0.06  # how near the tool comes to an object that it moves
CLIPPED = 0.01  # share of control steps; in more of them the gripper is beyond the task's


def tracking(
    episodes: Sequence[Episode], missed: Sequence[Array], spec: EnvSpec, gripper_ends: Sequence[Sequence[float]]
) -> list[str]:
    """Return lines about how well actions ask for what was recorded, and about instructions and lengths of episodes.

    missed: of each episode, what ``imitable`` says, [L, 3].
    gripper_ends: lowest and highest number of the data set that the task's actions of each gripper can ask for.
    """
    mm, deg, beyond = np.concatenate(missed).T
    worst = int(np.argmax([missed_L3[:, 0].max() for missed_L3 in missed]))
    most = f"at most {mm.max():.0f} mm (episode {worst}) and {deg.max():.0f} deg"
    lines = [f"actions ask for a tool {mm.mean():.1f} mm from the recorded one on average, {most}"]
    if beyond.mean() > CLIPPED:
        ends = " and ".join(dict.fromkeys(f"from {low:.0f} to {high:.0f}" for low, high in gripper_ends))
        allowed = f"the task's, {ends} in the data set's numbers"
        lines.append(f"in {beyond.mean():.0%} of the control steps the gripper is beyond {allowed}")
    unknown = sorted({episode.instruction for episode in episodes} - {*spec.texts, ""})
    if spec.cameras and spec.texts and unknown:
        cure = f'give instruction="{spec.texts[0]}"' + (", or another one of it" if spec.texts[1:] else "")
        lines.append(f"the task does not know the instruction {unknown[0]!r}: {cure}")
    longest, limit = max(map(len, episodes)), spec.max_episode_steps
    if longest > limit:
        cure = f"task.max_episode_steps={longest} gives a policy as much time"
        lines.append(f"an episode has up to {longest} control steps, and the task's time limit is {limit}: {cure}")
    return lines


def reach(episodes: Sequence[Episode], spec: EnvSpec, side: str, arm: ArmSpec) -> list[str]:
    """Return lines about where the tool goes: under the table, out of the workspace, or never to an object.

    side: with what the names of the arm begin.
    """
    physical = [episode.state_LS.double().numpy() / spec.state_scale for episode in episodes]
    terms = slices_of(spec.state)
    tool_F3 = np.concatenate([state[:, terms[f"{side}tcp_pos"]] for state in physical])
    low_3, high_3 = np.array(arm.workspace_low_m), np.array(arm.workspace_high_m)
    outside = float(((tool_F3 < low_3 - OUTSIDE_M) | (tool_F3 > high_3 + OUTSIDE_M)).any(1).mean())
    tool = f"the {side.replace('_', ' ')}tool"
    heights = f"{tool} is {tool_F3[:, 2].min():.3f} to {tool_F3[:, 2].max():.3f} m high"
    lines = [f"{heights}, and in {outside:.0%} of the control steps outside of the task's workspace"]
    cure = "is a unit, a sign or a zero of the joints wrong, or does the table stand elsewhere?"
    if tool_F3[:, 2].min() < -OUTSIDE_M / 2 or outside > FAR:
        lines[0] += f": {cure}"
    for term in spec.state:
        if term.difference is not None and term.difference.minus == f"{side}tcp_pos":
            nearest_m = np.median([np.linalg.norm(state[:, terms[term.name]], axis=1).min() for state in physical])
            near = f"{tool} comes as near as {1e3 * nearest_m:.0f} mm to {term.difference.of}, in the median episode"
            lines.append(near if nearest_m < NEAR_M else f"{near}: {cure}")
    return lines
