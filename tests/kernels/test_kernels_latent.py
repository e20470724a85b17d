"""What MLA does around its attention agrees with plain PyTorch, and attention's sinks with their definition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from membound.kernels.reference import TorchKernels  # noqa: E402

SEQUENCES = [(1, 7), (3, 3), (2, 70)]


@settings(deadline=None, max_examples=25)
@given(
    heads=st.integers(1, 5), nope=st.sampled_from([0, 5, 16]), rope=st.sampled_from([2, 8, 64]),
    rank=st.sampled_from([3, 32, 512]), before=st.sampled_from([0, 5]),
)  # fmt: skip
def test_a_latent_is_normed_turned_and_stored(cpp, make_step, heads, nope, rope, rank, before):
    step = make_step(SEQUENCES, 1, rank + rope, 16)
    random = torch.Generator().manual_seed(rank)
    tokens = step.batch.num_tokens
    q = torch.randn(tokens, heads, nope + rope, generator=random)
    latents = torch.randn(tokens, before + rank + rope, generator=random)[:, before:]
    norm, angles = torch.randn(rank, generator=random), torch.randn(100, rope // 2, generator=random)
    cos, sin = angles.cos(), angles.sin()
    kept, others = step.k_blocks.clone(), step.k_blocks.clone()
    ours = cpp.latent_rope_and_store(q.clone(), latents, norm, 1e-6, cos, sin, step.batch, kept)
    plain = TorchKernels().latent_rope_and_store(q, latents, norm, 1e-6, cos, sin, step.batch, others)
    assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)
    stored = step.batch.slots
    kept, others = (blocks.flatten(0, 1)[stored, 0].float() for blocks in (kept, others))
    assert torch.allclose(kept, others, rtol=2**-7, atol=1e-6), "but for a last bit of bf16"


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.sampled_from([1, 3, 12]), heads=st.integers(1, 6), n=st.sampled_from([1, 40, 512]),
    k=st.sampled_from([7, 64, 128]), tail=st.sampled_from([0, 6]), seed=st.integers(0, 9),
)  # fmt: skip
def test_each_head_has_a_matrix_of_its_own(kernels, tokens, heads, n, k, tail, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, k + tail + 3, generator=random)
    weight = torch.randn(heads, n, k, generator=random).bfloat16()
    y = kernels.heads_linear(x, weight, tail)
    exact = torch.einsum("thk,hnk->thn", x[..., :k].double(), weight.double())
    assert y.shape == (tokens, heads, n + tail)
    # Plain PyTorch rounds x and the result to bf16.
    assert (y[..., :n] - exact).abs().max() <= 0.02 * exact.abs().max() + 0.02
    assert torch.equal(y[..., n:], x[..., k : k + tail])


def test_heads_in_fp32_sums_are_as_exact_as_the_weights(cpp):
    x, weight = torch.randn(3, 4, 128), torch.randn(4, 50, 128).bfloat16()
    exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert torch.allclose(cpp.heads_linear(x, weight).double(), exact, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(
    heads=st.sampled_from([(4, 1), (6, 2), (3, 3)]), size=st.sampled_from([0.0, 1.0, 30.0]),
    window=st.sampled_from([None, 5]), softcap=st.sampled_from([None, 2.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_sinks_take_their_share_of_each_softmax(cpp, make_step, heads, size, window, softcap, seed):
    step = make_step([(1, 150), (4, 40)], heads[1], 32, 16, seed)
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(step.batch.num_tokens, heads[0], 32, generator=random)
    sinks = torch.randn(heads[0], generator=random) * size
    where = q, step.k_blocks, step.v_blocks, step.batch, 0.2, sinks
    ours = cpp.attention_with_sinks(*where, window=window, softcap=softcap)
    plain = TorchKernels().attention_with_sinks(*where, window=window, softcap=softcap)
    assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-5)
    nothing = cpp.attention_with_sinks(*where[:-1], torch.full_like(sinks, -1e30), window=window, softcap=softcap)
    assert torch.allclose(nothing, cpp.attention(*where[:-1], window=window, softcap=softcap), rtol=1e-6)
