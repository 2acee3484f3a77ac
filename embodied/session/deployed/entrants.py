"""Policies of a comparison, each of which plays the same episodes.

run or checkpoint directory, bundle, ws://server ──► read_entrant ──► Entrant ──► enter ──► play(plans)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans
from embodied.core.errors import UserError, one_line
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.deployment.bundle.format import BUNDLE_FILE, read_simulation
from embodied.deployment.bundle.runner import Planner
from embodied.deployment.serving.client import PolicyConnection, RemotePlanner
from embodied.deployment.serving.protocol import read_api_key
from embodied.runtime.config import EvalNoise
from embodied.runtime.evaluator import run_episodes
from embodied.session.config import RunConfig, compose_run, read_acting, resolve, to_mapping
from embodied.session.deployed.planned import PlannedPolicy, ServerPolicy, read_server_mapping
from embodied.session.deployed.runners import open_runner
from embodied.session.factories import (
    acting_device,
    delay_steps,
    load_checkpoint,
    load_policy,
    make_env,
    make_spec,
    with_delays,
)
from embodied.session.files import CONFIG_FILE
from embodied.session.kept_episodes import identity

TIMEOUT_S = 60.0  # of a server's reply


@dataclass
class Entrant:
    """A policy, and what it needs of an environment. ``env`` is None until it enters one."""

    name: str
    config: RunConfig
    """Configuration with the task and simulator that it was trained in, as far as they are known."""
    policy: Policy
    spec: EnvSpec
    """Spec that it was trained for. It observes the cameras of the spec."""
    noise: EvalNoise
    origin: Mapping[str, str]
    """Its checkpoint with the SHA-256 of that, or the SHA-256 of a bundle's policy; empty for a server of others."""
    max_delay: int = 0
    """Largest delay of inference that it knows of, control steps."""
    env: VecEnv | None = None

    def enter(self, config: RunConfig, num_envs: int, num_threads: int, delay_ms: float | None) -> VecEnv:
        """Build the environments of ``config`` for this policy; the caller closes them.

        delay_ms: see ``delay_steps``. UserError if the policy does not know such a delay.
        """
        delay = delay_steps(self.spec, self.max_delay, delay_ms)
        env = make_env(config, num_envs, num_threads, cameras=self.spec.cameras)
        self.env = with_delays(env, self.policy.execute, self.max_delay, delay)
        self.policy.to(acting_device(config))
        return self.env

    def play(self, plans: EpisodePlans) -> NDArray[np.int64]:
        """Run episodes; return 1 for each that was solved at its end, else 0, in the order of the plans."""
        assert self.env is not None
        ended = run_episodes(self.policy, self.env, plans, self.noise)
        assert ended is not None
        return ended.success_at_end_M.numpy().astype(np.int64)


def read_entrant(
    name: str, noise: EvalNoise | None, device: str, base: RunConfig | None, mapping: str | None, opened: ExitStack
) -> Entrant:
    """Load a policy by its name. UserError for one that is none, ConnectionError for a server that does not answer.

    base: configuration of the comparison's environments, if it is known yet. mapping: file for servers of others.
    """
    path = Path(name)
    if (path / BUNDLE_FILE).is_file() or name.startswith(("ws://", "wss://")):
        return _read_planned(name, noise, device, base, mapping, opened)
    run_dir, checkpoint = (path.parents[1], path.name) if path.parent.name == "checkpoints" else (path, "last")
    if not (run_dir / CONFIG_FILE).is_file():
        allowed = "the directory of a run, of a checkpoint or of a bundle, or ws://host:port"
        raise UserError(f"policies: '{name}' is no policy; allowed: {allowed}")
    config = read_acting(run_dir, device)
    found, noise = load_checkpoint(run_dir, checkpoint), noise or config.runtime.eval_noise
    policy, origin = load_policy(config, found), identity(found.path)
    return Entrant(name, config, policy, make_spec(config), noise, origin, config.max_delay)


def _read_planned(
    name: str, noise: EvalNoise | None, device: str, base: RunConfig | None, mapping: str | None, opened: ExitStack
) -> Entrant:
    """Load a bundle, or connect to a server: one of this project, or with ``mapping`` anybody's."""
    planner: Planner
    simulation = {}
    if (path := Path(name)).is_dir():
        planner = open_runner(path, "cuda" if device.startswith("cuda") else "cpu")
        simulation = read_simulation(path)
    else:
        if mapping is not None:
            if base is None:
                raise UserError(f"policies: {name} does not know its task: give task=, or a run as the first policy")
            content = read_server_mapping(Path(mapping))
            spec = make_spec(base, content.cameras)
            connection = opened.enter_context(PolicyConnection(name, read_api_key(None), TIMEOUT_S))
            return Entrant(name, base, ServerPolicy(connection, content, spec), spec, "zero", {})
        planner = opened.enter_context(RemotePlanner(name, read_api_key(None), TIMEOUT_S))
    bundle = planner.bundle
    task = {} if simulation else {"task": bundle.origin.task}
    config = resolve(to_mapping(compose_run({"device": device, **task})) | simulation)
    policy, origin = PlannedPolicy(planner), {"checkpoint": bundle.origin.checkpoint, "policy_sha256": bundle.digest}
    return Entrant(name, config, policy, bundle.env_spec, noise or bundle.noise, origin, bundle.max_delay)


def check_alike(entrants: Sequence[Entrant], config: RunConfig, where: str) -> None:
    """Raise UserError, which says what differs, unless all policies fit the environments that they will enter.

    With cameras a task observes another state than without. where: whose environments they are.
    """
    for entrant in entrants:
        base, theirs = make_spec(config, entrant.spec.cameras), entrant.spec
        if not base.has_success:
            raise UserError(f"policies: task {base.task} reports no success, so there is nothing to compare")
        if theirs.task != base.task:
            raise UserError(f"policies: {where} is of task {base.task}, {entrant.name} of {theirs.task}")
        for part in ("state", "action", "instructions", "control_dt_s"):
            ours, other = (getattr(spec, part) for spec in (base, theirs))
            if ours != other:
                pairs = zip(_parts(ours), _parts(other), strict=False)
                a, b = next((pair for pair in pairs if pair[0] != pair[1]), (ours, other))
                differ = f"{where} has {one_line(a)[:200]}, {entrant.name} {one_line(b)[:200]}"
                raise UserError(f"policies: they differ in {part}: {differ}")


def _parts(value: object) -> Sequence[object]:
    """Return the terms or instructions of a part of a spec."""
    return getattr(value, "terms", value if isinstance(value, tuple) else (value,))
