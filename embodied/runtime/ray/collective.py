"""Sums over learner processes by torch.distributed: gloo between CPUs, NCCL between GPUs.

    process 0: open_store(address) ──► Rendezvous ──► every process: Collective(rendezvous, rank, …).sum(tensor)

The store and gloo listen on the given addresses alone. What they exchange is numbers, never pickled objects.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # the stubs of torch 2.13 lack options of its groups


class PeerLost(Exception):
    """Another learner process died, or took no part in a sum for too long."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the processes of a group find each other."""

    address: str
    """Address of the node of process 0."""
    port: int
    """Port of its store."""


def open_store(address: str, timeout_s: float) -> tuple[Any, Rendezvous]:
    """Open the store of a group on a free port of ``address``, in its process 0, which must keep it."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen()
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, Rendezvous(address, port)


class Collective:
    """The processes of a group, as ``embodied.core.algorithm.ProcessGroup``.

    address: of this process's node. device: of the policy; CUDA sums by NCCL. PeerLost if a process does not join
    within ``timeout_s``, and from ``sum`` if one is gone or does not take part for so long.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, size: int, *, address: str, device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        limit = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=limit)
            if device.type == "cuda":
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = limit
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
            else:
                gloo = dist.ProcessGroupGloo._Options()
                gloo._timeout = limit
                gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
                self._group = dist.ProcessGroupGloo(store, rank, size, gloo)
        except RuntimeError as error:  # of any kind: torch.distributed has no narrower class for a silent peer
            raise PeerLost(f"learner process {rank} of {size} cannot join the others: {error}") from error

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes; see ``ProcessGroup.sum``."""
        values = tensor.detach().to(self.device, copy=True).contiguous()
        if values.numel():
            try:
                self._group.allreduce([values]).wait()
            except RuntimeError as error:
                raise PeerLost(f"learner process {self.rank} of {self.size} misses another one: {error}") from error
        return values.to(tensor.device)
