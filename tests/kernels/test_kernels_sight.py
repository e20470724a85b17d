"""What a token sees: trees of drafts, sliding windows, capped scores; and the attention that each token receives."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from membound.kernels.reference import TorchKernels  # noqa: E402


@st.composite
def trees(draw):
    """Sequences of (parents of their new tokens, context): parent -1 is the last committed token."""
    sequences = []
    for _ in range(draw(st.integers(1, 2))):
        new = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 64]))
        bushy = new < 9
        parents = [draw(st.integers(-1, j - 1)) if bushy else max(-1, j - 5) for j in range(new)]
        sequences.append((parents, new + draw(st.sampled_from([0, 1, 63, 130]))))
    return sequences


def paths(parents):
    """The new tokens that each new token sees, from the oldest to itself."""
    found = []
    for j, parent in enumerate(parents):
        found.append((found[parent] if parent >= 0 else []) + [j])
    return found


def with_tree(batch, sequences):
    masks = [sum(1 << j for j in path) for parents, _ in sequences for path in paths(parents)]
    return replace(batch, tree=torch.tensor([m - 2**64 if m >= 2**63 else m for m in masks]))


def exact_probabilities(q, k_blocks, step, sequence, token, path, scale, window, softcap):
    """(tokens seen, their probabilities [heads, seen]) of one new token, in fp64."""
    block_size, heads, kv_heads = k_blocks.shape[1], q.shape[1], k_blocks.shape[2]
    rows = step.rows(sequence)
    context = int(step.batch.context_len[sequence])
    committed = context - (rows.stop - rows.start)
    seen = list(range(committed)) + [committed + j for j in path]
    seen = seen[-window:] if window else seen
    table = step.batch.block_table[sequence].long()
    k = torch.stack([k_blocks[table[t // block_size], t % block_size] for t in seen]).double()
    scores = torch.einsum("hd,thd->ht", q[rows.start + token].double(), k.repeat_interleave(heads // kv_heads, 1))
    scores = scores * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return seen, scores.softmax(-1)


@settings(deadline=None, max_examples=15)
@given(
    sequences=trees(),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    window=st.one_of(st.none(), st.sampled_from([1, 2, 5, 63, 64, 70, 130])),
    softcap=st.sampled_from([None, 2.0]),
    as_tree=st.booleans(),
)
def test_a_token_attends_to_its_ancestors_in_its_window_and_no_other_memory_is_read(
    kernels, make_step, sequences, heads, window, softcap, as_tree
):
    if not as_tree:
        sequences = [(list(range(-1, len(parents) - 1)), context) for parents, context in sequences]
    step = make_step([(len(parents), context) for parents, context in sequences], heads[1], 16, 16)
    batch = with_tree(step.batch, sequences) if as_tree else step.batch
    q = torch.randn(batch.num_tokens, heads[0], 16, generator=torch.Generator().manual_seed(1))
    k_blocks, v_blocks = step.k_blocks, step.v_blocks
    expected = torch.empty(q.shape, dtype=torch.float64)
    received = torch.zeros(len(sequences), heads[1], max(context for _, context in sequences), dtype=torch.float64)
    for i, (parents, context) in enumerate(sequences):
        used = set()
        for token, path in enumerate(paths(parents)):
            seen, p = exact_probabilities(q, k_blocks, step, i, token, path, 0.3, window, softcap)
            used |= set(seen)
            table = batch.block_table[i].long()
            v = torch.stack([v_blocks[table[t // 16], t % 16] for t in seen]).double()
            v = v.repeat_interleave(heads[0] // heads[1], 1)
            expected[step.rows(i).start + token] = torch.einsum("ht,thd->hd", p, v)
            if token >= len(parents) - 2:
                received[i][:, seen] += p.unflatten(0, (heads[1], -1)).sum(1)
        # What nobody sees of the context may have been freed and hold anything.
        for t in set(range(context - len(parents))) - used:
            for blocks in (k_blocks, v_blocks):
                blocks[batch.block_table[i, t // 16].long(), t % 16] = torch.nan
    y = kernels.attention(q, k_blocks, v_blocks, batch, 0.3, window=window, softcap=softcap)
    assert (y - expected.flatten(1)).abs().max() < 3e-5
    scores = kernels.attention_scores(q, k_blocks, batch, 0.3, queries=2, window=window, softcap=softcap)
    assert scores.shape == received.shape and (scores - received).abs().max() < 1e-5


def test_a_chain_as_a_tree_has_the_bits_of_causal_attention(cpp, make_step):
    sequences = [(list(range(-1, new - 1)), context) for new, context in ((1, 7), (5, 150), (64, 64), (30, 200))]
    step = make_step([(len(parents), context) for parents, context in sequences], 2, 32, 16)
    q = torch.randn(100, 4, 32, generator=torch.Generator().manual_seed(1))
    for window in (None, 20, 70):
        causal = cpp.attention(q, step.k_blocks, step.v_blocks, step.batch, 0.2, window=window)
        tree = cpp.attention(q, step.k_blocks, step.v_blocks, with_tree(step.batch, sequences), 0.2, window=window)
        assert torch.equal(causal, tree)


def test_a_window_as_long_as_the_context_changes_no_bit(cpp, make_step):
    step = make_step([(3, 200), (90, 90)], 1, 16, 16)
    q = torch.randn(93, 2, 16)
    full = cpp.attention(q, step.k_blocks, step.v_blocks, step.batch, 0.2)
    assert torch.equal(full, cpp.attention(q, step.k_blocks, step.v_blocks, step.batch, 0.2, window=200))
    assert not torch.equal(full, cpp.attention(q, step.k_blocks, step.v_blocks, step.batch, 0.2, window=199))


def test_trees_and_windows_that_cannot_be_are_refused(cpp, make_step):
    step = make_step([(65, 70)], 1, 16, 16)
    q = torch.randn(65, 2, 16)
    tree = replace(step.batch, tree=torch.ones(65, dtype=torch.int64))
    with pytest.raises(ValueError, match="at most 64 tokens a sequence"):
        cpp.attention(q, step.k_blocks, step.v_blocks, tree, 0.2)
    with pytest.raises(ValueError, match="window: is 0"):
        cpp.attention(q, step.k_blocks, step.v_blocks, step.batch, 0.2, window=0)
    with pytest.raises(ValueError, match="queries: is 0"):
        cpp.attention_scores(q, step.k_blocks, step.batch, 0.2, queries=0)


def test_a_batch_takes_its_seats_and_tree_to_the_device(make_step):
    batch = replace(make_step([(2, 5)], 1, 16, 16).batch, seats=torch.tensor([3]), tree=torch.tensor([1, 3]))
    moved = batch.to(torch.device("meta"))
    assert moved.seats.device.type == moved.tree.device.type == "meta"


def test_a_window_of_a_long_context_shared_among_threads_has_the_bits_of_one_thread(cpp, make_step):
    step = make_step([(3, 3000)], 1, 64, 16)
    batch = with_tree(step.batch, [([-1, 0, 0], 3000)])
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1))
    step.k_blocks[step.batch.block_table[0, :100].long()] = torch.nan  # freed: long out of every window
    threads = torch.get_num_threads()
    try:
        for on in (step.batch, batch):
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(cpp.attention(q, step.k_blocks, step.v_blocks, on, 0.125, window=700))
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
            expected = TorchKernels().attention(q, step.k_blocks, step.v_blocks, on, 0.125, window=700)
            assert (results[0] - expected).abs().max() < 2e-5
    finally:
        torch.set_num_threads(threads)


@given(new=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_batch_bounds_what_its_sequences_bring_and_knows_a_step_of_decode(make_step, new):
    batch = make_step([(tokens, tokens + 3) for tokens in new], 1, 16, 4).batch
    assert batch.queries_at_most >= max(new) and (batch.queries_at_most == 1) == (max(new) == 1)
    assert replace(batch, most_queries=max(new)).queries_at_most == max(new)
