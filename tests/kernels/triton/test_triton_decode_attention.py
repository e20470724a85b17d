"""Split-KV decode attention over pages: the fp32 softmax, for every head grouping and every format of the cache."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.triton import decode_attention as decode  # noqa: E402
from membound.kernels.triton.decode_attention import (  # noqa: E402
    decode_attention,
    decode_attention_bytes,
    decode_attention_reference,
)
from membound.kernels.triton.last import counters_of  # noqa: E402
from membound.kernels.triton.launch import Config, recording  # noqa: E402
from membound.kernels.triton.machine import REFERENCE_MACHINES  # noqa: E402

FORMATS = st.sampled_from(["bf16", "fp16", "fp8", "int8", "int4"])
SMALL_TILES = Config({"BLOCK_R": 16, "BLOCK_T": 16})  # so that short contexts have several
# What rounding q, the probabilities and the result to 8 or 11 bits of mantissa may cost, in units of the largest value.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(y, reference):
    return (y.float() - reference).abs().max() <= TOLERANCE[y.dtype] * max(float(reference.abs().max()), 1.0)


def random_q(sequences, heads, head_dim, dtype, device):
    return torch.randn(sequences, heads, head_dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@settings(deadline=None, max_examples=25)
@given(
    format=FORMATS,
    contexts=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (9, 3), (20, 1)]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256, 6]),
    block_size=st.sampled_from([1, 5, 16, 32]),
    splits=st.sampled_from([1, 2, 9]),
    window=st.none() | st.integers(1, 80),
    softcap=st.sampled_from([None, None, 0.7]),
    sunk=st.booleans(),
)
def test_decode_attention_is_the_softmax_of_the_fp32_reference(
    make_cache, device, format, contexts, heads, head_dim, block_size, splits, window, softcap, sunk
):
    cache = make_cache(format, contexts, block_size, heads[1], head_dim)
    dtype = torch.float16 if format == "fp16" else torch.bfloat16
    q = random_q(len(contexts), heads[0], head_dim, dtype, device)
    arguments = (q, cache.kv, cache.block_table, cache.context_len, head_dim**-0.5)
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(3)).to(device) if sunk else None
    options = dict(window=window, softcap=softcap, sinks=sinks)
    y = decode_attention(*arguments, **options, splits=splits, config=SMALL_TILES)
    reference = decode_attention_reference(*arguments, **options)
    assert y.shape == q.shape
    assert close(y, reference)


@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_its_stored_configuration_and_its_own_choice_of_splits_give_the_same(make_cache, device, format):
    cache = make_cache(format, [300, 1, 0, 129], 16, 2, 64)
    q = random_q(4, 8, 64, torch.bfloat16, device)
    arguments = (q, cache.kv, cache.block_table, cache.context_len, 0.125)
    assert close(decode_attention(*arguments), decode_attention_reference(*arguments))


def test_parts_are_combined_alike_by_their_last_program_and_by_a_launch_of_its_own(make_cache, device, monkeypatch):
    """The counts that say who is last are zero again behind it, also for sequences without tokens."""
    cache = make_cache("bf16", [300, 1, 0, 129], 16, 2, 64)
    q = random_q(4, 8, 64, torch.bfloat16, device)
    arguments = (q, cache.kv, cache.block_table, cache.context_len, 0.125)
    found = []
    for most in (decode.MOST_ROWS_HERE, 0):
        monkeypatch.setattr(decode, "MOST_ROWS_HERE", most)
        found.append([decode_attention(*arguments, splits=5, config=SMALL_TILES) for _ in range(2)])
        with recording(REFERENCE_MACHINES["sm90"]) as record:
            decode_attention(*arguments, splits=5, config=SMALL_TILES)
        assert len(record.launches) == (1 if most else 2)
    (here, again), (apart, _) = found
    assert torch.equal(here, again) and close(here, apart.float())
    assert (counters_of(q) == 0).all()


def test_a_sequence_has_the_same_bits_wherever_it_stands_in_the_batch(make_cache, device):
    cache = make_cache("bf16", [40, 70, 3], 16, 2, 64)
    q = random_q(3, 4, 64, torch.bfloat16, device)
    order = torch.tensor([2, 0, 1], device=device)
    y = decode_attention(q, cache.kv, cache.block_table, cache.context_len, 0.1, splits=3)
    moved = decode_attention(q[order], cache.kv, cache.block_table[order], cache.context_len[order], 0.1, splits=3)
    assert torch.equal(y[order], moved)


@pytest.mark.parametrize(
    ("format", "bytes_per_element"), [("bf16", 2), ("fp8", 1), ("int8", 1 + 2 / 64), ("int4", 0.5 + 4 / 64)]
)
def test_the_declared_bytes_are_q_the_result_and_the_visible_cache_with_its_scales(
    make_cache, device, format, bytes_per_element
):
    cache = make_cache(format, [9, 30], 16, 2, 64)
    q = random_q(2, 4, 64, torch.bfloat16, device)
    kv_bytes = decode_attention_bytes(q, cache.kv, [9, 30]) - 2 * q.nbytes
    assert kv_bytes == (9 + 30) * 2 * 2 * 64 * bytes_per_element
    assert decode_attention_bytes(q, cache.kv, [9, 30], window=10) - 2 * q.nbytes == kv_bytes * 19 / 39


def test_bad_arguments_are_named(make_cache, device):
    cache = make_cache("bf16", [5, 6], 16, 2, 64)
    q = random_q(2, 4, 64, torch.bfloat16, device)
    good = dict(q=q, kv=cache.kv, block_table=cache.block_table, context_len=cache.context_len, scale=1.0)
    wrong = {
        "q": [q.float(), q[:, :3], q[..., ::2], q[0]],
        "kv.k": [],
        "block_table": [cache.block_table.long(), cache.block_table[:1], cache.block_table.t()],
        "context_len": [cache.context_len.long(), cache.context_len[:1]],
        "window": [0],
        "softcap": [0.0],
        "sinks": [torch.zeros(3, device=device), torch.zeros(4, device=device).half()],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name}: "):
                decode_attention(**{**good, name: value})
    with pytest.raises(ValueError, match=r"^kv\.k: head_dim is 64"):
        decode_attention(**{**good, "q": torch.cat([q, q], -1)})
    with pytest.raises(ValueError, match=r"^kv\.scales: are missing"):
        scaled = make_cache("int8", [5, 6], 16, 2, 64).kv
        decode_attention(**{**good, "kv": type(scaled)("int8", scaled.k, scaled.v)})
