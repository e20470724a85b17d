"""Linear layers: right to fp32 rounding, and the same bits for a row in any batch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

FORMATS = st.sampled_from(["fp32", "bf16", "int8"])
WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 257, 1024, 1025, 2100]))


def problem(m, n, k, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=random), torch.randn(n, k, generator=random)


def unpacked(weight):
    return weight.data.double() if weight.scale is None else weight.data.double() * weight.scale.double()[:, None]


@settings(deadline=None, max_examples=80)
@given(m=st.integers(1, 70), n=st.integers(1, 50), k=WIDTHS, format=FORMATS, seed=st.integers(0, 99))
def test_linear_is_the_fp64_product_of_the_packed_weight_up_to_fp32_rounding(cpp, m, n, k, format, seed):
    x, w = problem(m, n, k, seed)
    weight = cpp.pack(w, format)
    exact = x.double() @ unpacked(weight).T
    magnitude = x.double().abs() @ unpacked(weight).abs().T
    # Each of the k / lanes + lanes additions rounds once; k * eps bounds any order of them.
    assert ((cpp.linear(x, weight) - exact).abs() <= 2 * (k + 2) * 2**-24 * magnitude + 1e-30).all()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), n=st.integers(1, 50), k=WIDTHS, format=FORMATS)
def test_a_row_of_linear_has_the_same_bits_in_any_batch(cpp, data, n, k, format):
    x, w = problem(70, n, k, seed=k)
    weight = cpp.pack(w, format)
    all_rows = cpp.linear(x, weight)
    first = data.draw(st.integers(0, 69), label="first")
    last = data.draw(st.integers(first + 1, 70), label="last")
    assert torch.equal(cpp.linear(x[first:last], weight), all_rows[first:last])


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
def test_every_batch_size_gives_the_bits_of_one_row_at_a_time(cpp, format):
    x, w = problem(70, 131, 1100, seed=1)
    weight = cpp.pack(w, format)
    single = torch.cat([cpp.linear(row, weight) for row in x.split(1)])
    for m in range(1, 71):
        assert torch.equal(cpp.linear(x[:m], weight), single[:m]), m


def test_bits_do_not_depend_on_the_number_of_threads(cpp):
    x, w = problem(40, 600, 577, seed=2)
    weight = cpp.pack(w, "bf16")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [cpp.linear(x[:m], weight) for m in (1, 5, 40)]
        torch.set_num_threads(3)
        shared = [cpp.linear(x[:m], weight) for m in (1, 5, 40)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 64), (5, 33, 37), (20, 7, 130)])
def test_both_kernel_sets_compute_the_same_layer(kernels, format, m, n, k):
    x, w = problem(m, n, k, seed=3)
    weight = kernels.pack(w, format)
    exact = x.double() @ unpacked(weight).T
    y = kernels.linear(x, weight)
    assert y.shape == (m, n) and y.dtype == kernels.activation_dtype
    assert torch.allclose(y.double(), exact, atol=0.02 * k**0.5, rtol=0.02)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 20), k=st.integers(1, 60), power=st.integers(-20, 20), seed=st.integers(0, 99))
def test_int8_is_off_by_at_most_half_a_step_of_its_row(kernels, n, k, power, seed):
    _, w = problem(1, n, k, seed)
    w = w * 2.0**power
    w[0] = 0
    weight = kernels.pack(w, "int8")
    assert weight.data.dtype == torch.int8 and weight.scale.shape == (n,) and weight.shape == (n, k)
    error = (unpacked(weight) - w.double()).abs().amax(dim=1)
    assert (error <= weight.scale.double() * 0.5001).all()
    assert (unpacked(weight)[0] == 0).all()
    assert weight.nbytes == n * k + 4 * n


def test_a_weight_that_does_not_fit_is_refused(cpp):
    with pytest.raises(ValueError, match="8 columns"):
        cpp.linear(torch.zeros(1, 8), cpp.pack(torch.zeros(4, 9), "bf16"))
    with pytest.raises(TypeError, match="fp32 activations"):
        cpp.linear(torch.zeros(1, 9, dtype=torch.bfloat16), cpp.pack(torch.zeros(4, 9), "bf16"))
    with pytest.raises(ValueError, match="no such weight format"):
        cpp.pack(torch.zeros(4, 9), "int3")


def test_large_matrices_go_to_the_matrix_units_only_where_there_are_some(cpp, monkeypatch):
    from membound.kernels import cpu

    monkeypatch.setattr(cpu, "has_bf16_units", lambda: False)
    assert cpu.CpuKernels().batch_invariant_below("bf16") is None
    monkeypatch.setattr(cpu, "has_bf16_units", lambda: True)
    kernels = cpu.CpuKernels()
    threshold = kernels.batch_invariant_below("bf16")
    assert threshold and f"bf16 linear of {threshold} tokens" in kernels.describe()
    assert cpu.CpuKernels(batch_invariant=True).batch_invariant_below("bf16") is None
    x, w = problem(300, 16, 32, seed=4)
    for format in ("bf16", "int8"):
        assert torch.allclose(
            kernels.linear(x, kernels.pack(w, format)), cpp.linear(x, cpp.pack(w, format)), atol=0.2, rtol=0.02
        )
