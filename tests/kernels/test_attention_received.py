"""The attention that tokens receive, padded: that of plain PyTorch sequence by sequence, with no length asked for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from membound.kernels import attention_received as received  # noqa: E402
from membound.kernels.base import RaggedBatch  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402

SEQUENCES = st.lists(
    st.tuples(st.sampled_from([1, 2, 5, 70]), st.sampled_from([0, 1, 63, 130])), min_size=1, max_size=3
)


@settings(deadline=None, max_examples=30)
@given(
    sequences=SEQUENCES,
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    queries=st.sampled_from([1, 3, 100]),
    window=st.sampled_from([None, 1, 20, 64]),
    softcap=st.sampled_from([None, 2.0]),
    at_once=st.sampled_from([1, 5000, 2**26]),
)
def test_it_is_that_of_each_sequence_by_itself_and_nothing_behind_its_context(
    make_step, sequences, heads, queries, window, softcap, at_once
):
    step = make_step([(new, new + before) for new, before in sequences], heads[1], 16, 16)
    batch, most = step.batch, max(new for new, _ in sequences)
    q = torch.randn(batch.num_tokens, heads[0], 16, generator=torch.Generator().manual_seed(1))
    expected = TorchKernels().attention_scores(
        q, step.k_blocks, batch, 0.3, queries=queries, window=window, softcap=softcap
    )
    table = torch.full((len(sequences), batch.block_table.shape[1] + 1), 2**30, dtype=torch.int32)
    for i, (new, before) in enumerate(sequences):
        used = -(-(new + before) // 16)
        table[i, :used] = batch.block_table[i, :used]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(received, "SCORES_AT_ONCE", at_once)
        found = received.attention_received(
            q,
            step.k_blocks,
            replace(batch, block_table=table),
            0.3,
            queries=queries,
            most=most,
            window=window,
            softcap=softcap,
        )
    assert (found[:, :, : expected.shape[2]] - expected).abs().max() < 1e-5
    assert (found[:, :, expected.shape[2] :] == 0).all()


def test_nothing_is_read_back_from_the_device():
    """Tensors of device 'meta' have no numbers: whatever waits for one, such as a length, fails."""

    def of(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    longs = of(7, dtype=torch.int64)
    batch = RaggedBatch(longs, longs, of(4), of(3), of(3, 5), most_queries=4)
    q, k = of(7, 4, 16, dtype=torch.bfloat16), of(20, 16, 2, 16, dtype=torch.bfloat16)
    found = received.attention_received(q, k, batch, 0.3, queries=2, most=4, window=3, softcap=1.0)
    assert found.shape == (3, 2, 80) and found.device.type == "meta"
