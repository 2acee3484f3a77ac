"""Options of the commands ``deploy`` and ``serve``."""

from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from math import inf
from typing import ClassVar, Literal

from embodied.core.errors import UserError, unknown_name
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.control.inference import TIMEOUT_S
from embodied.deployment.control.schedule import Schedule, ScheduleName, ticks_per_step
from embodied.deployment.serving.protocol import read_api_key
from embodied.deployment.validation import Options, Ranges


@dataclass(frozen=True)
class DeployOptions(Options):
    """Options of the command; see the top of embodied/deploy.py."""

    RANGES: ClassVar = {
        "episodes": (1, inf), "seed": (0, inf), "num_threads": (1, inf), "latency_ms": (0, 1e4),
        "plan_timeout_s": (1e-3, 600),
    }  # fmt: skip

    bundle: str
    robot: str = "sim"
    episodes: int = 1
    seed: int = 0
    schedule: ScheduleName = "synchronous"
    execute: int | None = None
    rate_hz: float | None = None
    interpolation: Literal["hold", "linear"] = "hold"
    instruction: str | None = None
    server: str | None = None
    api_key_file: str | None = None
    noise: Literal["zero", "seeded"] | None = None
    latency_ms: float = 0.0
    plan_timeout_s: float = TIMEOUT_S
    speed: float = 1.0
    confirm: bool = False
    home: bool = True
    mapping: str | None = None
    propose_mapping: bool = False
    confirm_mapping: str | None = None
    robot_options: str = "{}"
    perturbation: Literal["none", "real"] = "none"
    lockstep: bool = False
    report: str | None = None
    video: bool = True
    num_threads: int = 1

    def check_fits(self, bundle: Bundle) -> None:
        """Raise UserError for values that do not fit a policy, before a robot is connected."""
        ticks_per_step(bundle, self.rate_hz)
        execute = bundle.execute if self.execute is None else self.execute
        Schedule(self.schedule, bundle.horizon, execute, bundle.action_dim, bundle.control_dt_s)

    def check(self) -> None:
        if self.robot != "sim" and ":" not in self.robot:
            raise unknown_name("robot", self.robot, ["sim", "<module>:<Class>"])
        if self.robot != "sim" and self.mapping is None:
            raise UserError(f"robot={self.robot} needs mapping=<file>; propose_mapping=true writes a first draft")
        if self.robot != "sim" and self.lockstep:
            raise UserError("lockstep=true is for robot=sim: the time of a real robot passes by itself")
        if self.robot != "sim" and self.perturbation != "none":
            raise UserError(f"perturbation={self.perturbation} is for robot=sim: a real robot is as it is")
        if self.robot == "sim" and self.robot_options != "{}":
            raise UserError("robot_options: robot=sim has those of its bundle, and takes no others")
        if self.server is None and self.api_key_file is not None:
            raise UserError("api_key_file is for server=ws://host:port: without it, no key is asked for")
        if self.robot == "sim" and self.instruction is not None:
            raise UserError("instruction: robot=sim takes that of its episode, by which it judges success")
        if self.robot == "sim" and (self.propose_mapping or (self.mapping, self.confirm_mapping) != (None, None)):
            raise UserError("mapping: robot=sim has the names and units of its bundle, and needs none")
        if self.propose_mapping and self.confirm_mapping is not None:
            raise UserError("propose_mapping and confirm_mapping: give one; between them a person looks at the picture")


@dataclass(frozen=True)
class ServeOptions(Options):
    """Options of the command; see the top of embodied/serve.py."""

    RANGES: ClassVar[Ranges] = {
        "port": (0, 65535), "max_batch": (1, 4096), "max_clients": (1, 4096), "idle_s": (1e-3, 86400),
        "num_threads": (1, inf),
    }  # fmt: skip

    bundle: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    insecure: bool = False
    max_batch: int = 32
    max_clients: int = 64
    idle_s: float = 1800.0
    num_threads: int = 1
    device: Literal["cpu", "cuda"] = "cpu"

    @cached_property
    def api_key(self) -> str | None:
        """Key that clients must show, from the file or the environment; None asks for none."""
        return read_api_key(self.api_key_file)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check(self) -> None:
        """Raise UserError for a missing address, and for one that strangers reach without a key."""
        if not self.host.strip():
            raise UserError("host: got '', allowed: an address, such as 127.0.0.1, or 0.0.0.0 for all of this machine")
        if self.api_key is None and not self.insecure and not self.is_loopback:
            cure = "give api_key_file=<file>, or insecure=true if the network keeps strangers out"
            raise UserError(f"host={self.host} lets other machines command a robot without a key: {cure}")
