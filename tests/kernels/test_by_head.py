"""KV heads that hold or read tokens of their own: the C++ kernels do what plain PyTorch does."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from membound.kernels.base import RaggedBatch  # noqa: E402
from membound.kernels.by_head import HeadBlocks, HeldTokens, PageBounds  # noqa: E402
from membound.kernels.kv_formats import QuantizedKv  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402

HEADS, GROUP, DIM, SIZE, PLACES, SEATS = 3, 2, 32, 8, 24, 5
WIDTH = HEADS * (GROUP + 2) * DIM
TORCH = TorchKernels()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head_blocks(format: str, blocks: int, each: int, apart: int) -> HeadBlocks:
    if format == "bf16":
        k, v = (torch.zeros(blocks, SIZE, 1, DIM, dtype=torch.bfloat16) for _ in range(2))
        return HeadBlocks(k, v, None, HEADS, each, apart)
    kv = QuantizedKv.zeros(format, blocks, SIZE, 1, DIM)
    return HeadBlocks(kv.k, kv.v, kv, HEADS, each, apart)


def parts(kv: HeadBlocks) -> list[torch.Tensor]:
    return [kv.k, kv.v] if kv.quantized is None else [kv.k, kv.v, kv.quantized.scales]


def decoding(positions: list[int], seats: list[int], slots: list[int], budget: int) -> RaggedBatch:
    """One token each of sequences at seats, whose places are PLACES in blocks of SIZE."""
    of_seat = HEADS * PLACES // SIZE
    return RaggedBatch(
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_start=torch.arange(len(seats) + 1, dtype=torch.int32),
        context_len=torch.tensor([min(position + 1, budget) for position in positions], dtype=torch.int32),
        block_table=(torch.tensor(seats)[:, None] * of_seat + torch.arange(PLACES // SIZE)).int(),
        most_queries=1,
        seats=torch.tensor(seats),
    )


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_places_are_chosen_and_remembered(cpp, scored: bool, seed: int):
    budget, chance = 20, torch.Generator().manual_seed(seed)
    held = HeldTokens(
        positions=torch.randint(0, 90, (SEATS, HEADS, PLACES), generator=chance, dtype=torch.int32),
        order=torch.rand(SEATS, HEADS, budget, generator=chance).argsort(dim=-1).int(),
        scores=torch.rand(SEATS, HEADS, PLACES, generator=chance) if scored else None,
        recent=10,
    )
    batch = decoding([90, 7, 95], [4, 0, 2], [3, 7, 19], budget)
    ours, theirs = (
        replace(held, positions=held.positions.clone(), scores=None if held.scores is None else held.scores.clone())
        for _ in range(2)
    )
    assert torch.equal(cpp.choose_places(batch, ours, SIZE), TORCH.choose_places(batch, theirs, SIZE))
    assert torch.equal(ours.positions, theirs.positions) and not torch.equal(ours.positions, held.positions)
    if scored:
        assert torch.equal(ours.scores, theirs.scores)
        stays = held.positions[4, :, :budget] > 80
        gone = ours.positions[4, :, :budget] != held.positions[4, :, :budget]
        assert not bool((gone & stays).any()), "the newest ten stay"


@pytest.mark.parametrize("format", ["bf16", "fp8", "int8", "int4"])
def test_tokens_at_places_of_their_own_are_written_read_and_scored_alike(cpp, format: str):
    budget, seats = 20, [3, 1]
    cos, sin = (random(100, DIM // 2, seed=seed) for seed in (1, 2))
    found = []
    for kernels in (cpp, TORCH):
        kv = head_blocks(format, SEATS * HEADS * PLACES // SIZE, 1, PLACES // SIZE)
        scores = torch.zeros(SEATS, HEADS, PLACES)
        for step in range(30):
            place = torch.tensor([[(step * (head + 1) + seat) % budget for head in range(HEADS)] for seat in seats])
            batch = decoding([step, step], seats, [0, 0], budget)
            slots = batch.block_table[:, :1].long() * SIZE + place
            qkv = random(2, WIDTH, seed=10 + step)
            q = kernels.rope_and_store_by_head(qkv, cos, sin, batch, kv, slots)
            seen = kernels.attention_by_head(q, kv, batch, 0.2)
            kernels.add_attention_received(q, kv, batch, 0.2, scores)
        found.append((q, seen, scores, *parts(kv)))
    for name, ours, theirs in zip(("q", "seen", "scores"), *found, strict=False):
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=2e-2, atol=2e-2, msg=lambda text, n=name: n + text
        )
    for ours, theirs in zip(found[0][3:], found[1][3:], strict=True):
        assert (ours.float() != theirs.float()).float().mean() < 0.01, "all but what rounds at the edge"
    received = found[0][2].sum(dim=-1)[torch.tensor(seats)]
    torch.testing.assert_close(received, torch.full_like(received, 30.0 * GROUP))


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("new", [1, 5])
def test_the_same_pages_are_chosen_for_each_head_and_attended_to(cpp, format: str, new: int):
    contexts, blocks = [120, 40, 12], 40
    first = [0, 16, 24]
    tables = torch.zeros(3, 15, dtype=torch.int32)
    for i, context in enumerate(contexts):
        used = -(-context // SIZE)
        tables[i, :used] = torch.arange(used) + first[i]
    cos, sin = torch.ones(128, DIM // 2), torch.zeros(128, DIM // 2)
    found = []
    for kernels in (cpp, TORCH):
        kv, bounds = head_blocks(format, blocks * HEADS, HEADS, 1), torch.zeros(blocks, HEADS, 2 * DIM).bfloat16()
        known = PageBounds(bounds, 4)
        for spans in ([(0, context - new) for context in contexts], [(context - new, context) for context in contexts]):
            positions = torch.cat([torch.arange(*span) for span in spans])
            rows = torch.cat([torch.full((end - start,), i) for i, (start, end) in enumerate(spans)])
            read = [
                end - (-(-end // SIZE) - known.kept(end - start, SIZE)) * SIZE
                if known.selects(end - start, end, SIZE)
                else end
                for start, end in spans
            ]
            batch = RaggedBatch(
                positions=positions,
                slots=tables[rows, positions // SIZE].long() * SIZE + positions % SIZE,
                query_start=torch.tensor([0, *(end - start for start, end in spans)]).cumsum(0).int(),
                context_len=torch.tensor(read, dtype=torch.int32),
                block_table=tables,
            )
            q = kernels.rope_and_store_by_head(random(len(positions), WIDTH), cos, sin, batch, kv)
            chosen = kernels.choose_pages(q, kv, known, batch, 15)
            seen = kernels.attention_by_head(q, kv, batch, 0.2, tables=chosen)
        found.append((chosen, bounds, seen))
    (ours, our_bounds, our_seen), (theirs, their_bounds, their_seen) = found
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(our_bounds.float(), their_bounds.float(), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(our_seen, their_seen, rtol=2e-2, atol=2e-2)
    assert bool((ours[0, :, 3] == 14).all()) and not bool(ours[0, :, 4:].any()), "four pages, the newest last"
    assert len({tuple(head) for head in ours[0].tolist()}) > 1, "heads choose for themselves"
    assert ours[2, :, :2].tolist() == [[24, 25]] * HEADS, "who has no more pages reads all"
