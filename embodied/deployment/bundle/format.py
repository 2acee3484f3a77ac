"""A bundle: the directory with all that runs a policy on a robot. numpy alone reads it.

policy.onnx     ``plan`` of the policy, normaliser inside; inputs and outputs in physical units. A large policy has the
                files of transformers in its place (embodied.deployment.bundle.torch_runner)
bundle.json     ``Bundle``: what goes in and out, in which order and unit, at which rate, within which limits
parity.npz      recorded inputs and the outputs of torch for them
simulation.json options of task and simulator, for robot=sim
README.md       how to run it
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from embodied.core.errors import UserError, one_line, unknown_name
from embodied.core.spec import ActionTerm, ArmSpec, Box, CameraSpec, EnvSpec, Instruction, Term
from embodied.deployment.bundle.files import read_json, sha256
from embodied.deployment.bundle.plausible import check_plausible
from embodied.deployment.validation import from_json

FORMAT = 2
"""Version of the layout; a reader refuses others."""
BUNDLE_FILE, POLICY_FILE, PARITY_FILE, README_FILE = "bundle.json", "policy.onnx", "parity.npz", "README.md"
SIMULATION_FILE = "simulation.json"
MODEL_FILE, OPTIONS_FILE, STATISTICS_FILE = "config.json", "policy.json", "statistics.safetensors"
"""Files of a bundle in the layout of transformers, besides weights and tokenizer."""
BESIDE_POLICY = (PARITY_FILE, SIMULATION_FILE, README_FILE)
"""Files that are no part of the policy."""
OF_TRANSFORMERS = re.compile(
    r"((generation_|preprocessor_|processor_|tokenizer_)?config|policy|tokenizer|special_tokens_map|added_tokens|vocab"
    r"|model\.safetensors\.index)\.json|(model(-\d{5}-of-\d{5})?|statistics)\.safetensors|tokenizer\.model"
    r"|chat_template\.jinja|(merges|vocab)\.txt"
)
"""Files that a policy in the layout of transformers may have: no code, no pickles, nothing that points elsewhere."""
MAX_JSON_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class ObservedRange:
    """Values of one entry of the state in the recorded observations, in physical units."""

    name: str
    """Name of the entry, such as ``joint_pos[0]``."""
    low: float
    """Lowest value."""
    high: float
    """Highest value."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a bundle comes from."""

    task: str
    """Task that the policy was trained on."""
    policy: str
    """Name of the policy in configurations."""
    run: str
    """Run directory."""
    checkpoint: str
    """Checkpoint of the run."""
    env_steps: int
    """Control steps of training."""
    success_at_end: float | None
    """Success of the run's last evaluation in simulation; None if it has none."""
    versions: dict[str, str]
    """Versions of the libraries that exported it."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Description of a bundle, the content of ``bundle.json``."""

    format: int
    """FORMAT."""
    origin: Origin
    """Where it comes from."""
    state: tuple[Term, ...]
    """Parts of the input ``state``, float32 [N, S], in order. Entries are in ``unit``, not scaled: ``scale`` says what
    training observed and is inside ``policy.onnx``."""
    state_range: tuple[ObservedRange, ...]
    """Range of each entry of ``state`` in recorded observations, S of them."""
    history: int
    """Number of observations that the policy reads; 1 is the present one alone."""
    cameras: tuple[CameraSpec, ...]
    """Inputs ``images.<name>``, uint8 [N, height, width, 3], RGB."""
    instructions: tuple[Instruction, ...]
    """Instructions; the input ``instruction``, int64 [N], indexes them. Empty if the policy reads none."""
    action_type: Literal["ee_delta", "joint_delta"]
    """``ee_delta`` or ``joint_delta``, as in ``arm.control``."""
    action: tuple[ActionTerm, ...]
    """Entries of an action, A of them. The output ``actions`` is in ``unit``: offset + scale * x, with x in [-1, 1].
    The last entry is the target of each finger, in metres: ``arm.gripper.open_m`` opens."""
    arm: ArmSpec
    """The arm: order and names of its joints, limits, gains, default pose, kinematics, workspace."""
    robot: str
    """Manufacturer and model of the robot in training."""
    control_dt_s: float
    """Seconds between two actions."""
    max_episode_steps: int
    """Time limit in training, control steps."""
    horizon: int
    """H, actions of a chunk."""
    execute: int
    """E, actions that training executed of a chunk."""
    max_delay: int
    """D, largest inference delay in control steps that the policy was trained for; 0: none. If positive, ``prefix``
    float32 [N, D, A] (physical units) and ``delay`` int64 [N] are inputs too."""
    noise_shape: tuple[int, ...]
    """Shape of the input ``noise`` for one decision, float32 [N, *noise_shape]; zeros plan deterministically."""
    noise: Literal["zero", "seeded"]
    """Noise of deployment: ``zero`` or ``seeded``."""
    files: dict[str, str]
    """SHA-256 of every other file of the bundle."""
    parity_tolerance: float
    """Largest allowed difference of outputs, in units of the action's scale."""
    parity_max: float
    """Largest difference that the export found."""
    notes: tuple[str, ...]
    """How to read the other entries, for people (``embodied.deployment.bundle.readme.NOTES``)."""

    @property
    def state_dim(self) -> int:
        """Size S of ``state``."""
        return sum(term.size for term in self.state)

    @property
    def action_dim(self) -> int:
        """Size A of an action."""
        return len(self.action)

    @property
    def env_spec(self) -> EnvSpec:
        """Spec of the environment that the policy was trained in."""
        return EnvSpec(
            task=self.origin.task,
            state=self.state,
            action=Box(self.action),
            control_dt_s=self.control_dt_s,
            max_episode_steps=self.max_episode_steps,
            cameras=self.cameras,
            instructions=self.instructions,
            robot=self.robot,
            arm=self.arm,
        )

    @property
    def layout(self) -> str:
        """``onnx``, or ``transformers`` for a large policy."""
        return "onnx" if POLICY_FILE in self.files else "transformers"

    @property
    def digest(self) -> str:
        """SHA-256 of the policy: that of policy.onnx, or one over the names and hashes of a large one's files."""
        if self.layout == "onnx":
            return self.files[POLICY_FILE]
        lines = [f"{self.files[name]}  {name}\n" for name in sorted(self.files) if name not in BESIDE_POLICY]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def instruction_index(self, text: str | None) -> int:
        """Return the index of an instruction. UserError with the nearest one for a text that is not in the bundle."""
        texts = [instruction.text for instruction in self.instructions]
        if text is None:
            if len(texts) == 1:
                return 0
            raise UserError(f"instruction: the policy needs one, such as '{texts[0]}'")
        if text not in texts:
            raise unknown_name("instruction", text, texts)
        return texts.index(text)


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
