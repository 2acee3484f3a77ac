"""Pages of runs: read what the files of run directories say, and write it as HTML (embodied/report/page.py).

config.yaml, metrics.jsonl, eval/, state.json, certificate.json ──► read_run_files ──► Run ──► page ──► page.html
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from embodied.core.config import GROUPS
from embodied.core.errors import UserError
from embodied.core.user_files import recorded
from embodied.report.curves import Run
from embodied.report.metrics import METRICS_FILE, read_metrics, write_atomically
from embodied.report.page import Film, page
from embodied.session.config import CONFIG_DIR, to_mapping
from embodied.session.defaults import compose_new
from embodied.session.files import read_certificate, read_json, read_sections
from embodied.session.results.state import read_status, shares_of

PAGE_FILE = "page.html"


def write_page(run_dirs: Sequence[Path], out: Path | None = None, films: Sequence[Film] = ()) -> Path:
    """Write the page of a run, or of several side by side, and return its path.

    out: None is ``page.html`` in the directory of the run, or beside that of the first of several. UserError for a
    directory without a run, or a run without a metric and an evaluation. Imports no torch.
    """
    path = out or (run_dirs[0] if len(run_dirs) == 1 else run_dirs[0].parent) / PAGE_FILE
    text = page([read_run_files(run_dir) for run_dir in run_dirs], films)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path


def read_run_files(run_dir: Path) -> Run:
    """Read what a page shows of a run. UserError, see ``write_page``."""
    status, sections, rows = read_status(run_dir), read_sections(run_dir), read_metrics(run_dir / METRICS_FILE)
    read = {path.stem: read_json(path) for path in sorted((run_dir / "eval").glob("*.json"))}
    faults = [f"eval/{name}.json cannot be read" for name, found in read.items() if not found]
    files = {name: found for name, found in read.items() if isinstance(found.get("episodes"), int)}
    during = [found for name, found in files.items() if name.startswith("train_")]
    finals = {int(name.removeprefix("final_")): name for name in files if name.startswith("final_")}
    if not rows and not finals:
        raise UserError(
            f"'{run_dir}' has no metrics and no final evaluation: a page needs a run that has begun to train"
        )
    if not rows:
        faults.append(f"{METRICS_FILE} is missing or empty: steps, times and curves are not known")
    last = finals.get(status["steps"] if rows else max(finals), "")  # not that of a run that was trained further
    wall_s = {row["iteration"]: row["wall_s"] for row in rows}
    evaluations = [
        found | {"steps": found["env_steps"], "wall_s": wall_s[found["iteration"]]}
        for found in sorted(during, key=lambda found: int(found["iteration"])) if found["iteration"] in wall_s
    ]  # fmt: skip
    results = {"final": files[last]} if last in files else {}
    results |= {f"confirmation, {e['steps']} steps": e["confirmation"] for e in evaluations if "confirmation" in e}
    results |= {name: found for name, found in files.items() if name != last and found not in during}
    certificate, doubt, _ = read_certificate(run_dir)
    config, defaults, waits = flat(sections), defaults_of(sections, run_dir), shares_of(rows)
    return Run(status, config, defaults, rows, waits, evaluations, results, certificate, doubt, faults)


def defaults_of(sections: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return the default of each key that differs from it; None for all if this version of the code cannot tell."""
    words = {group: sections[group]["name"] for group in GROUPS if group in sections}
    if not (CONFIG_DIR / "sim" / f"{words.get('sim')}.yaml").is_file():
        words.pop("sim", None)  # the only one of its family
    given = {key: sections[key] for key in ("init", "data") if sections.get(key)}
    try:
        words["task"] = recorded(sections["task"], run_dir)["name"]
        usual = flat(json.loads(json.dumps(to_mapping(compose_new(words | given)))))
    except UserError:
        usual = {}
    chosen: Any = OmegaConf.load(CONFIG_DIR / "train.yaml")
    usual |= {f"{group}.name": name for entry in chosen.defaults if entry != "_self_" for group, name in entry.items()}
    found, usual = flat(sections), usual | {"task.name": words["task"], "init": None, "data": None}
    usual |= {} if "sim" in words else {"sim.name": found.get("sim.name")}
    return {key: usual.get(key) for key in found | usual if found.get(key) != usual.get(key)}


def flat(sections: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by their whole keys; an empty section is a value."""
    found: dict[str, Any] = {}
    for key, value in sections.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found
