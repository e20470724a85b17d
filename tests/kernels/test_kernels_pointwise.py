"""Norms and activation against fp64."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

TOKENS = st.sampled_from([1, 2, 3, 33])
WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([576, 1000, 4096]))


def exact_norm(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@settings(deadline=None, max_examples=30)
@given(tokens=TOKENS, width=WIDTHS, seed=st.integers(0, 99))
def test_rms_norm_with_and_without_a_residual(kernels, tokens, width, seed):
    random = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, tokens, width, generator=random)
    weight = torch.randn(width, generator=random)
    assert torch.allclose(kernels.rms_norm(x, weight, 1e-5).double(), exact_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    total = x + residual
    y = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.allclose(y.double(), exact_norm(total, weight, 1e-5), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(tokens=TOKENS, width=WIDTHS, size=st.sampled_from([0.1, 1.0, 30.0, 200.0]))
def test_silu_mul(kernels, tokens, width, size):
    gate_up = torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(width)) * size
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = gate / (1 + torch.exp(-gate)) * up
    assert torch.allclose(kernels.silu_mul(gate_up).double(), exact, rtol=1e-5, atol=1e-30)


def test_a_nan_stays_visible(kernels):
    gate_up = torch.ones(1, 40)
    gate_up[0, 3] = torch.nan
    assert kernels.silu_mul(gate_up).isnan().nonzero().tolist() == [[0, 3]]
    assert kernels.rms_norm(gate_up, torch.ones(40), 1e-5).isnan().all()


@settings(deadline=None, max_examples=20)
@given(data=st.data(), width=WIDTHS)
def test_a_row_has_the_same_bits_in_any_batch(cpp, data, width):
    x = torch.randn(40, 2 * width, generator=torch.Generator().manual_seed(width))
    weight = torch.ones(2 * width)
    row = data.draw(st.integers(0, 39), label="row")
    assert torch.equal(cpp.silu_mul(x)[row], cpp.silu_mul(x[row : row + 1])[0])
    assert torch.equal(cpp.rms_norm(x, weight, 1e-5)[row], cpp.rms_norm(x[row : row + 1], weight, 1e-5)[0])
