"""Pictures of these results: ``python docs/results/plot.py`` writes docs/images/*.png (needs matplotlib)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parent / "images"
TASKS = ("push", "lift", "pick_place", "stack")


def load(folder: str, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((HERE / folder / f"{name}.json").read_text(encoding="utf-8"))
    return record


def evaluations(record: Mapping[str, Any], split: str | None = None) -> tuple[list[float], list[float]]:
    """Minutes of wall-clock and success in percent, of the evaluations during training and of the final one, on all
    goals or on those of a split."""
    steps, seconds = record["curve"]["env_steps"], record["curve"]["wall_s"]
    points = []
    for evaluation in record["during_training"].values():
        at = next((i for i, done in enumerate(steps) if done >= evaluation["env_steps"]), len(steps) - 1)
        points.append((seconds[at] / 60, success_of(evaluation, split)))
    points.append((record["wall_s"] / 60, success_of(record["final"], split)))
    minutes, success = zip(*sorted(points), strict=True)
    return list(minutes), list(success)


def success_of(evaluation: Mapping[str, Any], split: str | None) -> float:
    """In percent."""
    return 100.0 * float((evaluation["splits"][split] if split else evaluation)["success_at_end"])


def imitation_to_rl() -> None:
    """Per task: what 20 demonstrations gave, and where reinforcement learning took it, three seeds."""
    figure, axes = plt.subplots(1, len(TASKS), figsize=(13, 3.2), sharey=True)
    for axis, task in zip(axes, TASKS, strict=True):
        seeds = sorted(path.stem.split("-")[1] for path in (HERE / "imitation").glob(f"{task}-*-rl.json"))
        for seed in seeds:
            start = 100 * load("imitation", f"{task}-{seed}-sft")["final"]["success_at_end"]
            minutes, success = evaluations(load("imitation", f"{task}-{seed}-rl"))
            axis.plot([0, *minutes], [start, *success], lw=1.6, label=f"seed {seed}")
        scratch = sorted((HERE / "learning").glob(f"{task}-flow-*.json"))
        for i, path in enumerate(scratch):
            minutes, success = evaluations(json.loads(path.read_text(encoding="utf-8")))
            label = "from scratch" if i == 0 else None
            axis.plot([0, *minutes], [0, *success], lw=1, ls="--", color="gray", label=label)
        starts = [100 * load("imitation", f"{task}-{seed}-sft")["final"]["success_at_end"] for seed in seeds]
        axis.axhline(mean(starts), color="black", lw=0.8, ls=":")
        axis.set(title=task, xlabel="minutes of RL", ylim=(0, 101))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success at the end, %")
    axes[-1].legend(fontsize=8, loc="lower right")
    axes[1].legend(fontsize=8, loc="lower right")
    figure.suptitle("Reinforcement learning from 20 demonstrations (dotted: imitation alone)", fontsize=11)
    figure.tight_layout()
    figure.savefig(IMAGES / "imitation_to_rl.png", dpi=110)


def tabletop() -> None:
    """With pixels and words, and with the state alone: goals trained on, goals held out."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    for axis, prefix, title in zip(axes, ("", "state-"), ("two cameras and words", "state alone"), strict=True):
        for path in sorted((HERE / "vla").glob(f"{prefix}rl-[0-9].json")):
            seed = path.stem[-1]
            start = load("vla", f"{prefix}imitation-{seed}")["final"]
            for split, style in (("train", "-"), ("held_out", "--")):
                minutes, success = evaluations(load("vla", path.stem), split)
                label = f"seed {seed}, {'trained on' if split == 'train' else 'held out'}"
                axis.plot([0, *minutes], [success_of(start, split), *success], style, color=f"C{seed}", label=label)
        axis.set(title=title, xlabel="minutes of RL", ylim=(0, 101))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("success at the end, %")
    figure.suptitle("tabletop: reinforcement learning from imitation", fontsize=11)
    figure.tight_layout()
    figure.savefig(IMAGES / "tabletop.png", dpi=110)


def suite() -> None:
    """Per task of ``bench suite``: mean return of training episodes over steps, ours and stable-baselines3's."""
    path = HERE / "suite" / "suite.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    names = list(dict.fromkeys(row["name"].split("/")[0] for row in rows))
    figure, axes = plt.subplots(-(-len(names) // 4), 4, figsize=(13, 2.6 * -(-len(names) // 4)), squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for row in (row for row in rows if row["name"].startswith(f"{name}/")):
            curve, ours = row["settings"]["curve"], row["settings"]["trainer"] == "ours"
            axis.plot([steps / 1e6 for steps in curve["env_steps"]], curve["return"], "C0" if ours else "C1", lw=1)
            if row["unit"] == "return":
                axis.plot(row["settings"]["env_steps"] / 1e6, row["value"], "o", color="C0" if ours else "C1", ms=4)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("million steps")
    figure.tight_layout()
    figure.savefig(HERE / "suite" / "suite.png", dpi=90)


if __name__ == "__main__":
    suite()
    imitation_to_rl()
    tabletop()
