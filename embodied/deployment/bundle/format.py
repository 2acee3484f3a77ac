"""A bundle: the directory with all that runs a policy on a robot. numpy alone reads it.

policy.onnx     ``plan`` of the policy, normaliser inside; inputs and outputs in physical units. A large policy has the
                files of transformers in its place (embodied.deployment.bundle.torch_runner)
bundle.json     ``Bundle``: what goes in and out, in which order and unit, at which rate, within which limits
parity.npz      recorded inputs and the outputs of torch for them
simulation.json options of task and simulator, for robot=sim
README.md       how to run it
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embodied.core.errors import UserError, one_line
from embodied.deployment.bundle.description import BESIDE_POLICY, PARITY_FILE, POLICY_FILE, SIMULATION_FILE, Bundle
from embodied.deployment.bundle.files import read_json, sha256
from embodied.deployment.bundle.plausible import check_plausible
from embodied.deployment.validation import from_json

FORMAT = 2
"""Version of the layout; a reader refuses others."""
BUNDLE_FILE = "bundle.json"
MODEL_FILE, OPTIONS_FILE, STATISTICS_FILE = "config.json", "policy.json", "statistics.safetensors"
"""Files of a bundle in the layout of transformers, besides weights and tokenizer."""
OF_TRANSFORMERS = re.compile(
    r"((generation_|preprocessor_|processor_|tokenizer_)?config|policy|tokenizer|special_tokens_map|added_tokens|vocab"
    r"|model\.safetensors\.index)\.json|(model(-\d{5}-of-\d{5})?|statistics)\.safetensors|tokenizer\.model"
    r"|chat_template\.jinja|(merges|vocab)\.txt"
)
"""Files that a policy in the layout of transformers may have: no code, no pickles, nothing that points elsewhere."""
MAX_JSON_BYTES = 8 * 2**20


def write_description(path: Path, bundle: Bundle) -> None:
    """Write ``bundle.json`` into a bundle's directory."""
    (path / BUNDLE_FILE).write_text(json.dumps(asdict(bundle), indent=1) + "\n", encoding="utf-8")


def read_bundle(path: Path, with_policy: bool = True) -> Bundle:
    """Read and check a bundle. UserError for a missing or changed file, another format or a malformed description.

    with_policy: whether the policy's own files are needed; a server has them where another machine plans.
    """
    if not (path / BUNDLE_FILE).is_file():
        what = "has no bundle.json" if path.is_dir() else "is not a directory"
        raise UserError(f"bundle={path} {what}: give the directory that 'python -m embodied.export' wrote")
    content = read_json(path / BUNDLE_FILE, MAX_JSON_BYTES)
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        got = repr(found)[:30]
        raise UserError(f"{path / BUNDLE_FILE} has format {got}, this version reads {FORMAT}: export the run again")
    bundle = parse_bundle(content, BUNDLE_FILE)
    _check_files(path, bundle, with_policy)
    return bundle


def parse_bundle(content: Any, where: str) -> Bundle:
    """Return the description of a bundle from JSON values. UserError if it is malformed or not plausible."""
    bundle = from_json(Bundle, content, where)
    check_plausible(bundle, where)
    return bundle


def read_simulation(path: Path) -> dict[str, Any]:
    """Return ``simulation.json`` of a bundle: options of a task of ours, and of the simulator. UserError otherwise."""
    found = read_json(path / SIMULATION_FILE, MAX_JSON_BYTES)
    task = found.get("task") if isinstance(found, dict) else None
    name = task.get("name") if isinstance(task, dict) else None
    if not isinstance(name, str) or not name.isidentifier():  # gym/<module>:<class> would import and run code
        raise UserError(f"{path / SIMULATION_FILE}: task.name: got {str(name)[:60]!r}, needed the name of a task")
    return dict(found)


def _check_files(path: Path, bundle: Bundle, with_policy: bool) -> None:
    """Raise UserError unless a bundle's directory has the files of its description, unchanged, and no others."""
    onnx = bundle.layout == "onnx"
    of_policy = (POLICY_FILE,) if onnx else (MODEL_FILE, OPTIONS_FILE, STATISTICS_FILE)
    for name in (*of_policy, PARITY_FILE, SIMULATION_FILE):
        if name not in bundle.files:
            raise UserError(f"{BUNDLE_FILE}: files: lacks the hash of {name}")
    for name in bundle.files:
        if name not in (*of_policy, *BESIDE_POLICY) and (onnx or not OF_TRANSFORMERS.fullmatch(name)):
            raise UserError(f"{BUNDLE_FILE}: files: got '{name[:60]}', which no bundle of this layout has")
    for entry in path.iterdir():
        if entry.name not in (BUNDLE_FILE, *bundle.files):
            name = one_line(entry.name)[:60]
            raise UserError(f"bundle={path} has '{name}', which was not exported: move it elsewhere")
    for name, expected in bundle.files.items():
        if not with_policy and name not in BESIDE_POLICY:
            continue
        if not (path / name).is_file():
            raise UserError(f"bundle={path} lacks {name}: copy the whole directory")
        if sha256(path / name) != expected:
            raise UserError(f"{path / name} is not the file that was exported (its SHA-256 differs): copy it again")
