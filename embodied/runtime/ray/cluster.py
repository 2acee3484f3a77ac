"""The Ray cluster of a run: an existing one, or one of its own on this machine.

A cluster of our own listens on the loopback interface alone and asks for a random token. Ray otherwise replaces
127.0.0.1 by the machine's address, unless ``LOOPBACK_ONLY`` is in the environment when it is imported.
"""

import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from embodied.core.errors import UserError, one_line
from embodied.runtime import threads

LOOPBACK = "127.0.0.1"
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
REACH_S = 8.0
"""Seconds in which an address must be reached; the cluster there must answer in twice as many."""
LOOK_S = 25.0
"""Seconds in which every node must run a first task."""
PACKAGES = ("embodied",)
"""What this project installs; all nodes must have the same files of it."""
LABEL_OPERATORS = ("!", "in(", "!in(")  # of Ray's label selectors; Ray checks those itself


def prepare_environment() -> None:
    """Set variables that Ray reads at its import. UserError after that: it would listen on all interfaces."""
    if "ray" in sys.modules and LOOPBACK_ONLY.items() - os.environ.items() and not sys.modules["ray"].is_initialized():
        why = "Ray was imported before the runtime was built, so its own cluster would listen on all interfaces"
        raise UserError(f"{why}: build the runtime first, or connect with ray.init() yourself")
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", **LOOPBACK_ONLY})
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


class Cluster:
    """Connection to a cluster. ``close`` ends it, and the cluster if it is our own.

    address: see ``RayConfig.address``. A connection that this process already has is used and stays. UserError if there
    is no such cluster.
    """

    def __init__(self, address: str | None) -> None:
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # the reference of a fragment that failed is dropped unread
        if address is None:
            prepare_environment()
        if importlib.util.find_spec("ray") is None:
            raise UserError("runtime=ray needs Ray: pip install -c constraints.txt -e '.[ray]'")
        import ray

        self.ray, self._opened = ray, ExitStack()
        if not ray.is_initialized():
            with ExitStack() as opened:
                if address is None:
                    self._start(opened)
                else:
                    self._connect(address)
                opened.callback(ray.shutdown)
                self._opened = opened.pop_all()

    def check(self, demands: Sequence[tuple[str, Mapping[str, float], Mapping[str, str]]]) -> None:
        """Raise UserError if a part cannot be placed. demands: name, resources and labels of each part."""
        nodes = self._nodes()
        available = self.ray.available_resources()
        free = dict(available)
        for part, resources, labels in demands:
            for name, amount in resources.items():
                most = max(node["Resources"].get(name, 0.0) for node in nodes)
                free[name] = free.get(name, 0.0) - amount
                if most < amount:
                    has = f"no node of the Ray cluster has more than {most:g}"
                    raise UserError(f"{part} needs {name}: {amount:g} on one node, but {has}")
                if free[name] < 0:
                    has = ", ".join(f"{key}: {available[key]:g}" for key in sorted(available) if "node:" not in key)
                    first = f"{part} is the first that finds none. Free are {has}"
                    raise UserError(f"the Ray cluster has too little {name} for all parts: {first}")
            for key, value in labels.items():
                values = sorted({node["Labels"][key] for node in nodes if key in node["Labels"]})
                if not value.startswith(LABEL_OPERATORS) and value not in values:
                    raise UserError(f"{part} needs a node with the label {key}={value}; values there: {values}")

    def check_room(self, num_bytes: int) -> None:
        """Raise UserError if weights of that size are larger than the object store of a node."""
        stores = {_address(node): node["Resources"].get("object_store_memory", 0.0) for node in self._nodes()}
        address, least = min(stores.items(), key=lambda item: item[1])
        if num_bytes > least:
            store = f"the object store of the node {address} has only {least / 1e6:,.0f} MB"
            cure = "Start that node with ray start --object-store-memory=<bytes>"
            raise UserError(f"the policy has {num_bytes / 1e6:,.0f} MB of weights, but {store}. {cure}")

    def check_code(self) -> None:
        """Raise UserError if another node lacks this project or has other files of it than this process."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        look, here = _sources(PACKAGES), self.ray.get_runtime_context().get_node_id()
        answers = {}
        for node in self._nodes():
            if node["NodeID"] != here:
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = self.ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
                answers[task.remote()] = _address(node)
        if answers:
            self.ray.wait(list(answers), num_returns=len(answers), timeout=LOOK_S)
        for answer, address in answers.items():
            try:
                found = self.ray.get(answer, timeout=0)
            except self.ray.exceptions.RayError as error:
                raise UserError(f"the node {address} of the Ray cluster runs no task: {one_line(error)}") from None
            if found != look():
                has = "lacks this project" if found is None else "has another version of this project than this one"
                raise UserError(f"the node {address} of the Ray cluster {has}: install the same on all nodes")

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def close(self) -> None:
        """Disconnect, and end a cluster of our own with all its processes."""
        self._opened.close()

    def _start(self, opened: ExitStack) -> None:
        """Start a cluster of our own. opened: removes its folder."""
        base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        try:
            folder = tempfile.mkdtemp(prefix="ray-", dir=base)
            opened.callback(shutil.rmtree, folder, ignore_errors=True)  # its last process may still write a log
            own = {"include_dashboard": False, "_node_ip_address": LOOPBACK, "_temp_dir": folder}
            # without an address RAY_ADDRESS would decide
            self._init(address="local", num_cpus=threads.available_cores(), **own)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            cure = "set RAY_TMPDIR to another folder, with a short path for its sockets, such as /tmp"
            raise UserError(f"Ray cannot start in {base} ({one_line(error)}): {cure}") from error
        if any(node["NodeManagerAddress"] != LOOPBACK for node in self.ray.nodes()):
            self.ray.shutdown()
            raise RuntimeError("Ray listens on other interfaces than the loopback")

    def _connect(self, address: str) -> None:
        where = f"runtime.address={address}"
        if address == "auto" and os.environ.get("RAY_ADDRESS"):
            address = os.environ["RAY_ADDRESS"]
            where += f" is RAY_ADDRESS={address}"
        start = "Start one with `ray start --head`, or leave the address out to use this machine alone"
        if address != "auto":
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise UserError(f"{where}: allowed are host:port of a cluster's head, as in 10.0.0.1:6379, and auto")
            try:
                socket.create_connection((host, int(port)), REACH_S).close()
            except (OSError, OverflowError) as error:
                raise UserError(f"{where}: no Ray cluster answers there ({one_line(error)}). {start}") from None
            check = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
            try:  # in a process of its own, which can be given up on
                subprocess.run(check, check=True, capture_output=True, timeout=2 * REACH_S)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                raise UserError(f"{where}: what listens there does not answer as a Ray cluster") from None
        try:
            self._init(address=address)
        except (ConnectionError, RuntimeError, self.ray.exceptions.RayError) as error:
            raise UserError(f"{where}: cannot join the Ray cluster: {one_line(error)}. {start}") from None

    def _init(self, **options: Any) -> None:
        """Call ``ray.init`` and keep this process's handler of SIGTERM. Ray's processes ignore a closed terminal."""
        if threading.current_thread() is not threading.main_thread():
            self.ray.init(logging_level=logging.WARNING, **options)
            return
        term, hangup = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            self.ray.init(logging_level=logging.WARNING, **options)
        finally:
            signal.signal(signal.SIGTERM, term)
            signal.signal(signal.SIGHUP, hangup)


def _address(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"


def _sources(packages: Sequence[str]) -> Callable[[], str | None]:
    """Return a function that digests the source files of packages, None if one is missing.

    Ray sends an inner function by value, so it also runs where this project is missing.
    """

    def digest() -> str | None:
        import glob
        import hashlib
        import importlib.util
        from pathlib import Path

        found = hashlib.blake2b()
        for name in packages:
            spec = importlib.util.find_spec(name)
            if spec is None or not spec.submodule_search_locations:
                return None
            folder = Path(next(iter(spec.submodule_search_locations)))
            for path in sorted(glob.glob("**/*.py", root_dir=folder, recursive=True)):  # follows links, unlike rglob
                found.update(path.encode() + (folder / path).read_bytes())
        return found.hexdigest()

    return digest
