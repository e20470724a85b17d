"""Prefill, chunked prefill and tree verification over pages: the masked fp32 softmax, for any mix of sequences."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.base import RaggedBatch  # noqa: E402
from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.kernels.triton.launch import Config  # noqa: E402
from membound.kernels.triton.prefill_attention import (  # noqa: E402
    prefill_attention,
    prefill_attention_bytes,
    prefill_attention_flops,
    prefill_attention_reference,
)
from membound.kernels.triton.verify_attention import (  # noqa: E402
    verify_attention,
    verify_attention_bytes,
    verify_attention_reference,
)
from membound.roofline.shape import StepShape  # noqa: E402

FORMATS = st.sampled_from(["bf16", "fp16", "fp8", "int8", "int4"])
HEADS = st.sampled_from([(1, 1), (4, 2), (6, 2), (9, 3), (40, 1)])
HEAD_DIMS = st.sampled_from([64, 80, 6])
# (new tokens, context): a decode step, a prompt, a chunk of one, a sequence that brings nothing
SEQUENCES = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 40)),
        st.integers(1, 20).map(lambda n: (n, n)),
        st.tuples(st.integers(0, 9), st.integers(9, 40)),
    ),
    min_size=1,
    max_size=3,
)
SCORES = st.tuples(st.sampled_from([None, 0.7]), st.booleans())  # a cap, and whether there are sinks
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value, for q, probabilities and result


def close(y, reference):
    return (y.float() - reference).abs().max() <= TOLERANCE[y.dtype] * max(float(reference.abs().max()), 1.0)


def scores_of(scores, heads, device):
    softcap, sunk = scores
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(3)).to(device) if sunk else None
    return {"softcap": softcap, "sinks": sinks}


def step_of(make_cache, device, sequences, format, heads, head_dim, block_size):
    """q, and where its tokens are: what both kernels take."""
    cache = make_cache(format, [context for _, context in sequences], block_size, heads[1], head_dim)
    starts = [sum(new for new, _ in sequences[:i]) for i in range(len(sequences) + 1)]
    dtype = torch.float16 if format == "fp16" else torch.bfloat16
    q = torch.randn(starts[-1], heads[0], head_dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    start = torch.tensor(starts, dtype=torch.int32, device=device)
    return q, (cache.kv, cache.block_table, start, cache.context_len, head_dim**-0.5)


def random_tree(sequences, device):
    """Each token's ancestors: itself and those of a parent before it, drawn at random."""
    random = torch.Generator().manual_seed(0)
    bits = []
    for new, _ in sequences:
        masks = []
        for token in range(new):
            parent = int(torch.randint(-1, token, (), generator=random)) if token else -1
            masks.append((1 << token) | (masks[parent] if parent >= 0 else 0))
        bits += masks
    as_signed = [mask - 2**64 if mask >= 2**63 else mask for mask in bits]
    return torch.tensor(as_signed, dtype=torch.int64, device=device)


@settings(deadline=None, max_examples=18)
@given(
    sequences=SEQUENCES,
    format=FORMATS,
    heads=HEADS,
    head_dim=HEAD_DIMS,
    block_size=st.sampled_from([1, 5, 16]),
    window=st.none() | st.integers(1, 50),
    scores=SCORES,
)
def test_prefill_attention_is_the_causal_softmax_for_any_mix_of_chunks(
    make_cache, device, sequences, format, heads, head_dim, block_size, window, scores
):
    q, where = step_of(make_cache, device, sequences, format, heads, head_dim, block_size)
    options = dict(window=window, **scores_of(scores, heads[0], device))
    y = prefill_attention(q, *where, **options, config=Config({"BLOCK_M": 32, "BLOCK_T": 16}))
    assert y.shape == q.shape
    if len(q):
        assert close(y, prefill_attention_reference(q, *where, **options))


def test_prefill_with_its_stored_configuration_gives_the_same(make_cache, device):
    q, where = step_of(make_cache, device, [(70, 200), (1, 65), (130, 130)], "bf16", (4, 2), 64, 16)
    assert close(prefill_attention(q, *where), prefill_attention_reference(q, *where))


@settings(deadline=None, max_examples=18)
@given(
    sequences=SEQUENCES,
    format=FORMATS,
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (7, 1)]),
    head_dim=HEAD_DIMS,
    block_size=st.sampled_from([1, 5, 16]),
    splits=st.sampled_from([1, 3]),
    window=st.none() | st.integers(1, 50),
    scores=SCORES,
)
def test_verification_sees_the_context_and_each_drafts_own_ancestors(
    make_cache, device, sequences, format, heads, head_dim, block_size, splits, window, scores
):
    q, where = step_of(make_cache, device, sequences, format, heads, head_dim, block_size)
    tree = random_tree(sequences, device)
    config = Config({"BLOCK_R": 32, "BLOCK_T": 16})
    most = max(1, *(new for new, _ in sequences))
    options = dict(window=window, **scores_of(scores, heads[0], device))
    y = verify_attention(q, tree, *where, most_queries=most, **options, splits=splits, config=config)
    if len(q):
        assert close(y, verify_attention_reference(q, tree, *where, **options))


def test_a_chain_of_drafts_is_verified_as_prefill_attends(make_cache, device):
    """64 drafts, the most that there can be, and the stored configuration with its own splits."""
    sequences = [(64, 300), (3, 3)]
    q, where = step_of(make_cache, device, sequences, "bf16", (4, 2), 64, 16)
    chain = torch.tensor([(2 << t) - 1 if t < 63 else -1 for new, _ in sequences for t in range(new)], device=device)
    y = verify_attention(q, chain, *where, most_queries=64)
    assert close(y, prefill_attention_reference(q, *where))


@pytest.mark.parametrize("window", [1, 63, 64])
def test_a_chain_in_a_window_is_verified_as_prefill_attends_in_it(make_cache, device, window):
    """64 drafts, whose masks fill the sign, and windows on both sides of their number."""
    sequences = [(64, 90), (3, 3)]
    q, where = step_of(make_cache, device, sequences, "bf16", (1, 1), 16, 16)
    chain = torch.tensor([(2 << t) - 1 if t < 63 else -1 for new, _ in sequences for t in range(new)], device=device)
    y = verify_attention(q, chain, *where, most_queries=64, window=window, splits=2)
    assert close(y, prefill_attention_reference(q, *where, window=window))


def test_a_tree_in_a_window_sees_what_the_plain_kernels_show_it(device):
    """Against `visible_tokens`, by which plain PyTorch attends, not against the kernel's own reference."""
    random = torch.Generator().manual_seed(4)
    starts, lengths = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 6, 9], [20, 9]))
    tree = torch.tensor([1, 3, 5, 11, 21, 43, 1, 3, 5], device=device)
    places = torch.tensor([14, 15, 15, 16, 16, 17, 6, 7, 7], device=device)
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device=device)
    batch = RaggedBatch(places, places, starts, lengths, table, 6, tree=tree)
    q, k, v = (torch.randn(*shape, generator=random).bfloat16() for shape in ((9, 4, 64), *[(4, 16, 2, 64)] * 2))
    q, k, v = (t.to(device) for t in (q, k, v))
    for window in (1, 2, 4, 9):
        y = TritonKernels(device.type).attention(q, k, v, batch, 0.125, window=window)
        plain = TorchKernels(device.type).attention(q.float(), k, v, batch, 0.125, window=window)
        assert close(y, plain.float())


def test_declared_bytes_and_flops_are_the_rooflines(make_cache, device):
    sequences = [(5, 9), (1, 30), (4, 4)]
    q, where = step_of(make_cache, device, sequences, "bf16", (4, 2), 64, 16)
    shape = StepShape.of((context - new, new, 1) for new, context in sequences)
    kv_bytes = shape.kv_tokens * 2 * 2 * 64 * 2
    assert prefill_attention_bytes(q, where[0], [9, 30, 4]) == kv_bytes + 2 * q.nbytes
    assert verify_attention_bytes(q, where[0], [9, 30, 4]) == kv_bytes + 2 * q.nbytes + 8 * 10
    assert prefill_attention_flops(q, [5, 1, 4], [9, 30, 4]) == 4 * 4 * 64 * shape.attended


def test_bad_arguments_are_named(make_cache, device):
    q, (kv, table, start, lengths, scale) = step_of(make_cache, device, [(2, 5), (1, 6)], "bf16", (4, 2), 64, 16)
    tree = torch.ones(3, dtype=torch.int64, device=device)
    prefill = dict(q=q, kv=kv, block_table=table, query_start=start, context_len=lengths, scale=scale)
    for name, wrong in (
        ("q", q.double()),
        ("query_start", start[:2]),
        ("query_start", start.long()),
        ("context_len", lengths.long()),
        ("block_table", table[:1]),
        ("window", -1),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            prefill_attention(**{**prefill, name: wrong})
    verify = dict(prefill, tree=tree, most_queries=2)
    for name, wrong in (("tree", tree.int()), ("tree", tree[:2]), ("most_queries", 65), ("window", 0), ("q", q[:, :3])):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            verify_attention(**{**verify, name: wrong})
