"""The kernels under test and ragged batches to run them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from membound.kernels.base import Kernels, RaggedBatch  # noqa: E402
from membound.kernels.cpu.build import KernelBuildError  # noqa: E402
from membound.kernels.cpu.kernels import CpuKernels  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402


@pytest.fixture(scope="session")
def cpp() -> CpuKernels:
    try:
        return CpuKernels(batch_invariant=True)
    except KernelBuildError as error:
        pytest.skip(f"no C++ kernels on this machine: {error}")


@pytest.fixture(scope="session", params=["cpp", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return request.getfixturevalue("cpp") if request.param == "cpp" else TorchKernels()


@dataclass
class Step:
    """Sequences of (new tokens, context), their shuffled blocks, and K and V in them; unused memory is NaN."""

    batch: RaggedBatch
    k_blocks: torch.Tensor
    v_blocks: torch.Tensor

    def rows(self, sequence: int) -> slice:
        first, last = self.batch.query_start[sequence : sequence + 2].tolist()
        return slice(first, last)

    def alone(self, sequence: int, token: int) -> RaggedBatch:
        """The decode step of one of the new tokens of a sequence, with nothing else in the batch."""
        rows = self.rows(sequence)
        row = slice(rows.start + token, rows.start + token + 1)
        context = int(self.batch.positions[row.start]) + 1
        return RaggedBatch(
            self.batch.positions[row],
            self.batch.slots[row],
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
            self.batch.block_table[sequence : sequence + 1],
        )


def _make_step(sequences: list[tuple[int, int]], kv_heads: int, head_dim: int, block_size: int, seed: int = 0) -> Step:
    random = torch.Generator().manual_seed(seed)
    blocks = [-(-context // block_size) for _, context in sequences]
    order = torch.randperm(sum(blocks) + 2, generator=random).int()
    table = torch.zeros(len(sequences), max(blocks) + 1, dtype=torch.int32)
    shape = (len(order), block_size, kv_heads, head_dim)
    k_blocks, v_blocks = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(2))
    positions, slots, starts = [], [], [0]
    for i, (new, context) in enumerate(sequences):
        table[i, : blocks[i]] = order[sum(blocks[:i]) : sum(blocks[: i + 1])]
        where = [int(table[i, t // block_size]) * block_size + t % block_size for t in range(context)]
        for stored in (k_blocks, v_blocks):
            values = torch.randn(context, kv_heads, head_dim, generator=random)
            stored.view(-1, kv_heads, head_dim)[where] = values.bfloat16()
        positions += range(context - new, context)
        slots += where[context - new :]
        starts.append(starts[-1] + new)
    batch = RaggedBatch(
        torch.tensor(positions),
        torch.tensor(slots),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([context for _, context in sequences], dtype=torch.int32),
        table,
    )
    return Step(batch, k_blocks, v_blocks)


@pytest.fixture(scope="session")
def make_step() -> Callable[..., Step]:
    return _make_step
