"""A bundle: the directory with all that runs a policy on a robot. numpy alone reads it.

policy.onnx     ``plan`` of the policy, normaliser inside; inputs and outputs in physical units. A large policy has the
                files of transformers in its place (embodied.run.torch_runner)
bundle.json     ``Bundle``: what goes in and out, in which order and unit, at which rate, within which limits
parity.npz      recorded inputs and the outputs of torch for them
simulation.json options of task and simulator, for robot=sim
README.md       how to run it
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError, unknown_name
from embodied.core.spec import ActionTerm, ArmSpec, CameraSpec, Instruction, Term

FORMAT = 1
"""Version of the layout; a reader refuses others."""
BUNDLE_FILE, POLICY_FILE, PARITY_FILE, README_FILE = "bundle.json", "policy.onnx", "parity.npz", "README.md"
SIMULATION_FILE = "simulation.json"
MODEL_FILE, OPTIONS_FILE, STATISTICS_FILE = "config.json", "policy.json", "statistics.safetensors"
"""Files of a bundle in the layout of transformers, beside weights and tokenizer."""
BESIDE_POLICY = (PARITY_FILE, SIMULATION_FILE, README_FILE)
"""Files that are no part of the policy."""
MAX_JSON_BYTES = 8 * 2**20

T = TypeVar("T")


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
    action_type: str
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
    noise: str
    """Noise of deployment: ``zero`` or ``seeded``."""
    files: dict[str, str]
    """SHA-256 of every other file of the bundle."""
    parity_tolerance: float
    """Largest allowed difference of outputs, in units of the action's scale."""
    parity_max: float
    """Largest difference that the export found."""

    @property
    def state_dim(self) -> int:
        """Size S of ``state``."""
        return sum(term.size for term in self.state)

    @property
    def action_dim(self) -> int:
        """Size A of an action."""
        return len(self.action)

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
    if (path / BUNDLE_FILE).stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{path / BUNDLE_FILE} is larger than {MAX_JSON_BYTES} bytes: it is no description of a bundle")
    try:
        content = json.loads((path / BUNDLE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path / BUNDLE_FILE}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise UserError(f"{path / BUNDLE_FILE} has format {found!r}, this version reads {FORMAT}: export the run again")
    bundle = from_json(Bundle, content, BUNDLE_FILE)
    for name, expected in bundle.files.items():
        if Path(name).name != name:
            raise UserError(f"{BUNDLE_FILE}: files: got '{name}', allowed: names without a folder")
        if not with_policy and name not in BESIDE_POLICY:
            continue
        if not (path / name).is_file():
            raise UserError(f"bundle={path} lacks {name}: copy the whole directory")
        if sha256(path / name) != expected:
            raise UserError(f"{path / name} is not the file that was exported (its SHA-256 differs): copy it again")
    of_policy = (POLICY_FILE,) if OPTIONS_FILE not in bundle.files else (MODEL_FILE, OPTIONS_FILE, STATISTICS_FILE)
    for name in (*of_policy, PARITY_FILE, SIMULATION_FILE):
        if name not in bundle.files:
            raise UserError(f"{BUNDLE_FILE}: files: lacks the hash of {name}")
    return bundle


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file, without loading pickles."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def from_json(cls: type[T], content: Any, where: str) -> T:
    """Build a dataclass from JSON values by its annotations. UserError that names the key that does not fit."""
    return typing.cast(T, _value(cls, content, where))


def _value(kind: Any, content: Any, where: str) -> Any:
    """Return ``content`` as ``kind``: a dataclass, tuple, dict, literal, union with None, or plain value."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return None if content is None else _value(inner[0], content, where)
    if origin is tuple:
        if not isinstance(content, list) or (inner[-1] is not Ellipsis and len(content) != len(inner)):
            raise UserError(f"{where}: got {_short(content)}, needed a list of {len(inner)} values")
        kinds = [inner[0]] * len(content) if inner[-1] is Ellipsis else inner
        return tuple(_value(of, item, f"{where}[{i}]") for i, (of, item) in enumerate(zip(kinds, content, strict=True)))
    if origin is dict:
        if not isinstance(content, dict):
            raise UserError(f"{where}: got {_short(content)}, needed an object")
        return {str(key): _value(inner[1], item, f"{where}.{key}") for key, item in content.items()}
    if origin is typing.Literal:
        if content not in inner:
            raise UserError(f"{where}: got {_short(content)}, allowed: {', '.join(map(str, inner))}")
        return content
    if is_dataclass(kind):
        return _dataclass(typing.cast(type[Any], kind), content, where)
    if kind is float and isinstance(content, int) and not isinstance(content, bool):
        content = float(content)
    if not isinstance(content, kind) or (isinstance(content, bool) and kind is not bool):
        raise UserError(f"{where}: got {_short(content)}, needed {kind.__name__}")
    if isinstance(content, float) and not np.isfinite(content):
        raise UserError(f"{where}: got {content}, needed a finite number")
    return content


def _dataclass(cls: type[Any], content: Any, where: str) -> Any:
    """Return an instance of ``cls`` with the fields of an object; every field must be there, and no other."""
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: got {_short(content)}, needed an object")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    missing, unknown = [name for name in names if name not in content], [key for key in content if key not in names]
    if missing or unknown:
        raise UserError(
            f"{where}: lacks {', '.join(missing) or 'nothing'}; has unknown {', '.join(unknown) or 'nothing'}"
        )
    return cls(**{name: _value(hints[name], content[name], f"{where}.{name}") for name in names})


def _short(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= 60 else f"{text[:57]}..."
