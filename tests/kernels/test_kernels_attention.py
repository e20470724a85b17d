"""Paged attention: the softmax of its own context, and the same bits for a token in any batch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

# (new tokens, context): a decode step, a prompt, a chunk of one, a draft to verify
SEQUENCES = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.sampled_from([1, 2, 63, 64, 65, 128, 129, 300])),
        st.integers(1, 90).map(lambda n: (n, n)),
        st.tuples(st.integers(2, 8), st.integers(8, 140)),
    ),
    min_size=1,
    max_size=5,
)
HEADS = st.sampled_from([(1, 1), (9, 3), (4, 1), (4, 4), (6, 2), (70, 1)])


def exact_attention(q, step, scale):
    """Token by token and head by head, in fp64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    heads, kv_heads = q.shape[1], step.k_blocks.shape[2]
    block_size = step.k_blocks.shape[1]
    for i in range(step.batch.num_sequences):
        table = step.batch.block_table[i].long()
        for row in range(step.rows(i).start, step.rows(i).stop):
            context = int(step.batch.positions[row]) + 1
            used = table[: -(-context // block_size)]
            k, v = (b[used].flatten(0, 1)[:context].double() for b in (step.k_blocks, step.v_blocks))
            k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))  # [context, heads, D]
            scores = torch.einsum("hd,thd->ht", q[row].double(), k) * scale
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
    return out.flatten(1)


@settings(deadline=None, max_examples=25)
@given(
    sequences=SEQUENCES, heads=HEADS, head_dim=st.sampled_from([2, 16, 20, 64, 80]), block=st.sampled_from([1, 5, 16])
)
def test_attention_is_the_fp64_softmax_for_any_mix_of_prefill_decode_and_verify(
    kernels, make_step, sequences, heads, head_dim, block
):
    step = make_step(sequences, heads[1], head_dim, block)
    q = torch.randn(step.batch.num_tokens, heads[0], head_dim, generator=torch.Generator().manual_seed(1))
    y = kernels.attention(q, step.k_blocks, step.v_blocks, step.batch, head_dim**-0.5)
    assert y.shape == (step.batch.num_tokens, heads[0] * head_dim)
    assert (y - exact_attention(q, step, head_dim**-0.5)).abs().max() < 2e-5


@settings(deadline=None, max_examples=25)
@given(data=st.data(), sequences=SEQUENCES, heads=HEADS, head_dim=st.sampled_from([16, 64, 100]))
def test_a_token_has_the_same_bits_decoded_alone_and_in_a_batch_or_a_draft(
    cpp, make_step, data, sequences, heads, head_dim
):
    step = make_step(sequences, heads[1], head_dim, 16)
    q = torch.randn(step.batch.num_tokens, heads[0], head_dim, generator=torch.Generator().manual_seed(1))
    y = cpp.attention(q, step.k_blocks, step.v_blocks, step.batch, 0.1)
    for i, (new, _) in enumerate(sequences):
        token = data.draw(st.integers(0, new - 1), label="token")
        row = step.rows(i).start + token
        alone = cpp.attention(q[row : row + 1], step.k_blocks, step.v_blocks, step.alone(i, token), 0.1)
        assert torch.equal(alone[0], y[row])


@pytest.mark.parametrize("head_dim", [20, 64, 96, 128])
def test_a_head_has_the_same_bits_alone_and_in_a_group_of_any_size(cpp, make_step, head_dim):
    step = make_step([(1, 300), (3, 77)], 1, head_dim, 16)
    q = torch.randn(step.batch.num_tokens, 13, head_dim, generator=torch.Generator().manual_seed(1))

    def attended(first: int, last: int) -> torch.Tensor:
        heads = q[:, first:last].contiguous()
        return cpp.attention(heads, step.k_blocks, step.v_blocks, step.batch, head_dim**-0.5).view_as(heads)

    alone = torch.cat([attended(head, head + 1) for head in range(13)], dim=1)
    for group in range(2, 14):
        assert torch.equal(attended(0, group), alone[:, :group]), group


def test_a_long_context_shared_among_threads_has_the_bits_of_one_thread(cpp, make_step):
    step = make_step([(1, 3000)], 1, 64, 16)
    q = torch.randn(1, 4, 64)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(cpp.attention(q, step.k_blocks, step.v_blocks, step.batch, 0.125))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert (results[0] - exact_attention(q, step, 0.125)).abs().max() < 1e-5


def test_scores_that_differ_by_hundreds_neither_overflow_nor_lose_the_winner(kernels, make_step):
    step = make_step([(1, 200)], 1, 16, 16)
    q = torch.full((1, 1, 16), 1e3)
    y = kernels.attention(q, step.k_blocks, step.v_blocks, step.batch, 1.0)
    assert (y - exact_attention(q, step, 1.0)).abs().max() < 1e-4


def test_k_and_v_may_be_views_of_one_tensor_with_the_blocks_apart(cpp, make_step):
    step = make_step([(3, 50), (1, 20)], 2, 32, 8)
    q = torch.randn(4, 4, 32)
    together = torch.stack([step.k_blocks, step.v_blocks], dim=1)  # [blocks, 2, block_size, kv_heads, D]
    expected = cpp.attention(q, step.k_blocks, step.v_blocks, step.batch, 0.2)
    assert torch.equal(cpp.attention(q, together[:, 0], together[:, 1], step.batch, 0.2), expected)
    with pytest.raises(TypeError, match="dense within a block"):
        cpp.attention(q, step.k_blocks.transpose(1, 2), step.v_blocks.transpose(1, 2), step.batch, 0.2)


@settings(deadline=None, max_examples=20)
@given(sequences=SEQUENCES, heads=HEADS, head_dim=st.sampled_from([2, 16, 20, 64]))
def test_rope_rotates_pairs_by_their_angle_and_stores_k_and_v_rounded_to_bf16(
    kernels, make_step, sequences, heads, head_dim
):
    step = make_step(sequences, heads[1], head_dim, 16)
    random = torch.Generator().manual_seed(2)
    tokens, (q_heads, kv_heads), half = step.batch.num_tokens, heads, head_dim // 2
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, generator=random)
    angle = torch.rand(400, half, generator=random) * 6
    k_before = step.k_blocks.clone()
    q = kernels.rope_and_store(qkv, angle.cos(), angle.sin(), step.batch, step.k_blocks, step.v_blocks)

    parts = qkv.view(tokens, -1, head_dim).double()
    pairs = torch.complex(parts[..., :half], parts[..., half:])
    turned = pairs * torch.exp(1j * angle[step.batch.positions].double())[:, None]
    rotated = torch.cat([turned.real, turned.imag], dim=-1)
    assert (q - rotated[:, :q_heads]).abs().max() < 1e-5
    k, v = (b.view(-1, kv_heads, head_dim)[step.batch.slots] for b in (step.k_blocks, step.v_blocks))
    assert torch.allclose(k.double(), rotated[:, q_heads : q_heads + kv_heads], rtol=2**-8, atol=1e-5)
    assert torch.equal(v, qkv.view(tokens, -1, head_dim)[:, q_heads + kv_heads :].bfloat16())
    untouched = torch.ones(step.k_blocks.shape[0] * 16, dtype=torch.bool)
    untouched[step.batch.slots] = False
    before, after = (b.view(-1, kv_heads * head_dim)[untouched].view(torch.int16) for b in (k_before, step.k_blocks))
    assert torch.equal(before, after)
