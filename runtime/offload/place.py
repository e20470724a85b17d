"""Where do weights lie that a device does not hold, and how do they get from there into its buffers?"""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields, replace
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from membound.kernels.base import PackedWeight
from membound.roofline.errors import MemboundError
from membound.roofline.home import home_folder


class Place(Protocol):
    """Holds packed weights, each under a number."""

    def keep(self, weight: PackedWeight) -> int:
        """Puts a weight there and returns its number."""

    def read(self, number: int, into: PackedWeight) -> None:
        """Fills the buffers `into`, which were made for a weight of the same shape; returns when they are filled."""


def tensors_of(weight: PackedWeight) -> dict[str, Tensor]:
    """The tensors of a packed weight by the names of their fields."""
    found = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def buffers_like(weight: PackedWeight, device: torch.device) -> PackedWeight:
    """A weight of the same layout on `device` whose numbers are yet to come."""
    tensors = tensors_of(weight).items()
    empty: dict[str, Any] = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors}
    return replace(weight, **empty)


class HostPlace:
    """The host's memory, pinned where a GPU reads it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kept: list[dict[str, Tensor]] = []

    def keep(self, weight: PackedWeight) -> int:
        tensors = {name: tensor.cpu() for name, tensor in tensors_of(weight).items()}
        if self.stream is not None:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        self._kept.append(tensors)
        return len(self._kept) - 1

    def read(self, number: int, into: PackedWeight) -> None:
        buffers = tensors_of(into)
        if self.stream is None:
            for name, tensor in self._kept[number].items():
                buffers[name].copy_(tensor)
            return
        with torch.cuda.stream(self.stream):
            for name, tensor in self._kept[number].items():
                buffers[name].copy_(tensor, non_blocking=True)
        self.stream.synchronize()


class DiskPlace:
    """A file beside membound's own, which has no name and is gone with this process; the system caches nothing of it.

    What is read comes from the disk each time, as it would from a file that is larger than the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._written = True
        self._kept: list[tuple[int, dict[str, Tensor]]] = []  # where it begins, and tensors of its shapes without data
        folder = home_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, prefix="membound-experts-")  # noqa: SIM115
        except OSError as error:
            raise _not_kept(error) from None

    def keep(self, weight: PackedWeight) -> int:
        tensors = tensors_of(weight)
        begin = self._file.seek(0, os.SEEK_END)
        try:
            for tensor in tensors.values():
                self._file.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            raise _not_kept(error) from None
        self._written = False
        self._kept.append((begin, {name: tensor.to("meta") for name, tensor in tensors.items()}))
        return len(self._kept) - 1

    def read(self, number: int, into: PackedWeight) -> None:
        if not self._written:
            self._write_out()
        begin, shapes = self._kept[number]
        buffers, file, at = tensors_of(into), self._file.fileno(), begin
        for name, shape in shapes.items():
            bytes_ = torch.empty(shape.nbytes, dtype=torch.uint8)
            whole = bytes_.numpy().data
            while whole:
                read = os.preadv(file, [whole], at)
                if not read:
                    raise MemboundError(f"experts on the disk end after {at} bytes; is {home_folder()} damaged?")
                whole, at = whole[read:], at + read
            buffers[name].copy_(bytes_.view(shape.dtype).view(shape.shape))
        os.posix_fadvise(file, begin, at - begin, os.POSIX_FADV_DONTNEED)

    def _write_out(self) -> None:
        """Only what is on the disk can be dropped from the system's cache."""
        try:
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise _not_kept(error) from None
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._written = True


def _not_kept(error: OSError) -> MemboundError:
    return MemboundError(
        f"the experts cannot be kept on the disk of {home_folder()}: {error.strerror}; free some space there, set "
        "MEMBOUND_HOME to another folder, or give expert_offload place 'host'"
    )
