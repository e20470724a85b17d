"""A mixture's experts together: chosen as the plain router does, each computing its rows as if it were alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from membound.kernels import routing  # noqa: E402
from membound.runtime.arithmetic import Routing  # noqa: E402

TOKENS = st.sampled_from([1, 2, 5, 40])
RULES = [
    Routing(),
    Routing(normalized=False, scale=0.5),
    Routing(scores="sigmoid", bias="selection", scale=2.5),
    Routing(scores="sigmoid", bias="selection", groups=4, group_top_k=2, group_score="best_two"),
    Routing(normalized=False, groups=4, group_top_k=3),
]


def chosen(kernels, tokens, experts, top_k, seed, rule=RULES[0]):
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return kernels.route(logits, top_k, rule)


@settings(deadline=None, max_examples=60)
@given(
    tokens=TOKENS, experts=st.sampled_from([8, 12, 64, 160]), top_k=st.integers(1, 2), rule=st.sampled_from(RULES),
    biased=st.booleans(), ties=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_tokens_go_where_the_plain_router_sends_them(cpp, tokens, experts, top_k, rule, biased, ties, seed):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=random)
    if ties:
        logits = logits.round()
    bias = torch.randn(experts, generator=random).round() if biased else None
    ours, plain = cpp.route(logits, top_k, rule, bias), routing.route(logits, top_k, rule, bias)
    if not ties or rule.group_score != "best_two":  # sums of equal parts are equal or not by their last bit
        assert torch.allclose(ours.weights, plain.weights, rtol=1e-5)
    assert torch.allclose(ours.probabilities, plain.probabilities, rtol=1e-5, atol=1e-9)
    order, offsets = routing.expert_order(ours.experts, experts)
    assert torch.equal(ours.order, order) and torch.equal(ours.offsets, offsets)
    if not ties:
        assert torch.equal(ours.experts, plain.experts)


@settings(deadline=None, max_examples=30)
@given(
    tokens=TOKENS, n=st.sampled_from([1, 17, 96]), k=st.sampled_from([32, 64]), biased=st.booleans(),
    format=st.sampled_from(["bf16", "int8", "int4", "fp32", "fp8"]), shared=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_an_expert_computes_its_rows_as_if_it_were_alone(cpp, tokens, n, k, biased, format, shared, seed):
    random = torch.Generator().manual_seed(seed)
    weights = [cpp.pack(torch.randn(n, k, generator=random), format) for _ in range(6)]
    biases = [torch.randn(n, generator=random) for _ in range(6)] if biased else None
    found = chosen(cpp, tokens, 6, 2, seed)
    x = torch.randn(tokens if shared else 2 * tokens, k, generator=random)
    y = cpp.grouped(weights, biases)(x, found, shared_rows=shared)
    for slot in range(2 * tokens):
        expert = int(found.experts.flatten()[slot])
        row = slot // 2 if shared else slot
        alone = cpp.linear(x[row : row + 1], weights[expert])[0]
        assert torch.equal(y[slot], alone if biases is None else alone + biases[expert])


@settings(deadline=None, max_examples=20)
@given(tokens=TOKENS, n=st.sampled_from([1, 17, 96]), top_k=st.integers(1, 6), seed=st.integers(0, 99))
def test_slots_are_added_by_their_weights_and_counted(cpp, tokens, n, top_k, seed):
    found = chosen(cpp, tokens, 9, top_k, seed)
    slots = torch.randn(tokens * top_k, n, generator=torch.Generator().manual_seed(seed))
    exact = (slots.double().unflatten(0, (tokens, top_k)) * found.weights.double()[..., None]).sum(1)
    assert torch.allclose(cpp.combine(slots, found).double(), exact, rtol=1e-4, atol=1e-5)
    counted, load, probability = torch.tensor(3), torch.ones(9, dtype=torch.int64), torch.zeros(9).double()
    cpp.count_routed(found, counted, load, probability)
    assert int(counted) == 3 + tokens
    assert torch.equal(load, 1 + found.experts.flatten().long().bincount(minlength=9))
    assert torch.allclose(probability, found.probabilities.double().sum(0))


def test_experts_of_another_width_are_refused(cpp):
    experts = cpp.grouped([cpp.pack(torch.ones(8, 32), "bf16")] * 2)
    with pytest.raises(ValueError, match="x has 16 columns, and the experts are 8 x 32"):
        experts(torch.ones(1, 16), chosen(cpp, 1, 2, 1, 0), shared_rows=True)
