"""State updates of recurrent layers and copies of cache blocks: the fp32 recurrence, in place, in the right slots."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.triton.block_copy import BlockPools, block_copy_reference  # noqa: E402
from membound.kernels.triton.mamba2_update import (  # noqa: E402
    mamba2_update,
    mamba2_update_bytes,
    mamba2_update_reference,
)
from membound.kernels.triton.rwkv_update import (  # noqa: E402
    rwkv6_update,
    rwkv6_update_reference,
    rwkv7_update,
    rwkv7_update_reference,
    rwkv_update_bytes,
)

# Of the largest value; Triton's interpreter cuts bf16 off where a GPU rounds it.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
HALVES = st.sampled_from([torch.bfloat16, torch.float16])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(y, reference):
    scale = max(float(reference.abs().max()), 1.0) if reference.numel() else 1.0
    return torch.allclose(y.float(), reference, rtol=0, atol=TOLERANCE[y.dtype] * scale)


def slots_of(sequences, device):
    """Scattered, and every third sequence has none."""
    slots = (torch.arange(sequences, device=device) * 3 + 1) % 7
    slots[2::3] = -1
    return slots


@settings(deadline=None, max_examples=25)
@given(
    sequences=st.integers(0, 4),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    head_dim=st.sampled_from([1, 5, 64]),
    size=st.sampled_from([3, 16, 128]),
    dtype=HALVES,
    state_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gated=st.booleans(),
)
def test_mamba2_is_the_fp32_recurrence_and_touches_only_its_slots(
    device, sequences, heads, head_dim, size, dtype, state_dtype, gated
):
    count, groups = heads
    state = random(8, count, head_dim, size).to(device, state_dtype)
    before = state.clone()
    x, z = (random(sequences, count, head_dim, seed=seed).to(device, dtype) for seed in (1, 2))
    dt = 4 * random(sequences, count, seed=3).to(device, dtype)
    b, c = (random(sequences, groups, size, seed=seed).to(device, dtype) for seed in (4, 5))
    dt_bias, d = random(count, seed=6).to(device), random(count, seed=7).to(device)
    a = -random(count, seed=8).abs().to(device)
    slots = slots_of(sequences, device)
    vectors = (dt_bias, a, b, c, d, z if gated else None)
    y = mamba2_update(state, slots, x, dt, *vectors)
    expected, new = mamba2_update_reference(before[slots.clamp(min=0)], x, dt, *vectors)
    has_slot = slots >= 0
    assert close(y[has_slot], expected[has_slot])
    assert (y[~has_slot] == 0).all()
    before[slots[has_slot]] = new[has_slot].to(state_dtype)
    assert close(state, before.float())


@settings(deadline=None, max_examples=25)
@given(
    sequences=st.integers(0, 4),
    heads=st.integers(1, 3),
    size=st.sampled_from([1, 5, 64]),
    dtype=HALVES,
    state_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    delta=st.booleans(),
)
def test_rwkv_is_the_fp32_recurrence_and_touches_only_its_slots(
    device, sequences, heads, size, dtype, state_dtype, delta
):
    state = random(8, heads, size, size).to(device, state_dtype)
    before = state.clone()
    r, k, v, a = (random(sequences, heads, size, seed=seed).to(device, dtype) for seed in (1, 2, 3, 4))
    w, b = (torch.sigmoid(random(sequences, heads, size, seed=seed)).to(device, dtype) for seed in (5, 6))
    a = torch.nn.functional.normalize(a.float(), dim=-1).to(dtype)
    slots = slots_of(sequences, device)
    last = (a, b) if delta else (random(heads, size, seed=7).to(device),)
    update, reference = (rwkv7_update, rwkv7_update_reference) if delta else (rwkv6_update, rwkv6_update_reference)
    y = update(state, slots, r, w, k, v, *last)
    expected, new = reference(before[slots.clamp(min=0)], r, w, k, v, *last)
    has_slot = slots >= 0
    assert close(y[has_slot], expected[has_slot])
    assert (y[~has_slot] == 0).all()
    before[slots[has_slot]] = new[has_slot].to(state_dtype)
    assert close(state, before.float())


def test_states_count_twice_and_vectors_once():
    state, x = torch.zeros(9, 4, 8, 16), torch.zeros(2, 4, 8, dtype=torch.bfloat16)
    b = torch.zeros(2, 1, 16, dtype=torch.bfloat16)
    vectors = 3 * 2 * 4 * 8 * 2 + 2 * 4 * 2 + 2 * 2 * 16 * 2 + 3 * 4 * 4
    assert mamba2_update_bytes(state, x, b, gated=True) == 2 * 2 * 4 * 8 * 16 * 4 + vectors
    square, r = torch.zeros(9, 4, 8, 8), x
    assert rwkv_update_bytes(square, r, delta=True) == 2 * 2 * 4 * 8 * 8 * 4 + 7 * 2 * 4 * 8 * 2
    assert rwkv_update_bytes(square, r, delta=False) == 2 * 2 * 4 * 8 * 8 * 4 + 5 * 2 * 4 * 8 * 2 + 4 * 8 * 4


@settings(deadline=None, max_examples=20)
@given(
    pairs=st.lists(st.integers(0, 3), max_size=4),
    shape=st.sampled_from([(1, 8), (5, 2, 8), (16, 8, 64)]),
    pools=st.integers(1, 3),
)
def test_blocks_are_copied_bit_by_bit_in_every_pool(device, pairs, shape, pools):
    """From blocks 0 to 3 to blocks 4, 5, ...: one source may have several targets."""
    tensors = [random(8, *shape, seed=seed).bfloat16().to(device) for seed in range(pools)]
    expected = [tensor.clone() for tensor in tensors]
    table = torch.tensor([(source, 4 + i) for i, source in enumerate(pairs)], dtype=torch.int64, device=device)
    table = table.view(-1, 2)
    together = BlockPools(tensors)
    together.copy(table)
    block_copy_reference(expected, table)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, expected, strict=True))
    assert together.copy_bytes(len(pairs)) == 2 * len(pairs) * pools * tensors[0][0].nbytes


@settings(deadline=None, max_examples=15)
@given(pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=5, unique_by=lambda pair: pair[1]))
def test_blocks_of_tensors_of_any_shape_are_all_read_before_any_is_written(device, pairs):
    """K and V, scales of 12 bytes a block, and every second block of a tensor."""
    shapes = [((8, 4, 2, 8), torch.bfloat16)] * 2 + [((8, 3), torch.int32), ((8, 16), torch.uint8)]
    pools = [(50 * random(*shape, seed=i)).to(device, dtype) for i, (shape, dtype) in enumerate(shapes)]
    pools.append((50 * random(16, 16, seed=9)).to(device, torch.uint8)[::2])
    expected = [pool.clone() for pool in pools]
    for before, after in zip([pool.clone() for pool in pools], expected, strict=True):
        for source, target in pairs:
            after[target] = before[source]
    TritonKernels(device.type).block_copier(pools)(pairs)
    assert all(torch.equal(pool, wanted) for pool, wanted in zip(pools, expected, strict=True))


def test_bad_arguments_are_named(device):
    pool = torch.zeros(4, 3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^pools: a block is 12 bytes, should be a multiple of 16"):
        BlockPools([pool])
    with pytest.raises(ValueError, match=r"^pools: is empty"):
        BlockPools([])
    pool = torch.zeros(4, 8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^pairs: shape"):
        BlockPools([pool]).copy(torch.zeros(2, 3, dtype=torch.int64, device=device))
    r = torch.zeros(2, 1, 4, dtype=torch.bfloat16, device=device)
    state, slots = torch.zeros(3, 1, 4, 4, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"^u: dtype"):
        rwkv6_update(state, slots, r, r, r, r, r[0])
    with pytest.raises(ValueError, match=r"^state: shape"):
        rwkv7_update(state[..., :3], slots, r, r, r, r, r, r)
    one = torch.zeros(1, device=device)
    with pytest.raises(ValueError, match=r"^slots: dtype"):
        mamba2_update(state, slots.int(), r, r[..., 0].contiguous(), one, one, r, r, one)
