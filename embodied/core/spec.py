"""Describe an environment before one is built: what is observed, what can be done, how fast, and what can be asked for.

Policies are built from an ``EnvSpec``, data sets are checked against it and exports are written from it. Nothing here
imports torch or a simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN = "train"  # the split of instructions that are trained on
SUCCESS = "success"  # the outcome that evaluations report where an environment has it


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of ``obs["state"]`` or ``obs["privileged"]``."""

    name: str
    size: int
    """Number of entries."""
    unit: str = ""
    """SI unit of an entry before scaling, such as m, rad or m/s; empty for a dimensionless one."""
    frame: str = ""
    """Frame that the entries are expressed in, such as base or tool; empty where there is none."""
    scale: float = 1.0
    """Observed number = scale * quantity in ``unit``."""

    @property
    def entry_names(self) -> tuple[str, ...]:
        """One name for each entry: ``tcp_pos[0]``, ``tcp_pos[1]``, ..."""
        return tuple(f"{self.name}[{i}]" for i in range(self.size))


@dataclass(frozen=True, slots=True)
class CameraSpec:
    """A camera of an environment: ``obs["images.<name>"]`` is uint8 [N, height, width, 3]."""

    name: str
    height: int
    """Pixels."""
    width: int
    """Pixels."""


@dataclass(frozen=True, slots=True)
class ActionTerm:
    """One dimension of a ``Box`` of actions, which is in [-1, 1]."""

    name: str
    meaning: str = ""
    """What the dimension moves, in words."""
    scale: float = 1.0
    """Commanded quantity = offset + scale * action."""
    offset: float = 0.0
    """Commanded quantity at action 0, in ``unit``."""
    unit: str = ""
    """Unit of the commanded quantity."""


@dataclass(frozen=True, slots=True)
class Box:
    """Continuous actions: float32 [..., A], each dimension in [-1, 1]."""

    terms: tuple[ActionTerm, ...]

    @property
    def size(self) -> int:
        """Number A of dimensions."""
        return len(self.terms)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(term.name for term in self.terms)


@dataclass(frozen=True, slots=True)
class Discrete:
    """A choice between n actions: int64 [..., 1], from 0 to n - 1."""

    names: tuple[str, ...]
    """What each choice is called; n of them."""

    @property
    def size(self) -> int:
        """Number A of entries of an action: one, the index of the choice."""
        return 1

    @property
    def n(self) -> int:
        """Number of choices."""
        return len(self.names)


ActionSpace = Box | Discrete


@dataclass(frozen=True, slots=True)
class Instruction:
    """A text that a task can be given."""

    text: str
    goal: str
    """What the text asks for; paraphrases share it."""
    split: str = TRAIN
    """``train``, or what the text is kept for."""


@dataclass(frozen=True, slots=True)
class StartStage:
    """A later stage of a task that an episode can start from, such as with the object in the gripper."""

    name: str
    share: float
    """Share of training episodes that start there unless a sampler says otherwise. Evaluations never do."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """An environment as policies, data sets, exports and robots see it."""

    task: str
    """Name under which the task is configured."""
    state: tuple[Term, ...]
    """Parts of ``obs["state"]``, float32 [N, S], in order."""
    action: ActionSpace
    """What a policy can do."""
    control_dt_s: float
    """Seconds between two actions."""
    max_episode_steps: int
    """Time limit, control steps."""
    privileged: tuple[Term, ...] = ()
    """Parts of ``obs["privileged"]``, float32 [N, P]: what only a simulator knows, for critics; never exported."""
    cameras: tuple[CameraSpec, ...] = ()
    """What is seen; empty where a policy gets a state vector alone."""
    instructions: tuple[Instruction, ...] = ()
    """Every text that the task can be given; ``obs["instruction"]``, int64 [N], indexes them. Empty for none."""
    stages: tuple[StartStage, ...] = ()
    """Stages beyond the ordinary start from which an episode can start; ``EpisodePlans.stage_n`` counts them from 1."""
    outcomes: tuple[str, ...] = (SUCCESS,)
    """Names of what is true or false of a state and counted for episodes; empty for a simulator that has none."""
    robot: str = ""
    """Manufacturer and model of the robot that acts, as data sets name it; empty where there is none."""
    descriptions: tuple[str, ...] = ()
    """In words, everything that a camera can show; empty where the environment does not label its pictures."""

    @property
    def state_dim(self) -> int:
        """Size S of ``obs["state"]``."""
        return sum(term.size for term in self.state)

    @property
    def privileged_dim(self) -> int:
        """Size P of ``obs["privileged"]``."""
        return sum(term.size for term in self.privileged)

    @property
    def action_dim(self) -> int:
        """Size A of an action."""
        return self.action.size

    @property
    def action_names(self) -> tuple[str, ...]:
        """One name for each entry of an action."""
        return self.action.names if isinstance(self.action, Box) else ("choice",)

    @property
    def state_names(self) -> tuple[str, ...]:
        """One name for each entry of ``obs["state"]``."""
        return tuple(name for term in self.state for name in term.entry_names)

    @property
    def has_success(self) -> bool:
        """Whether episodes can succeed, so that success rates exist."""
        return SUCCESS in self.outcomes

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the instructions."""
        return tuple(instruction.text for instruction in self.instructions)

    @property
    def goals(self) -> tuple[str, ...]:
        """The goal of each instruction."""
        return tuple(instruction.goal for instruction in self.instructions)

    @property
    def splits(self) -> tuple[str, ...]:
        """The split of each instruction."""
        return tuple(instruction.split for instruction in self.instructions)

    @classmethod
    def of_sizes(
        cls,
        task: str,
        *,
        state: int,
        action: int,
        privileged: int = 0,
        control_dt_s: float = 0.05,
        max_episode_steps: int = 50,
        instructions: tuple[Instruction, ...] = (),
        cameras: tuple[CameraSpec, ...] = (),
    ) -> EnvSpec:
        """A spec whose entries have no names or units of their own, as measurements and tests need it."""
        return cls(
            task=task,
            state=(Term("state", state),),
            action=Box(tuple(ActionTerm(f"action[{i}]") for i in range(action))),
            control_dt_s=control_dt_s,
            max_episode_steps=max_episode_steps,
            privileged=(Term("privileged", privileged),) if privileged else (),
            cameras=cameras,
            instructions=instructions,
        )
