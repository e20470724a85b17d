"""How do blocks of K and V move between each other and the host, as the scheduler's tables ask?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from membound.kernels.base import Kernels
from membound.runtime.decoder import KvCache
from membound.runtime.kv.store import KvStore
from membound.simulator.scheduling.blocks import BlockTables, Fill, HostName, Movements


class BlockMover:
    """Keeps on the host what leaves the device: of each block the bytes of every layer that stores K and V.

    All is read before anything is written. Blocks that others are filled with are copied on the device; what leaves a
    GPU does so behind the computation.
    """

    def __init__(self, kv: KvCache, tables: BlockTables, kernels: Kernels) -> None:
        self.stores: list[KvStore] = [layer for layer in kv if hasattr(layer, "read_blocks")]  # type: ignore[misc]
        self.tables = tables
        self.host: dict[HostName, list[Tensor]] = {}
        parts = [part for store in self.stores for part in store.parts]
        self._copy = kernels.block_copier(parts)
        self._shuttle = Shuttle(parts[0].device if parts else torch.device("cpu"))

    def __call__(self) -> None:
        """Moves what the tables ask for since the last step."""
        movements = self.tables.movements()
        self._save(movements)
        copied = [(fill.source, fill.target) for fill in movements.filled if isinstance(fill.source, int)]
        if copied:
            self._copy(copied)
        self._fill([fill for fill in movements.filled if not isinstance(fill.source, int)])
        for name in movements.dropped:
            self.host.pop(name, None)

    def _save(self, movements: Movements) -> None:
        if not movements.saved:
            return
        blocks = [block for block, _ in movements.saved]
        layers = [self._shuttle.to_host(store.read_blocks(blocks)) for store in self.stores]
        for i, (_, name) in enumerate(movements.saved):
            self.host[name] = [layer[i] for layer in layers]

    def _fill(self, fills: Sequence[Fill]) -> None:
        if not fills:
            return
        self._shuttle.wait()
        contents = [self.host[fill.source] for fill in fills]  # type: ignore[index]
        targets = [fill.target for fill in fills]
        for number, store in enumerate(self.stores):
            content = torch.stack([content[number] for content in contents])
            store.write_blocks(targets, self._shuttle.to_device(content))


class Shuttle:
    """Brings bytes to the host and back: on a GPU by a stream of its own, through memory that is pinned."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, content: Tensor) -> Tensor:
        """The same on the host, to be read after `wait`; `content` belongs to nobody else."""
        if self._stream is None:
            return content.cpu()
        host = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(content, non_blocking=True)
        content.record_stream(self._stream)
        return host

    def wait(self) -> None:
        """Until all that was sent to the host has arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def to_device(self, content: Tensor) -> Tensor:
        """The same on the device, for what is computed from here on."""
        if self._stream is None:
            return content
        return content.pin_memory().to(self.device, non_blocking=True)
