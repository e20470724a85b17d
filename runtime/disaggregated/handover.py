"""How does the KV cache of a prompt get from the process that computed it to the one that goes on?

Through memory that both see: a file in the shared-memory file system (else in the temporary folder) with what each
layer keeps of each block, and a line of JSON that tells of it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from membound.roofline.errors import MemboundError

SHARED_MEMORY = Path("/dev/shm")
ENGINES = 2  # on one device: who computes prompts, and who writes outputs


@dataclass(frozen=True)
class Handover:
    """A prompt that was computed, with its first token: when things happened, and where its blocks lie.

    Layer i has `layer_bytes[i]` bytes of each of `blocks` blocks, one layer behind the other in `file`.
    """

    request: int
    first_token: int
    admitted_s: float
    first_token_s: float
    preemptions: int
    cached_tokens: int | None
    blocks: int
    layer_bytes: tuple[int, ...]
    file: str

    def to_line(self) -> str:
        return json.dumps({"handover": asdict(self)})

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Handover:
        return cls(**fields | {"layer_bytes": tuple(fields["layer_bytes"])})

    @property
    def nbytes(self) -> int:
        return self.blocks * sum(self.layer_bytes)


@dataclass(frozen=True)
class Rejection:
    """A prompt that was turned away, and why."""

    request: int
    reason: str

    def to_line(self) -> str:
        return json.dumps({"rejection": asdict(self)})


def handover_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for files that are handed over, in memory where the system has such a place."""
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="membound-handover-", dir=place)


def put(path: Path, layers: Sequence[Tensor]) -> None:
    """Writes what `KvStore.read_blocks` returned for each layer, [blocks, bytes_per_block] each."""
    total = sum(layer.numel() for layer in layers)
    _make_room(path, total)
    memory = torch.from_file(str(path), shared=True, size=total, dtype=torch.uint8)
    start = 0
    for layer in layers:
        memory[start : start + layer.numel()].copy_(layer.flatten())
        start += layer.numel()


def _make_room(path: Path, total: int) -> None:
    """A file of that size whose memory is there: writing to a mapping that has none left ends the process."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, total)
    except OSError as error:
        raise MemboundError(
            f"K and V of a prompt, {total / 1e6:.1f} MB, cannot be handed over in {path.parent}: {error.strerror}; "
            "free some space there, or send fewer requests at once"
        ) from None


def take(handover: Handover) -> list[list[Tensor]]:
    """The bytes of every layer for each block, copied out of the file, which is removed."""
    path = Path(handover.file)
    whole = torch.from_file(str(path), shared=False, size=handover.nbytes, dtype=torch.uint8).clone()
    path.unlink()
    parts = whole.split([handover.blocks * size for size in handover.layer_bytes])
    layers = [part.view(handover.blocks, -1) for part in parts]
    return [[layer[block] for layer in layers] for block in range(handover.blocks)]


def say(stream: IO[str], line: str) -> None:
    """One line, at once."""
    stream.write(line + "\n")
    stream.flush()
