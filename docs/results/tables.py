"""Print the tables of this README and of pages under docs: ``python docs/results/tables.py``."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

from embodied.core.statistics import t_interval, wilson_interval

HERE = Path(__file__).resolve().parent
TASKS = ("push", "lift", "pick_place", "stack")
IMITATED = "imitation, 200 episodes"
DEPLOYED = {"plain": "trained without", "sim2real-delay": "trained with both"}


def records(pattern: str) -> list[dict[str, Any]]:
    """Results whose files match, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(HERE.glob(pattern))]


def percents(found: list[dict[str, Any]], split: str | None = None) -> list[float]:
    """Success of each run, on all goals or on those of a split: of 1,000 other episodes, if it was tried on them."""
    return [100.0 * final(record, split)["success_at_end"] for record in found]


def final(record: dict[str, Any], split: str | None) -> dict[str, Any]:
    last = record["final"]
    found: dict[str, Any] = last["splits"][split] if split else record.get("other_1000_episodes") or last
    return found


def success(record: dict[str, Any], split: str | None = None, note: str = "") -> str:
    """Success of a run with its Wilson interval; note: what follows in the parentheses."""
    result = final(record, split)
    low, high = wilson_interval(round(result["success_at_end"] * result["episodes"]), result["episodes"])
    return f"{100 * result['success_at_end']:.1f}% ({100 * low:.1f} to {100 * high:.1f}{note})"


def spread(found: list[dict[str, Any]], split: str | None = None) -> str:
    """Mean success over training seeds with its 95% t interval, or for a single run its Wilson interval.

    Two seeds have no interval here: where they agree by chance, the t interval has no width.
    """
    values = percents(found, split)
    if len(values) == 1:
        return success(found[0], split, ", one seed")
    if len(values) == 2:
        return f"{mean(values):.1f}% (two seeds)"
    low, high = t_interval(values)
    return f"{mean(values):.1f}% ({max(0.0, low):.1f} to {min(100.0, high):.1f})"


def listed(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def minutes(found: list[dict[str, Any]]) -> str:
    return listed([record["wall_s"] / 60 for record in found])


def steps_to(record: dict[str, Any], success: float) -> int:
    """Control steps before the first evaluation that showed this success. ValueError if none did."""
    return min(e["env_steps"] for e in record["during_training"].values() if e["success_at_end"] >= success)


def minutes_to(record: dict[str, Any], success: float) -> float:
    """Wall-clock of training when an evaluation first showed so much success; infinite if none did."""
    steps, seconds = record["curve"]["env_steps"], record["curve"]["wall_s"]
    good = [e["env_steps"] for e in record["during_training"].values() if e["success_at_end"] >= success]
    return next((second / 60 for step, second in zip(steps, seconds, strict=True) if good and step >= min(good)), inf)


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


def imitation() -> None:
    """From demonstrations to imitation to reinforcement learning."""
    columns = "imitation", "after RL", "after RL, mean of the seeds (95% t interval)", "minutes of RL", "minutes to 90%"
    row("task", *columns)
    row(*["---"] * 6)
    before, after = [], []
    for task in TASKS:
        sft, rl = records(f"imitation/{task}-[0-9]-sft.json"), records(f"imitation/{task}-[0-9]-rl.json")
        before.append(mean(percents(sft)))
        after.append(mean(percents(rl)))
        to_90 = listed([minutes_to(record, 0.9) for record in rl])
        row(f"`{task}`", listed(percents(sft)), listed(percents(rl)), spread(rl), minutes(rl), to_90)
    row("average", f"{mean(before):.1f}%", f"{mean(after):.1f}%", "", "", "")
    print()


def from_scratch() -> None:
    """Reinforcement learning from nothing, each run."""
    row("task", "seed", "minutes", "million steps", "success", "first evaluation ≥ 90% after")
    row(*["---"] * 6)
    runs = {task: records(f"learning/{task}-flow-[0-9].json") for task in ("pick_place", "lift", "push")}
    for task, found in runs.items():
        for seed, record in enumerate(found):
            numbers = minutes([record]), f"{record['env_steps'] / 1e6:.1f}"
            row(f"`{task}`", str(seed), *numbers, success(record), f"{minutes_to(record, 0.9):.1f} minutes")
    print()
    for task, found in runs.items():
        print(f"{task}: {spread(found)}; {minutes(found)} minutes")
    print()


def other_arms() -> None:
    """Reinforcement learning from nothing with other arms than the Panda."""
    row("arm", "task", "million steps", "first evaluation ≥ 90%", "solved at the end", "solved at some time")
    row(*["---"] * 6)
    for arm, pattern in (
        ("SO-101", "so101/{}-scratch-0.json"), ("YAM", "robots/{}-yam-scratch-0.json"),
        ("xArm7", "robots/{}-xarm7-scratch-0.json"), ("UR5e", "robots/{}-ur5e_2f85-scratch-0.json"),
    ):  # fmt: skip
        for task in ("lift", "pick_place", "push"):
            (run,) = records(pattern.format(task))
            first = steps_to(run, 0.9)
            once = f"{100 * run['other_1000_episodes']['success_once']:.1f}%"
            row(arm, f"`{task}`", f"{run['env_steps'] / 1e6:.2f}", f"{first / 1e6:.2f}", success(run), once)
    print()


def repeated_starts() -> None:
    """The runs from scratch before and after failed starts were remembered once: each seed."""
    columns = "million steps to 90%", "minutes of training", "success of 1,000 episodes"
    row("task", *(f"{name}: {when}" for name in columns for when in ("before", "now")))
    row(*["---"] * 7)
    earlier = records("ablation/repeated-starts.json")[0]["runs"]
    for task in ("pick_place", "lift", "push"):
        before, now = [run for run in earlier if run["task"] == task], records(f"learning/{task}-flow-[0-9].json")
        first = [next(at for at, rate in run["evaluations [env steps, success]"] if rate >= 0.9) for run in before]
        found = [steps_to(run, 0.9) for run in now]
        to_90 = (", ".join(f"{steps / 1e6:.2f}" for steps in each) for each in (first, found))
        rates = [100 * run["success of 1,000 other episodes"] for run in before], percents(now)
        row(f"`{task}`", *to_90, minutes(before), minutes(now), *map(listed, rates))
    print()


def imitated_answers() -> None:
    """Imitation of chunks whose actions answer a disturbance, and without these actions: each seed."""
    row("task", "all actions of a chunk", "none that answers a disturbance within it")
    row(*["---"] * 3)
    earlier = records("ablation/imitated-answers.json")[0]["runs"]
    later = records("ablation/imitation-chunks-of-4.json")[0]["runs"]
    for task in TASKS:
        before = [100 * run["success"] for run in earlier if run["task"] == task]
        row(f"`{task}`", listed(before), listed([100 * run[IMITATED] for run in later if run["task"] == task]))
    print()


def chunks_of_two() -> None:
    """Imitation and reinforcement learning after it with chunks of four actions and of two: each seed."""
    columns = "imitation", "success of 1,000 episodes after RL", "million steps to 90%"
    row("task", *(f"{name}: chunks of {size}" for name in columns for size in ("four", "two")))
    row(*["---"] * 7)
    earlier = records("ablation/imitation-chunks-of-4.json")[0]["runs"]
    for task in TASKS:
        before = [run for run in earlier if run["task"] == task]
        sft, rl = records(f"imitation/{task}-[0-9]-sft.json"), records(f"imitation/{task}-[0-9]-rl.json")
        first = [next(at for at, rate in run["evaluations [env steps, success]"] if rate >= 0.9) for run in before]
        found = [steps_to(run, 0.9) for run in rl]
        to_90 = (", ".join(f"{steps / 1e6:.2f}" for steps in each) for each in (first, found))
        of_four = ([100 * run[key] for run in before] for key in (IMITATED, "after RL, 1,000 episodes"))
        rates = zip(map(listed, of_four), map(listed, (percents(sft), percents(rl))), strict=True)
        row(f"`{task}`", *(rate for pair in rates for rate in pair), *to_90)
    print()


def scratch() -> None:
    """Reinforcement learning from nothing beside that from imitation: minutes to 90%, each seed."""
    kinds_of = ("from scratch", "from imitation")
    row("task", *(f"{kind}: minutes to 90%" for kind in kinds_of), *(f"{kind}, at the end" for kind in kinds_of))
    row(*["---"] * 5)
    for task in ("push", "lift", "pick_place"):
        kinds = records(f"learning/{task}-flow-[0-9].json"), records(f"imitation/{task}-[0-9]-rl.json")
        first = [listed([minutes_to(record, 0.9) for record in found]) for found in kinds]
        row(f"`{task}`", *first, *map(spread, kinds))
    print()


def tabletop() -> None:
    """Goals that are trained on and goals that are held out, from pixels and words and from the state alone."""
    row("sees", "goals", "imitation, each seed", "after RL, each seed", "after RL, mean of the seeds", "minutes of RL")
    row(*["---"] * 6)
    for sees, prefix in (("two cameras, words", "vla/"), ("state", "vla/state-")):
        sft, rl = records(f"{prefix}imitation-[0-9].json"), records(f"{prefix}rl-[0-9].json")
        for split, label in (("train", "trained on"), ("held_out", "held out")):
            row(sees, label, listed(percents(sft, split)), listed(percents(rl, split)), spread(rl, split), minutes(rl))
    print()


def learning_on() -> None:
    """``tabletop`` from images after imitation: success of all goals in evaluations during training, by settings."""
    columns = [2 * 163_840 * i for i in range(1, 7)]  # every second evaluation
    row("", "seed", *(f"{steps / 1e6:.1f} M" for steps in columns))
    row(*["---"] * (2 + len(columns)))
    runs = [
        (name, run["config"]["seed"], [[e["env_steps"], e["success_at_end"]] for e in run["during_training"].values()])
        for name, pattern in (("before", "ablation/tabletop-chunks-of-4-rl-*.json"), ("the default", "vla/rl-*.json"))
        for run in records(pattern)
    ]
    tried = records("ablation/tabletop-after-imitation.json")[0]["runs"]
    for name, seed, found in runs + [
        (run["what"], run["seed"], run["evaluations [env steps, success]"]) for run in tried
    ]:
        rates = [[100 * rate for at, rate in found if abs(at - steps) < 10_000] for steps in columns]
        row(name, str(seed), *(f"{rate[0]:.0f}" if rate else "" for rate in rates))
    print()


def compared(kinds: dict[str, str]) -> None:
    """Runs of one or several seeds side by side; ``kinds``: a glob for each label."""
    row("", "each seed", "mean of the seeds (95% t interval)", "minutes")
    row(*["---"] * 4)
    for label, pattern in kinds.items():
        found = records(pattern)
        if found:
            row(label, listed(percents(found)), spread(found), minutes(found))
    print()


def deployment() -> None:
    """Exported policies on the simulated arm: success of each seed and its mean, by what differs from training."""
    row("robot and schedule", *(label for label in DEPLOYED.values()))
    row(*["---"] * (1 + len(DEPLOYED)))
    for label, case in (
        ("as in training", "as-trained"),
        ("`perturbation=real`", "real-arm"),
        ("`perturbation=real`, 100 ms of latency", "real-arm-latency-100"),
        ("`perturbation=real`, 100 ms of latency, `schedule=rtc`", "real-arm-latency-100-rtc"),
    ):
        cells = []
        for kind in DEPLOYED:
            values = [100.0 * record["success_at_end"] for record in records(f"deployment/{kind}-[0-9]-{case}.json")]
            cells.append(seeds_and_mean(values))
        row(label, *cells)
    print()


def seeds_and_mean(values: list[float]) -> str:
    """Percents of each seed, then their mean with its 95% t interval."""
    low, high = t_interval(values)
    interval = f"{max(0.0, low):.0f} to {min(100.0, high):.0f}"
    return f"{', '.join(f'{value:.0f}' for value in values)}: {mean(values):.1f}% ({interval})"


def latencies() -> None:
    """The perturbed arm by real-time chunking: success of each seed and its mean, by the latency."""
    found = {kind: records(f"deployment/latency-{kind}.json") for kind in DEPLOYED}
    if not all(found.values()):
        return
    row("latency", *DEPLOYED.values())
    row(*["---"] * (1 + len(DEPLOYED)))
    for name in found["plain"][0]["runs"][0]["results"]:
        runs = [[100.0 * run["results"][name]["success_at_end"] for run in found[kind][0]["runs"]] for kind in DEPLOYED]
        row(name, *map(seeds_and_mean, runs))
    print()


def two_ways() -> None:
    """``detour``: success and the shares of episodes that passed the post on either side, by the noise."""
    row("policy", "after", *(f"{noise}: success; left, right" for noise in ("zero noise", "seeded noise")))
    row(*["---"] * 4)
    for label, name in (
        ("`gaussian`", "gaussian"),
        ("`flow`, K = 1", "flow-k1"),
        ("`flow`, K = 4", "flow"),
        ("`flow`, K = 4, chunks of two: the default", "flow-h2"),
        ("`flow`, K = 4, held to the imitated policy", "flow-anchored"),
    ):
        for stage, found in (
            ("imitation", records(f"two_ways/detour-{name}-imitation-[0-9].json")),
            ("RL", records(f"two_ways/detour-{name}-[0-9].json")),
        ):
            if found:
                row(label, stage, *map(ways, ([r["final"] for r in found], [r["final"]["other_noise"] for r in found])))
    print()


def ways(results: list[dict[str, Any]]) -> str:
    """Success of each seed, and the shares that passed on the left and on the right, in percent."""
    keys = ("success_at_end", "passed_left_once", "passed_right_once")
    success, left, right = (", ".join(f"{100 * result[key]:.0f}" for result in results) for key in keys)
    return f"{success}; {left} and {right}"


def asynchronous() -> None:
    """Seconds per batch with slow parts, and throughput over synchronous training and over the bound."""
    record = json.loads((HERE / "bench/async.json").read_text(encoding="utf-8"))
    ratios, rows = record["ratios"], {row["name"]: row["settings"] for row in record["rows"]}
    row("scenario", "mode", "seconds per batch", "over synchronous", "over the bound", "decisions masked")
    row(*["---"] * 6)
    for name, found in rows.items():
        if "batch_s" not in found:
            continue
        prefix = name.removesuffix("_async") if name.endswith("_async") else name
        ratio = [f"{ratios[key]:.2f}" if (key := f"{prefix}_over_{of}") in ratios else "" for of in ("sync", "bound")]
        seconds = f"{median(found['batch_s']):.3f}"
        mode = f"`max_staleness={found['max_staleness']}" + (" order=arrival`" if "order" in found else "`")
        row(name.removesuffix("_2").rpartition("_")[0], mode, seconds, *ratio, f"{100 * found['dropped']:.1f}%")
    print()


def noise() -> None:
    """Final success with zero and with seeded noise of every run that has both."""
    row("run", "zero noise", "seeded noise")
    row(*["---"] * 3)
    for path in sorted(HERE.glob("*/*.json")):
        result = json.loads(path.read_text(encoding="utf-8")).get("final") or {}
        if "other_noise" in result and "success_at_end" in result:
            by_noise = {r["noise"]: f"{100 * r['success_at_end']:.1f}" for r in (result, result["other_noise"])}
            row(path.stem, by_noise["zero"], by_noise["seeded"])
    print()


def of_return(value: float) -> str:
    return f"{value:,.1f}".replace("-", "−")


def suite() -> None:
    """Other people's tasks: ours of each seed, stable-baselines3's, and published figures of PPO."""
    from embodied.benchmarks.suite import TASKS as TASKS_OF_OTHERS

    rows = records("suite/suite.json")[0]["rows"]
    row("task", "steps", "ours, each seed", "stable-baselines3's defaults", "RL Zoo", "CleanRL", "minutes of ours")
    row(*["---"] * 7)
    for name, task in TASKS_OF_OTHERS.items():
        found = {kind: [r for r in rows if r["name"].startswith(f"{name}/{kind}/")] for kind in ("ours", "sb3")}
        values = {
            kind: ", ".join(f"{100 * r['value']:.0f}%" if r["unit"] == "success" else of_return(r["value"]) for r in of)
            for kind, of in found.items()
        }
        zoo = f"{of_return(task.zoo)} ({task.zoo_steps:,})" if task.zoo else ""
        steps = {r["settings"]["total_steps"] for r in found["ours"]} or {task.steps}
        row(f"`{task.task}`", ", ".join(f"{n:,}" for n in steps), values["ours"] or "not run yet",
            values["sb3"] or "not run yet", zoo, of_return(task.cleanrl) if task.cleanrl else "",
            ", ".join(f"{r['settings']['wall_s'] / 60:.1f}" for r in found["ours"]))  # fmt: skip
    print()


if __name__ == "__main__":
    suite()
    from_scratch()
    other_arms()
    repeated_starts()
    imitation()
    imitated_answers()
    chunks_of_two()
    scratch()
    tabletop()
    learning_on()
    compared({
        "Flow-SDE, PPO": "comparison/stack-flow_sde-*.json",
        "Flow-SDE, one stochastic step, PPO": "comparison/stack-flow_sde_one-*.json",
        "Flow-Noise, PPO (the default)": "comparison/stack-flow_noise-*.json",
        "Flow-Noise, GRPO": "comparison/stack-grpo-*.json",
        "DSRL, PPO on the initial noise": "comparison/stack-dsrl-*.json",
    })  # fmt: skip
    compared({f"`{step}`": f"comparison/stack-steps-{step}-*.json" for step in ("last", "all", "one")})
    compared({f"`{step}`": f"comparison/tabletop-steps-{step}-*.json" for step in ("last", "all", "one")})
    deployment()
    latencies()
    asynchronous()
    two_ways()
    noise()
    ablations = sorted(HERE.glob("ablation/pick_place-*.json"))
    compared({path.stem.removeprefix("pick_place-"): f"ablation/{path.name}" for path in ablations})
