"""How are the blocks of a GGUF multiplied as they are found, without rounding a second time?

A matrix of ours may be several tensors of the file, and its rows may be in another order: blocks run along a row, so
that rows of bytes are put together and reordered like rows of numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from membound.kernels.base import Kernels
from membound.kernels.quantize import GGUF_TYPES
from membound.roofline.models import ModelSpec
from membound.roofline.precision import Precision
from membound.roofline.reading.gguf_file import GgufFile
from membound.runtime.linear import KernelLinear, Linear
from membound.runtime.loading.assemble import gguf_changes
from membound.runtime.loading.layouts import GGUF
from membound.runtime.quantization.quantized import QuantizationError


class StackedLinear:
    """Linears of the same inputs, whose outputs stand side by side: rows in several formats."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def emulated(self) -> bool:
        return any(part.emulated for part in self.parts)

    @property
    def whole_step(self) -> bool:
        return any(part.whole_step for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class FoundBlocks:
    """The matrices of a GGUF in the blocks that the kernels read."""

    def __init__(self, kernels: Kernels, path: Path, spec: ModelSpec) -> None:
        self.kernels = kernels
        self.file = GgufFile(path)
        self.spec = spec
        self.layout = GGUF[str(self.file.metadata["general.architecture"])]

    def check(self, format: Precision) -> None:
        """Raises QuantizationError where most matrices of the file are in another format."""
        types = Counter(info.quantization.name for info in self.file.tensors.values() if len(info.shape) > 1)
        most = types.most_common(1)[0][0]
        if not format.name.startswith(most.lower()):
            raise QuantizationError(
                f"field 'format' is {format.name}, but {self.file.path.name} keeps most matrices in {most}; "
                f"give format '{most.lower()}', or another method than 'found'"
            )

    def linear(self, name: str, weight: Tensor) -> Linear | None:
        """The linear of a matrix [n, k] by its name; None where its tensors are not in blocks that the kernels read."""
        found = list(self._pieces(name, weight.shape[0]))
        if not found or any(kind not in GGUF_TYPES for _, kind in found):
            return None
        joined: list[tuple[list[Tensor], str]] = []  # neighbours of one format are one matrix
        for rows, kind in found:
            if joined and joined[-1][1] == kind:
                joined[-1][0].append(rows)
            else:
                joined.append(([rows], kind))
        parts = [self._packed(torch.cat(rows), kind, weight.shape[1], weight.device) for rows, kind in joined]
        return parts[0] if len(parts) == 1 else StackedLinear(parts)

    def _packed(self, rows: Tensor, kind: str, k: int, device: torch.device) -> Linear:
        packed = self.kernels.pack_gguf(rows.to(device), kind, (len(rows), k))
        return KernelLinear(self.kernels, packed)

    def _pieces(self, name: str, n: int) -> Iterator[tuple[Tensor, str]]:
        """Rows of bytes [rows, bytes] in our order, and their format, of each tensor that makes a matrix of n rows."""
        sources, order = self._sources(name, n)
        first = 0
        for source in sources:
            if source not in self.file.tensors or len(self.file.tensors[source].shape) != 2:
                return
            rows = torch.from_numpy(np.array(self.file.blocks(source)))  # the file is mapped read-only
            own = order[first : first + len(rows)] - first
            if int(own.min()) < 0 or int(own.max()) >= len(rows):
                return  # rows of several tensors are mixed
            yield rows[own], self.file.tensors[source].quantization.name
            first += len(rows)

    def _sources(self, name: str, n: int) -> tuple[list[str], Tensor]:
        """The tensors that make a matrix of n rows, and for each of its rows the row of all of them together."""
        order = torch.arange(n)
        if not name.startswith("layers."):
            tied = name == "lm_head" and self.spec.tie_embeddings
            return list(self.layout.top_sources("embed" if tied else name)), order
        _, index, part = name.split(".", 2)
        layer = self.spec.stack[int(index)]
        change = gguf_changes(self.spec, self.layout, layer).get(part)
        prefix = self.layout.layer.format(int(index))
        sources = [prefix + source for source in self.layout.sources(part, layer.attention.kind)]
        return sources, order if change is None else change(order)
