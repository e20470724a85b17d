"""How do the processes of a model exchange tensors?

Gloo between CPU processes and for what the host says to the others, NCCL between GPUs. A group is an object and no
process-wide state, so that one process may lead several models one after the other.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from membound.roofline.errors import MemboundError

TIMEOUT_S = 600.0  # a follower waits so long for the next step before it gives up
MEETING_S = 60.0  # a leader waits so long for followers that were about to join


def ready_file(meeting: Path, rank: int) -> Path:
    """What process `rank` leaves beside the meeting when it is about to join: whoever waits there cannot look up."""
    return meeting.with_name(f"ready-{rank}")


class GroupError(MemboundError):
    """Another process of the model is gone, or does not answer."""


class Group:
    """The processes of one model: `rank` of `size`, who meet at a file."""

    def __init__(self, meeting: Path, rank: int, size: int, device: str, meeting_s: float = TIMEOUT_S) -> None:
        self.rank = rank
        self.size = size
        store = dist.FileStore(str(meeting), size)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=meeting_s)
        # Both lie on one machine, so that the loopback is the link of the control messages.
        self._host: Any = self._reached(
            lambda: dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, options)
        )
        self._host._set_default_timeout(timedelta(seconds=TIMEOUT_S))
        self._device: Any = self._host
        if device.startswith("cuda"):
            torch.cuda.set_device(rank)
            nccl, met = dist.ProcessGroupNCCL, dist.PrefixStore("device", store)
            self._device = self._reached(lambda: nccl(met, rank, size, nccl.Options()))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over all processes, in place."""
        self._reached(lambda: self._device.allreduce([x]).wait())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x [rows, n] of every process side by side: [rows, size * n]."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._reached(lambda: self._device.allgather([parts], [x]).wait())
        return torch.cat(parts, dim=-1)

    def votes(self, vote: bool) -> int:
        """In how many processes `vote` is true; asked on the host, for which no device need be in order."""
        votes = torch.tensor([int(vote)])
        self._reached(lambda: self._host.allreduce([votes]).wait())
        return int(votes)

    def broadcast(self, x: Tensor) -> Tensor:
        """Fills x on every process with the leader's, rank 0; x lies on the host."""
        self._reached(lambda: self._host.broadcast(x, 0).wait())
        return x

    def _reached(self, call: Any) -> Any:
        try:
            return call()
        except RuntimeError as error:
            # Gloo begins with the place in its source and ends with advice.
            first = str(error).strip().splitlines()[0]
            reason = re.sub(r"^\[[^]]*\] ", "", first).partition(". ")[0]
            raise GroupError(f"a process of this model is gone or does not answer: {reason}") from None
