"""Experts: the router chooses as a sort does, and the grouped product is each slot's own, however they are spread."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.bench.trial import FP8_SUMS  # noqa: E402
from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.triton.launch import Config  # noqa: E402
from membound.kernels.triton.linear_int4 import Int4Weight  # noqa: E402
from membound.kernels.triton.linear_mxfp4 import Mxfp4Weight  # noqa: E402
from membound.kernels.triton.linear_w8a8 import Fp8Blocks  # noqa: E402
from membound.kernels.triton.moe_experts import ExpertWeights  # noqa: E402
from membound.kernels.triton.moe_linear import (  # noqa: E402
    moe_combine,
    moe_linear,
    moe_linear_bytes,
    moe_linear_reference,
)
from membound.kernels.triton.moe_routing import Routing, expert_order, route, route_reference  # noqa: E402

# Triton's interpreter cuts bf16 off where a GPU rounds it.
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(y, reference):
    return torch.allclose(y.float(), reference, rtol=ROUNDING[y.dtype], atol=2e-5 * float(reference.abs().max() + 1))


def expert_weights(format, experts, n, k, dtype, device):
    dense = random(experts, n, k, seed=5)
    if format == "half":
        return ExpertWeights(format, dense.to(device, dtype))
    if format == "mxfp4":
        packed = [Mxfp4Weight.quantize(one) for one in dense * torch.logspace(-3, 3, k)]
        data, scale = torch.stack([w.data for w in packed]), torch.stack([w.scale for w in packed])
        return ExpertWeights(format, data.to(device), scale.to(device), rows=n)
    if format.startswith("int4"):
        packed = [Int4Weight.quantize(one, 32, symmetric=format == "int4") for one in dense]
        data, scale = torch.stack([w.data for w in packed]), torch.stack([w.scale for w in packed])
        zero = None if format == "int4" else torch.stack([w.zero for w in packed]).to(device)
        return ExpertWeights("int4", data.to(device), scale.to(device), rows=n, zero=zero)
    if format == "fp8_blocks":
        packed = [Fp8Blocks.quantize(one * torch.logspace(-1, 1, k), 128) for one in dense]
        data, scale = torch.stack([w.data for w in packed]), torch.stack([w.scale for w in packed])
        return ExpertWeights(format, data.to(device), scale.to(device))
    scale = dense.abs().amax(-1) / {"int8": 127, "fp8": 448}[format]
    scaled = dense / scale[..., None]
    data = scaled.round().to(torch.int8) if format == "int8" else scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return ExpertWeights(format, data.to(device), scale.to(device))


@settings(deadline=None, max_examples=30)
@given(
    data=st.data(),
    tokens=st.integers(0, 6),
    experts=st.integers(1, 70),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    with_bias=st.booleans(),
    ties=st.booleans(),
)
def test_the_router_chooses_as_a_stable_sort_does(device, data, tokens, experts, scoring, renormalize, with_bias, ties):
    top_k = data.draw(st.integers(1, min(experts, 8)))
    logits = random(tokens, experts).to(device)
    if ties:
        logits = logits.round()
    bias = random(experts, seed=1).to(device) if with_bias and not ties else None
    routing = route(logits, top_k, scoring=scoring, renormalize=renormalize, bias=bias)
    chosen, weights = route_reference(logits, top_k, scoring=scoring, renormalize=renormalize, bias=bias)
    assert torch.equal(routing.experts, chosen)
    assert torch.allclose(routing.weights, weights, rtol=1e-5, atol=1e-7)


@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(0, 20), experts=st.integers(1, 9), top_k=st.integers(1, 3))
def test_the_order_lists_every_slot_once_under_its_expert(device, tokens, experts, top_k):
    chosen = torch.randint(0, experts, (tokens, top_k), generator=torch.Generator().manual_seed(0)).int().to(device)
    order, offsets = expert_order(chosen, experts)
    assert sorted(order.tolist()) == list(range(tokens * top_k))
    for expert in range(experts):
        mine = order[offsets[expert] : offsets[expert + 1]].tolist()
        assert mine == [slot for slot, e in enumerate(chosen.flatten().tolist()) if e == expert]


@settings(deadline=None, max_examples=12)
@given(tokens=st.integers(1, 9), n=st.integers(1, 140), k=st.sampled_from([16, 128, 300]), shared_rows=st.booleans())
def test_experts_in_blocks_of_fp8_multiply_inputs_in_fp8(device, tokens, n, k, shared_rows):
    routing = route(random(tokens, 4).to(device), 2)
    weight = expert_weights("fp8_blocks", 4, n, k, torch.bfloat16, device)
    x = Fp8Blocks.quantize(random(tokens if shared_rows else 2 * tokens, k, seed=1).to(device), 1)
    config = Config({"BLOCK_N": 16, "BLOCK_M": 16})
    y = moe_linear(x, weight, routing, shared_rows=shared_rows, dtype=torch.bfloat16, config=config)
    reference = moe_linear_reference(x, weight, routing, shared_rows=shared_rows)
    share = FP8_SUMS if y.is_cuda else 2e-5
    assert torch.allclose(y.float(), reference, rtol=2**-7, atol=share * float(reference.abs().max() + 1))


@settings(deadline=None, max_examples=30)
@given(
    data=st.data(),
    format=st.sampled_from(["half", "int8", "fp8", "mxfp4", "int4", "int4 with zeros", "fp8_blocks"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    tokens=st.integers(0, 9),
    experts=st.integers(1, 5),
    n=st.integers(1, 40),
    k=st.sampled_from([1, 16, 33, 64]),
    shared_rows=st.booleans(),
)
def test_every_slot_gets_its_own_experts_product(device, data, format, dtype, tokens, experts, n, k, shared_rows):
    """Drawn experts, not routed ones: so some have all the slots, and some none."""
    top_k = 2
    dtype = torch.bfloat16 if format == "mxfp4" else dtype
    k = k if format in ("half", "int8", "fp8") else 5 * k if format == "fp8_blocks" else 32 * k
    slots = st.lists(st.integers(0, experts - 1), min_size=tokens * top_k, max_size=tokens * top_k)
    chosen = torch.tensor(data.draw(slots), dtype=torch.int32, device=device).view(tokens, top_k)
    weights = random(tokens, top_k, seed=3).to(device)
    routing = Routing(chosen, weights, *expert_order(chosen, experts))
    weight = expert_weights(format, experts, n, k, dtype, device)
    x = random(tokens if shared_rows else tokens * top_k, k, seed=1)
    x = (x / torch.logspace(-3, 3, k) if format == "mxfp4" else x).to(device, dtype)
    config = Config({"BLOCK_N": 16, "BLOCK_M": 16, "BLOCK_K": 64 if format == "mxfp4" else 32})
    y = moe_linear(x, weight, routing, shared_rows=shared_rows, config=config)
    if tokens:
        assert close(y, moe_linear_reference(x, weight, routing, shared_rows=shared_rows))
    combined = moe_combine(y, routing)
    exact = (y.float().view(tokens, top_k, n) * weights[..., None]).sum(1)
    assert torch.allclose(combined.float(), exact, rtol=ROUNDING[dtype], atol=1e-3)


def test_experts_in_mxfp4_are_multiplied_together_and_keep_their_bytes(device):
    kernels = TritonKernels(str(device))
    dense = random(4, 70, 96, seed=2)
    weights = [kernels.pack(one.to(device), "mxfp4") for one in dense]
    biases = [random(70, seed=i).to(device) for i in range(4)]
    together = kernels.grouped(weights, biases)
    assert together is not None and [w.nbytes for w in together.weights] == [w.nbytes for w in weights]
    assert together.together.expert_bytes == 70 * 96 * 4.25 / 8 + 70 * 4
    routing = route(random(3, 4).to(device), 2)
    x = random(3, 96, seed=1).to(device, torch.bfloat16)
    y = together(x, routing, shared_rows=True)
    for slot, expert in enumerate(routing.experts.flatten().tolist()):
        alone = kernels.linear(x[slot // 2 : slot // 2 + 1], weights[expert]).float() + biases[expert]
        assert torch.allclose(y[slot].float(), alone[0], atol=0.1, rtol=0.02)
    assert kernels.grouped([weights[0], kernels.pack(dense[1].to(device), "bf16")]) is None


def test_the_stored_configuration_routes_and_multiplies_the_same(device):
    logits = random(20, 6).to(device)
    routing = route(logits, 2)
    weight = expert_weights("half", 6, 70, 128, torch.bfloat16, device)
    x = random(20, 128, seed=1).to(device, torch.bfloat16)
    y = moe_linear(x, weight, routing, shared_rows=True)
    assert close(y, moe_linear_reference(x, weight, routing, shared_rows=True))


def test_only_experts_with_tokens_are_counted_as_read(device):
    chosen = torch.tensor([[0, 2], [2, 0], [2, 3]], dtype=torch.int32, device=device)
    routing = Routing(chosen, torch.ones(3, 2, device=device), *expert_order(chosen, 5))
    weight = expert_weights("int8", 5, 8, 16, torch.bfloat16, device)
    x = torch.zeros(3, 16, dtype=torch.bfloat16, device=device)
    assert moe_linear_bytes(x, weight, routing) == 3 * (8 * 16 + 8 * 4) + 3 * 16 * 2 + 6 * 8 * 2


def test_bad_arguments_are_named(device):
    logits = random(3, 4).to(device)
    with pytest.raises(ValueError, match=r"^top_k: is 5, should be 1 to 4"):
        route(logits, 5)
    routing = route(logits, 2)
    weight = expert_weights("half", 4, 8, 16, torch.bfloat16, device)
    x = random(3, 16).to(device, torch.bfloat16)
    with pytest.raises(ValueError, match=r"^x: has 3 rows, the routing is of 6"):
        moe_linear(x, weight, routing, shared_rows=False)
    with pytest.raises(ValueError, match=r"^weight\.data: dtype"):
        moe_linear(x.half(), weight, routing, shared_rows=True)
    with pytest.raises(ValueError, match=r"^routing\.offsets: shape is \[5\], should be \[4\]"):
        moe_linear(x, ExpertWeights("half", weight.data[:3].contiguous()), routing, shared_rows=True)
