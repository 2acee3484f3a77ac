"""What a bundle says of its policy: the content of ``bundle.json``. numpy only."""

import hashlib
from dataclasses import dataclass
from typing import Literal

from embodied.core.errors import UserError, unknown_name
from embodied.core.spec import ActionTerm, Arms, ArmSpec, Box, CameraSpec, EnvSpec, Instruction, Term, arms_of

POLICY_FILE, PARITY_FILE, SIMULATION_FILE, README_FILE = "policy.onnx", "parity.npz", "simulation.json", "README.md"
BESIDE_POLICY = (PARITY_FILE, SIMULATION_FILE, README_FILE)  # files that are no part of the policy


@dataclass(frozen=True, slots=True)
class ObservedRange:
    """Values of one entry of the state in the recorded observations, in physical units."""

    name: str
    """Name of the entry, such as ``joint_pos[0]``."""
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a bundle comes from."""

    task: str
    policy: str
    """Names of the task and of the policy in configurations."""
    run: str
    checkpoint: str
    """Run directory, and the checkpoint in it."""
    env_steps: int
    """Control steps that the checkpoint's run learned from; 0 after supervised learning."""
    success_at_end: float | None
    """Success of the run's last evaluation in simulation; None if it has none."""
    versions: dict[str, str]
    """Versions of the libraries that exported it."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Description of a bundle, the content of ``bundle.json``."""

    format: int
    origin: Origin
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
    The last entry of an arm is the target of each finger, in ``arm.gripper.position_unit``: ``arm.gripper.open_m``
    opens."""
    arm: ArmSpec
    """The arm: order and names of its joints, limits, gains, default pose, kinematics, workspace."""
    right_arm: ArmSpec | None
    """The right one of two arms of a kind, as in ``EnvSpec``; then ``arm`` is the left one. None: there is one arm."""
    robot: str
    """Manufacturer and model of the robot in training."""
    control_dt_s: float
    max_episode_steps: int
    """Time limit in training, control steps."""
    horizon: int
    execute: int
    """H, actions of a chunk, and E, those that training executed of it."""
    max_delay: int
    """D, largest inference delay in control steps that the policy was trained for; 0: none. If positive, ``prefix``
    float32 [N, D, A] (physical units) and ``delay`` int64 [N] are inputs too."""
    noise_shape: tuple[int, ...]
    """Shape of the input ``noise`` for one decision, float32 [N, *noise_shape]; zeros plan deterministically."""
    noise: Literal["zero", "seeded"]
    files: dict[str, str]
    """SHA-256 of every other file of the bundle."""
    parity_tolerance: float
    parity_max: float
    """Largest difference of outputs that is allowed and that the export found, in units of the action's scale."""
    notes: tuple[str, ...]
    """How to read the other entries, for people (``embodied.deployment.bundle.write.notes_of``)."""

    @property
    def arms(self) -> Arms:
        return arms_of(self.arm, self.right_arm)

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
            task=self.origin.task, state=self.state, action=Box(self.action), control_dt_s=self.control_dt_s,
            max_episode_steps=self.max_episode_steps, cameras=self.cameras, instructions=self.instructions,
            robot=self.robot, arm=self.arm, right_arm=self.right_arm,
        )  # fmt: skip

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
        if text is None and len(texts) == 1:
            return 0
        if text is None:
            raise UserError(f"instruction: the policy needs one, such as '{texts[0]}'")
        if text not in texts:
            raise unknown_name("instruction", text, texts)
        return texts.index(text)
