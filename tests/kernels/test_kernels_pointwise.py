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


EXACT_ACTIVATIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp_min(0),
    "relu_squared": lambda x: x.clamp_min(0) ** 2,
    "softplus": lambda x: torch.log1p(torch.exp(x)),
}


@settings(deadline=None, max_examples=40)
@given(tokens=TOKENS, width=WIDTHS, size=st.sampled_from([0.1, 1.0, 8.0]), kind=st.sampled_from([*EXACT_ACTIVATIONS]))
def test_activations_alone_and_times_another_half(kernels, tokens, width, size, kind):
    x = torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(width)) * size
    exact = EXACT_ACTIVATIONS[kind](x.double())
    assert torch.allclose(kernels.activated(x, kind).double(), exact, rtol=1e-5, atol=2e-6)
    gate, up = x.double().chunk(2, dim=-1)
    exact = EXACT_ACTIVATIONS[kind](gate) * up
    assert torch.allclose(kernels.glu(x, kind).double(), exact, rtol=1e-5, atol=2e-6 * size)


@settings(deadline=None, max_examples=20)
@given(tokens=TOKENS, width=WIDTHS, limit=st.sampled_from([0.5, 7.0]))
def test_a_clamped_gate_is_that_of_gpt_oss(kernels, tokens, width, limit):
    x = torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(width)) * 4
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    exact = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    assert torch.allclose(kernels.glu(x, "silu", limit).double(), exact, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(tokens=TOKENS, width=WIDTHS, weighted=st.booleans(), shifted=st.booleans(), added=st.booleans())
def test_layer_norm_with_any_of_its_parts(kernels, tokens, width, weighted, shifted, added):
    random = torch.Generator().manual_seed(width)
    x, residual = torch.randn(2, tokens, width, generator=random) + 3
    weight = torch.randn(width, generator=random) if weighted else None
    bias = torch.randn(width, generator=random) if shifted else None
    total = x + residual if added else x
    exact = total.double() - total.double().mean(-1, keepdim=True)
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = exact * (1 if weight is None else weight) + (0 if bias is None else bias)
    y = kernels.layer_norm(x, weight, bias, 1e-5, residual if added else None)
    assert torch.allclose(y.double(), exact, rtol=1e-4, atol=1e-4)
    assert not added or torch.equal(residual, total)


@settings(deadline=None, max_examples=30)
@given(
    tokens=TOKENS, heads=st.integers(1, 5), dim=st.sampled_from([1, 8, 30, 64]), before=st.integers(0, 9),
    grouped=st.booleans(),
)  # fmt: skip
def test_heads_are_normed_in_place_and_what_lies_beside_them_stays(kernels, tokens, heads, dim, before, grouped):
    random = torch.Generator().manual_seed(dim)
    x = torch.randn(tokens, before + heads * dim + 3, generator=random)
    weight = torch.randn(*((heads, dim) if grouped else (dim,)), generator=random)
    was = x.clone()
    kernels.norm_heads(x, before, heads, weight, 1e-6)
    pieces = was[:, before : before + heads * dim].unflatten(1, (heads, dim))
    found = x[:, before : before + heads * dim].unflatten(1, (heads, dim))
    assert torch.allclose(found.double(), exact_norm(pieces, torch.ones(()), 1e-6) * weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(x[:, :before], was[:, :before])
    assert torch.equal(x[:, before + heads * dim :], was[:, before + heads * dim :])


@settings(deadline=None, max_examples=30)
@given(tokens=TOKENS, width=WIDTHS, one=st.booleans(), silu=st.booleans())
def test_sums_and_gates_of_rows(kernels, tokens, width, one, silu):
    random = torch.Generator().manual_seed(width)
    x, y, wide = torch.randn(tokens, width), torch.randn(tokens, width), torch.randn(tokens, width + 7)
    bias = torch.randn(width, generator=random)
    assert torch.equal(kernels.add(x, y), x + y)
    assert torch.equal(kernels.scaled(x, 0.22), x * 0.22)
    assert torch.equal(kernels.add_bias(x.clone(), bias), x + bias)
    gate = wide[:, 3 : 4 if one else 3 + width]  # a part of wider rows, as projections leave it
    of_gate = gate.double().sigmoid() * (gate.double() if silu else 1)
    found = kernels.gated(x, gate, silu=silu)
    assert torch.allclose(found.double(), x.double() * of_gate, rtol=1e-5, atol=1e-7)


@settings(deadline=None, max_examples=20)
@given(tokens=TOKENS, widths=st.lists(st.sampled_from([1, 7, 16, 100]), min_size=1, max_size=3))
def test_parts_of_rows_are_joined(kernels, tokens, widths):
    wide = torch.randn(tokens, 130)
    parts = [wide[:, 5 : 5 + width] for width in widths]
    assert torch.equal(kernels.joined(parts), torch.cat(parts, dim=-1))


def test_rows_with_gaps_are_read_as_they_lie(cpp):
    wide = torch.randn(3, 100)
    weight = cpp.pack(torch.randn(20, 40), "fp32")
    assert torch.equal(cpp.linear(wide[:, 5:45], weight), cpp.linear(wide[:, 5:45].contiguous(), weight))
    ones = torch.ones(40)
    assert torch.equal(cpp.rms_norm(wide[:, 5:45], ones, 1e-5), cpp.rms_norm(wide[:, 5:45].contiguous(), ones, 1e-5))
