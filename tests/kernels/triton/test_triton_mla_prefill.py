"""Prompts over unpacked latents: the causal fp32 softmax of each sequence, whose heads share a part of their keys."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.kernels.triton.launch import Config  # noqa: E402
from membound.kernels.triton.mla_prefill import (  # noqa: E402
    mla_prefill,
    mla_prefill_bytes,
    mla_prefill_flops,
    mla_prefill_reference,
)
from membound.roofline.shape import StepShape  # noqa: E402

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value, for q, probabilities and result
# (new tokens, context): a prompt, a chunk of one, a sequence that brings nothing
SEQUENCES = st.lists(
    st.one_of(st.integers(1, 40).map(lambda n: (n, n)), st.tuples(st.integers(0, 20), st.integers(20, 60))),
    min_size=1,
    max_size=3,
)


def step_of(sequences, heads, sizes, dtype, device):
    """q, what was unpacked, the shared keys as a part of wider rows whose rest is NaN, and both edges."""
    own, shared, value = sizes
    random = torch.Generator().manual_seed(7 * len(sequences) + sequences[0][1])
    new, contexts = zip(*sequences, strict=True)
    edges = [torch.tensor([0, *counts]).cumsum(0).int().to(device) for counts in (new, contexts)]
    q = torch.randn(sum(new), heads, own + shared, generator=random).to(device, dtype)
    unpacked = torch.randn(sum(contexts), heads, own + value, generator=random).to(device, dtype)
    latents = torch.full((sum(contexts), 9 + shared), torch.nan, device=device, dtype=dtype)
    latents[:, 9:] = torch.randn(sum(contexts), shared, generator=random).to(device, dtype)
    return q, unpacked, latents[:, 9:], *edges


@settings(deadline=None, max_examples=20)
@given(
    sequences=SEQUENCES,
    heads=st.sampled_from([1, 3]),
    sizes=st.sampled_from([(16, 16, 16), (32, 16, 64), (24, 8, 20), (5, 3, 1)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_it_is_the_causal_softmax_for_any_mix_of_chunks(device, sequences, heads, sizes, dtype):
    q, *where = step_of(sequences, heads, sizes, dtype, device)
    y = mla_prefill(q, *where, 0.2, config=Config({"BLOCK_M": 16, "BLOCK_T": 16}))
    assert y.shape == (len(q), heads, sizes[2])
    if len(q):
        reference = mla_prefill_reference(q, *where, 0.2)
        assert (y.float() - reference).abs().max() <= TOLERANCE[dtype] * max(float(reference.abs().max()), 1.0)


def test_its_stored_configuration_gives_the_same_at_deepseeks_sizes(device):
    q, *where = step_of([(130, 200), (1, 64), (70, 70)], 2, (128, 64, 128), torch.bfloat16, device)
    reference = mla_prefill_reference(q, *where, 192**-0.5)
    assert (mla_prefill(q, *where, 192**-0.5).float() - reference).abs().max() <= 2e-2 * float(reference.abs().max())


def test_the_kernels_and_plain_pytorch_agree(device):
    sequences = [(9, 30), (20, 20)]
    q, unpacked, keys, *_ = step_of(sequences, 3, (24, 8, 20), torch.bfloat16, device)
    new, contexts = zip(*sequences, strict=True)
    y = TritonKernels(device.type).unpacked_attention(q, unpacked, keys, new, contexts, 0.2)
    plain = TorchKernels(device.type).unpacked_attention(q.float(), unpacked.float(), keys.float(), new, contexts, 0.2)
    assert (y.float() - plain).abs().max() <= 2e-2 * max(float(plain.abs().max()), 1.0)


def test_declared_bytes_and_flops_are_those_of_the_pairs():
    q = torch.empty(14, 4, 24, dtype=torch.bfloat16, device="meta")
    unpacked = torch.empty(39, 4, 36, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(39, 8, dtype=torch.bfloat16, device="meta")
    assert mla_prefill_bytes(q, unpacked, keys) == 2 * (14 * 4 * 24 + 39 * 4 * 36 + 39 * 8 + 14 * 4 * 20)
    attended = StepShape.of((context - new, new, 1) for new, context in ((5, 30), (9, 9))).attended
    assert mla_prefill_flops(q, 20, [5, 9], [30, 9]) == 2 * 4 * (24 + 20) * attended


def test_bad_arguments_are_named(device):
    q, unpacked, keys, starts, edges = step_of([(2, 5), (1, 6)], 2, (16, 16, 16), torch.bfloat16, device)
    good = dict(q=q, unpacked=unpacked, keys=keys, query_start=starts, kept_start=edges, scale=1.0)
    for name, wrong in (
        ("q", q.double()),
        ("unpacked", unpacked[:, :1]),
        ("unpacked", unpacked[..., :16]),
        ("keys", keys.half()),
        ("keys", torch.zeros(11, 32, dtype=torch.bfloat16, device=device)),
        ("query_start", starts.long()),
        ("kept_start", edges[:2]),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            mla_prefill(**{**good, name: wrong})
