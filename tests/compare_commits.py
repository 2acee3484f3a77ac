"""Two commits train the same parameters: ``python tests/compare_commits.py OLD NEW [options]``

  OLD, NEW           git revisions, or directories of uncommitted checkouts, which are copied first
  --only case,case   some of the cases; all of them are the keys of CASES
  --cache DIR        keep what a revision trained there, and take it from there the next time; for one machine and one
                     set of installed packages. A directory is always trained anew
  --ignore REGEX     names, such as policy/critic.0.weight, that may be in the state of one side only

A step of a refactoring must not change what is learned. Each case trains a few updates with fixed seeds, on one core,
with each side's own code. Then every tensor and number of the checkpoint's policy and algorithm must be the same bit
for bit, and so must the final evaluation and the rows of metrics.jsonl but for times; of these a key that only one
side has is listed and does not count.

Last line of stdout: {"old", "new", "equal", "cases"}. Exit code 0 if everything is equal, 1 if not, 2 for bad input.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = (".*", "__pycache__", "runs", "demos")  # of a directory
TRAIN = (
    "embodied.train out={out}/run device=cpu seed=3 max_minutes=60 runtime=sync runtime.sim_threads=1 "
    "runtime.actor_threads=1 runtime.learner_threads=1"
)
EVALS = "runtime.eval_every=2 runtime.eval_episodes=4 eval_episodes=4"
RL = f"{TRAIN} {EVALS} num_envs=16"
VLA = f"{TRAIN} task=tabletop policy=vla_tiny policy.image_size=32 num_envs=8 runtime.decisions=4"
PIXELS = f"{VLA} {EVALS} algo=ppo algo.epochs=2 algo.num_minibatches=2 total_steps=512"
FEW = "eval_episodes=4 algo.updates=6 algo.validate_every=3 algo.batch_size=8"
REACH = f"{TRAIN} num_envs=16 task=reach policy=flow runtime.decisions=8"
# Words after ``python -m``, command after command. {out} is the folder that they write into, with the run to compare in
# {out}/run, and {<case>} that of another case. Where there is {out}/straight too, it must be equal to {out}/run.
CASES = {
    "reach-gaussian": [f"{RL} task=reach policy=gaussian runtime.decisions=8 total_steps=3072"],
    "pick_place-flow": [f"{RL} task=pick_place policy=flow runtime.decisions=8 total_steps=3072"],
    "stack-grpo": [f"{RL} task=stack policy=flow algo=grpo runtime.decisions=24 total_steps=6144"],
    "tabletop-vla_tiny": [PIXELS],
    "imitation": [
        "embodied.collect out={out}/demos task=lift episodes=6 seed=3 num_threads=1",
        f"{TRAIN} task=lift policy=flow algo=sft data={{out}}/demos runtime.decisions=8 eval_episodes=4 "
        "algo.updates=40 algo.validate_every=10",
    ],
    "rl-flow": [
        f"{RL} task=lift policy=flow init={{imitation}}/run runtime.decisions=8 algo.critic_warmup=2 total_steps=3072"
    ],
    "grounding": [f"{VLA} algo=grounding {FEW}"],
    "sft-vla_tiny": [
        "embodied.collect out={out}/demos task=tabletop episodes=4 seed=3 cameras=[front,wrist] image_size=32 "
        "num_threads=1",
        f"{VLA} algo=sft data={{out}}/demos init={{grounding}}/run {FEW}",
    ],
    "rl-vla_tiny": [f"{PIXELS} init={{sft-vla_tiny}}/run algo.critic_warmup=1"],
    "resume": [
        f"{REACH} runtime.eval_every=2 runtime.eval_episodes=4 eval_episodes=0 total_steps=1536",
        "embodied.train resume={out}/run eval_episodes=4 total_steps=3072",
        f"{REACH} {EVALS} total_steps=3072".replace("/run", "/straight"),
    ],
}


# -- training ----------------------------------------------------------------------------------------------------------
class Side:
    """The code of one side and what it trained. ``kept``: a folder for each case that has run."""

    def __init__(self, name: str, folder: Path, cache: Path | None) -> None:
        self.name, self.code, self.kept = name, folder / "code", folder / "kept"
        if Path(name).is_dir():
            shutil.copytree(name, self.code, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        else:
            self.name = git("rev-parse", "--verify", f"{name}^{{commit}}").decode().strip()
            with tarfile.open(fileobj=io.BytesIO(git("archive", self.name))) as tar:
                tar.extractall(self.code, filter="data")
            self.kept = cache / self.name if cache is not None else self.kept
        self.kept.mkdir(parents=True, exist_ok=True)

    def folder(self, case: str) -> Path:
        """Where the outputs of a case are, once it has run."""
        return self.kept / f"{case}-{digest(case)}"

    def train(self, case: str) -> str:
        """Run the commands of a case, and of those that it needs, unless their outputs are there; the seconds that it
        took. RuntimeError if one fails."""
        if self.folder(case).exists():
            return "cached"
        began = time.monotonic()
        for name in needs(case):
            self.train(name)
        out = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=self.kept))
        places = {"out": str(out)} | {name: str(self.folder(name)) for name in needs(case)}
        environment = os.environ | {"PYTHONPATH": str(self.code), "OMP_NUM_THREADS": "1"}
        try:
            for command in CASES[case]:
                words = [sys.executable, "-m", *(word.format_map(places) for word in command.split())]
                done = subprocess.run(words, cwd=self.code, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{' '.join(words)}\nexit code {done.returncode}: {done.stderr[-2000:]}")
            out.rename(self.folder(case))
        finally:
            shutil.rmtree(out, ignore_errors=True)
        return f"{time.monotonic() - began:.1f}"


def git(*words: str) -> bytes:
    """What git prints. CalledProcessError if it fails."""
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, stdout=subprocess.PIPE).stdout


def needs(case: str) -> list[str]:
    """The cases that a case starts from."""
    return [name for name in CASES if any(f"{{{name}}}" in command for command in CASES[case])]


def digest(case: str) -> str:
    """Of the commands of a case, and of those of the cases that it needs."""
    text = "\n".join([*CASES[case], *map(digest, needs(case))])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# -- comparing ---------------------------------------------------------------------------------------------------------
def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Names and values of all that is in nested dicts and lists."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, f"{name}/{key}")
    else:
        yield name, value


def state_of(run: Path) -> dict[str, Any]:
    """The tensors and numbers of the last checkpoint's policy and algorithm."""
    parts = [(name, run / "checkpoints" / "last" / f"{name}.pt") for name in ("policy", "algorithm")]
    return dict(leaf for name, path in parts for leaf in leaves(torch.load(path, weights_only=True), name))


def results_of(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without times, then the final evaluations."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [{key: row[key] for key in row if not key.startswith(("perf/", "time/", "wall_s"))} for row in rows]
    evals = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((run / "eval").glob("final*.json"))]
    return [dict(leaves(row, "metrics")) for row in rows] + [dict(leaves(found, "eval")) for found in evals]


def difference(old: Any, new: Any) -> str | None:
    """In words; None if there is none."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        alike = not isinstance(old, Tensor) and not isinstance(new, Tensor) and old == new
        return None if alike else f"{old} != {new}"
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return f"{old.dtype} {tuple(old.shape)} != {new.dtype} {tuple(new.shape)}"
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (old, new)]
    if torch.equal(*bits):
        return None
    return f"max abs difference {float((old.double() - new.double()).abs().max()):.3g}"


def compare(old: Path, new: Path, ignore: str | None = None) -> dict[str, Any]:
    """Two runs: how many tensors were compared, what differs in checkpoint and results, and which keys of the results
    only one of them has."""
    state, other = state_of(old), state_of(new)
    alone = [name for name in sorted(state.keys() ^ other.keys()) if ignore is None or not re.search(ignore, name)]
    common = [name for name in state if name in other]
    differ = [f"{name}: only the {'old' if name in state else 'new'} side has it" for name in alone]
    differ += [f"{name}: {found}" for name in common if (found := difference(state[name], other[name]))]
    rows, others = results_of(old), results_of(new)
    if len(rows) != len(others):
        differ.append(f"results: {len(rows)} rows of metrics and final evaluations != {len(others)}")
    keys, other_keys = ({key for row in side for key in row} for side in (rows, others))
    for number, (row, theirs) in enumerate(zip(rows, others, strict=False), 1):
        for key in (key for key in row | theirs if key in keys & other_keys):
            if found := difference(row.get(key, "nothing"), theirs.get(key, "nothing")):
                differ.append(f"{key} of row {number}: {found}")
    tensors = sum(isinstance(state[name], Tensor) for name in common)
    return {"tensors": tensors, "differ": differ, "results_of_one_side": sorted(keys ^ other_keys)}


def judge(case: str, old: Side, new: Side, ignore: str | None) -> dict[str, Any]:
    """Train a case on both sides and compare; what goes into the JSON object."""
    seconds = {"old": "-", "new": "-"}
    try:
        for key, side in (("old", old), ("new", new)):
            seconds[key] = side.train(case)
        result = compare(old.folder(case) / "run", new.folder(case) / "run", ignore)
        for side in (old, new):
            if (straight := side.folder(case) / "straight").exists():
                within = compare(straight, side.folder(case) / "run")["differ"]
                result["differ"] += [f"{side.name} resumed: {found}" for found in within]
    except (RuntimeError, OSError) as error:
        result = {"tensors": 0, "differ": [str(error)], "results_of_one_side": []}
    return {"equal": not result["differ"], "seconds": seconds} | result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--only", default=",".join(CASES), help="case,case")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--ignore")
    options = parser.parse_args()
    asked = options.only.split(",")
    if unknown := [case for case in asked if case not in CASES]:
        parser.error(f"unknown case {unknown[0]}; there are {', '.join(CASES)}")
    if hasattr(os, "sched_setaffinity"):  # the order of sums must not depend on the number of threads
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    cases = {}
    with tempfile.TemporaryDirectory() as temporary:
        try:
            cache = options.cache and options.cache.resolve()
            old, new = (Side(getattr(options, key), Path(temporary, key), cache) for key in ("old", "new"))
        except subprocess.CalledProcessError as error:
            parser.error(str(error))
        for case in asked:
            print(f"{case} ...", file=sys.stderr, flush=True)
            cases[case] = judge(case, old, new, options.ignore)
    print(f"{'case':20}{'tensors':>8}{'old s':>8}{'new s':>8}  result")
    for case, found in cases.items():
        seconds, differ = found["seconds"], found["differ"]
        result = f"{len(differ)} differ, first {differ[0]}" if differ else "equal"
        print(f"{case:20}{found['tensors']:8}{seconds['old']:>8}{seconds['new']:>8}  {result}")
        if found["results_of_one_side"]:
            print(f"{'':46}results that one side has: {', '.join(found['results_of_one_side'])}")
    equal = all(found["equal"] for found in cases.values())
    shortened = {case: found | {"differ": found["differ"][:10]} for case, found in cases.items()}
    print(json.dumps({"old": old.name, "new": new.name, "equal": equal, "cases": shortened}))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
