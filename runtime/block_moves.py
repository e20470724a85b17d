"""How do blocks of K and V move between each other and the host, as the scheduler's tables ask?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from membound.runtime.decoder import KvCache
from membound.runtime.kv_store import KvStore
from membound.simulator.scheduling.blocks import BlockTables, HostName, Movements


class BlockMover:
    """Keeps on the host what leaves the device: of each block the bytes of every layer that stores K and V."""

    def __init__(self, kv: KvCache, tables: BlockTables) -> None:
        self.stores: list[KvStore] = [layer for layer in kv if hasattr(layer, "read_blocks")]  # type: ignore[misc]
        self.tables = tables
        self.host: dict[HostName, list[Tensor]] = {}

    def __call__(self) -> None:
        """Moves what the tables ask for since the last step."""
        movements = self.tables.movements()
        for name, content in self._read(movements).items():
            self.host[name] = content
        self._fill(movements)
        for name in movements.dropped:
            self.host.pop(name, None)

    def _read(self, movements: Movements) -> dict[HostName, list[Tensor]]:
        """The content of saved blocks, and of blocks that others are filled with under the name `block N`."""
        copied = dict.fromkeys(fill.source for fill in movements.filled if isinstance(fill.source, int))
        blocks = [block for block, _ in movements.saved] + list(copied)
        names = [name for _, name in movements.saved] + [_temporary(block) for block in copied]
        if not blocks:
            return {}
        layers = [store.read_blocks(blocks).cpu() for store in self.stores]
        return {name: [layer[i] for layer in layers] for i, name in enumerate(names)}

    def _fill(self, movements: Movements) -> None:
        if not movements.filled:
            return
        names = [_temporary(fill.source) if isinstance(fill.source, int) else fill.source for fill in movements.filled]
        self._write([fill.target for fill in movements.filled], [self.host[name] for name in names])
        for fill in movements.filled:
            if isinstance(fill.source, int):
                self.host.pop(_temporary(fill.source), None)

    def _write(self, targets: Sequence[int], contents: Sequence[list[Tensor]]) -> None:
        for number, store in enumerate(self.stores):
            store.write_blocks(targets, torch.stack([content[number] for content in contents]))


def _temporary(block: int) -> HostName:
    return "block", block
