"""Layers beyond dense attention run on their Triton kernels: a tiny decoder of each kind agrees with the plain one.

Tolerances, on logits of standard deviation 0.5 to 1.5: their root of the mean square may differ by 6 % of it. Both
sides round activations to bf16 here and there; Triton's interpreter cuts off where a GPU rounds.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels import recurrent, routing  # noqa: E402
from membound.kernels.base import Mamba2Vectors, RaggedBatch  # noqa: E402
from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.kernels.triton.latent_store import latent_store, latent_store_reference  # noqa: E402
from membound.kernels.triton.launch import launch as real_launch  # noqa: E402
from membound.kernels.triton.mla_prefill import mla_prefill  # noqa: E402
from membound.roofline.models import ModelSpec  # noqa: E402
from membound.roofline.techniques import W8A8, WeightQuantization, engine_setup  # noqa: E402
from membound.runtime.arithmetic import Arithmetic, Routing  # noqa: E402
from membound.runtime.blocks.states import SeatStates  # noqa: E402
from membound.runtime.decoder import Decoder  # noqa: E402
from membound.runtime.loading.weights import random_weights  # noqa: E402
from membound.runtime.quantization.recipes import RoundingRecipe  # noqa: E402
from membound.runtime.sampling import FusedSampler, GreedySampler, Guesses, LogitsError, sampler_for  # noqa: E402

BLOCK_SIZE = 8
TABLE = torch.tensor([[5, 2, 7], [1, 6, 0]], dtype=torch.int32)
# Two sequences in scattered blocks: prompts, a chunk beside a decode step, drafts, decode steps of both and of one.
STEPS = ([(0, 5), (0, 3)], [(5, 10), (3, 4)], [(10, 11), (4, 6)], [(11, 12), (6, 7)], [(12, 13)])
ATTENTION = {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 16}
GATED = {"kind": "gated", "intermediate": 48}
CHANNEL_MIX = {"kind": "channel_mix", "intermediate": 48, "receptance": False}
MLA = {
    "kind": "mla",
    "heads": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
}
MOE = {"kind": "moe", "experts": 6, "top_k": 2, "intermediate": 24}
DEEPSEEK = Routing(scores="sigmoid", bias="selection", groups=3, group_top_k=2, group_score="best_two", scale=1.5)
# What is other than in the dense model, and the kernels that each kind must reach.
KINDS = {
    "mla": ({"attention": MLA}, {"latent_store_kernel", "mla_decode_kernel"}),
    "moe": ({"ffn": MOE}, {"moe_routing_kernel", "moe_linear_kernel", "moe_combine_kernel"}),
    "moe like deepseek's": (
        {"ffn": MOE | {"shared_intermediate": 20}, "arithmetic": {"routing": DEEPSEEK}},
        {"moe_routing_kernel", "moe_linear_kernel", "moe_combine_kernel"},
    ),
    "mamba2": (
        {"attention": {"kind": "mamba2", "heads": 4, "head_dim": 16, "d_state": 8, "groups": 2}},
        {"short_conv_kernel", "mamba2_update_kernel"},
    ),
    "mamba1": (
        {"attention": {"kind": "mamba1", "d_inner": 64, "d_state": 8, "dt_rank": 4, "inner_norms": True}},
        {"short_conv_kernel", "mamba1_update_kernel"},
    ),
    "rwkv6": (
        {
            "attention": {"kind": "rwkv6", "heads": 2, "head_dim": 16, "shift_rank": 4, "decay_rank": 6},
            "ffn": CHANNEL_MIX | {"receptance": True},
            "norm": "layer",
        },
        {"rwkv_update_kernel"},
    ),
    "rwkv7": (
        {
            "attention": {
                "kind": "rwkv7",
                "heads": 2,
                "head_dim": 16,
                **dict.fromkeys(("decay_rank", "rate_rank", "value_rank", "gate_rank"), 4),
            },
            "ffn": CHANNEL_MIX,
            "norm": "layer",
            "embedding_norm": True,
            "layers": 2,
        },
        {"rwkv_update_kernel"},
    ),
    "gated delta net": (
        {
            "attention": {
                "kind": "gated_delta_net",
                "key_heads": 2,
                "value_heads": 4,
                "key_head_dim": 8,
                "value_head_dim": 12,
            }
        },
        {"short_conv_kernel", "rwkv_update_kernel"},
    ),
    "attention with sinks and a window": (
        {"attention": ATTENTION | {"sinks": True, "window": 6}},
        {"verify_attention_kernel", "decode_attention_kernel"},
    ),
    "capped scores": (
        {"arithmetic": {"attention_softcap": 2.0}},
        {"verify_attention_kernel", "decode_attention_kernel"},
    ),
    "dense": (
        {},
        {"rope_store_kernel", "rms_norm_kernel", "silu_mul_kernel", "decode_attention_kernel"},
    ),
}


class ExactKernels(TorchKernels):
    """The plain kernels with nothing rounded to bf16 but the weights."""

    kv_dtype = torch.float32


def batch_of(parts, device, table=TABLE):
    """Tokens `start` to `end` of each sequence in turn; the seats are not in their order."""
    positions = [torch.arange(start, end) for start, end in parts]
    slots = [table[i, p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE for i, p in enumerate(positions)]
    starts = torch.tensor([0] + [end - start for start, end in parts]).cumsum(0).int()
    return RaggedBatch(
        torch.cat(positions),
        torch.cat(slots),
        starts,
        torch.tensor([end for _, end in parts], dtype=torch.int32),
        table[: len(parts)],
        max(end - start for start, end in parts),
        torch.tensor([2, 0, 1][: len(parts)]),
    ).to(device)


def all_logits(decoder):
    """Logits of every token of the steps, one after the other on the same cache, whose states hold other numbers."""
    ids = torch.arange(3, 23) % decoder.spec.vocab, torch.arange(90, 110) % decoder.spec.vocab
    kv = decoder.new_cache(8, BLOCK_SIZE, seats=3)
    for layer in kv:
        if isinstance(layer, SeatStates):
            for part in layer.parts.values():
                part.fill_(3.0)
    found = []
    for parts in STEPS:
        tokens = torch.cat([ids[i][start:end] for i, (start, end) in enumerate(parts)]).to(decoder.device)
        batch = batch_of(parts, decoder.device)
        found.append(decoder.forward(tokens, batch, kv, torch.arange(len(tokens), device=decoder.device)).cpu())
    return torch.cat(found)


@pytest.fixture(scope="module")
def kernels(device):
    return TritonKernels(device.type)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched."""
    names = set()

    def listing(kernel, *arguments, **options):
        names.add(kernel.__name__)
        return real_launch(kernel, *arguments, **options)

    for name in (
        "decode_attention", "latent_store", "mamba1_update", "mamba2_update", "mla_decode", "moe_linear",
        "moe_routing", "prefill_attention", "rms_norm", "rope_store", "rwkv_update", "short_conv", "silu_mul",
        "verify_attention",
    ):  # fmt: skip
        monkeypatch.setattr(f"membound.kernels.triton.{name}.launch", listing)
    return names


def tiny(**changes):
    dense = {
        "name": "tiny",
        "layers": 1,
        "hidden": 32,
        "vocab": 64,
        "attention": ATTENTION,
        "ffn": GATED,
        "tie_embeddings": True,
        "max_context": 256,
        "source": "a test",
    }
    return ModelSpec(**dense | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_of_every_kind_computes_on_its_kernels_what_the_plain_one_does(kind, kernels, device, launched):
    changes, wanted = KINDS[kind]
    changes = dict(changes)
    choices = changes.pop("arithmetic", {})
    spec = tiny(**changes)
    weights = random_weights(spec, 3, arithmetic=Arithmetic.typical(spec).model_copy(update=choices))
    fast = all_logits(Decoder(spec, weights.to(device), kernels, "bf16"))
    exact = all_logits(Decoder(spec, weights, ExactKernels(), "bf16"))
    assert wanted <= launched
    assert (fast - exact).square().mean().sqrt() < 0.06 * exact.std()


def test_grouped_experts_share_their_memory_with_each_expert(kernels, device):
    spec = tiny(ffn=MOE)
    for format in ("bf16", "int8", "fp8"):
        decoder = Decoder(spec, random_weights(spec, 3).to(device), kernels, format)
        before = decoder.weight_bytes
        mixture = decoder.blocks[0].ffn
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        together = mixture(x)
        held = mixture.experts[3].gate_up.weight
        assert held.data.data_ptr() == mixture.together.first.together.data[3].data_ptr()
        assert decoder.weight_bytes == before
        apart = mixture._one_by_one(x, x, mixture.router(x))
        assert (together.float() - apart.float()).abs().max() < 0.03 * apart.float().abs().max()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    "technique",
    [WeightQuantization(format="int4_g64"), WeightQuantization(format="fp8_block"), W8A8(format="fp8_block")],
    ids=lambda one: f"{one.name} {one.format}",
)
def test_experts_in_groups_and_blocks_are_one_launch_that_multiplies_as_each(kernels, device, technique, tokens):
    spec = tiny(hidden=128, ffn=MOE | {"intermediate": 64})
    recipe = RoundingRecipe(kernels, engine_setup((technique,)).precision)
    recipe.layers = 1
    decoder = Decoder(spec, random_weights(spec, 3).to(device), kernels, recipe)
    before, mixture = decoder.weight_bytes, decoder.blocks[0].ffn
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    together = mixture(x)
    assert mixture.together is not None and decoder.graph_problem is None and not decoder.emulated
    assert decoder.weight_bytes == before
    apart = mixture._one_by_one(x, x, mixture.router(x))
    assert (together.float() - apart.float()).abs().max() < 0.03 * apart.float().abs().max()


def test_prompts_longer_than_drafts_attend_to_unpacked_latents_together(kernels, device, monkeypatch):
    """Three prompts, of which two are long and one is in between, in groups of up to 30 tokens."""
    spec = tiny(attention=MLA)
    weights, calls = random_weights(spec, 3), []
    monkeypatch.setattr("membound.kernels.gpu.mla_prefill", lambda *given: calls.append(given) or mla_prefill(*given))
    monkeypatch.setattr("membound.runtime.blocks.latent.MOST_UNPACKED", 30)
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    found = []
    for set_, where in ((kernels, device), (ExactKernels(), torch.device("cpu"))):
        decoder = Decoder(spec, weights.to(where), set_, "bf16")
        kv = decoder.new_cache(12, BLOCK_SIZE)
        batch = batch_of([(0, 20), (0, 3), (0, 18)], where, table)
        ids = (torch.arange(41) * 7 % 64).to(where)
        found.append(decoder.forward(ids, batch, kv, torch.arange(41, device=where)).cpu())
    assert [len(given[0]) for given in calls] == [20, 18]
    assert (found[0] - found[1]).square().mean().sqrt() < 0.06 * found[1].std()


def test_a_scale_of_a_whole_step_keeps_padding_out_of_captured_steps(kernels, device):
    spec = tiny()
    for format, ignores in (("fp8_row", True), ("fp8", False)):
        recipe = RoundingRecipe(kernels, engine_setup((W8A8(format=format),)).precision)
        recipe.layers = 1
        assert Decoder(spec, random_weights(spec, 3).to(device), kernels, recipe).ignores_padding is ignores


def test_what_the_kernels_cannot_group_is_computed_expert_by_expert(kernels, device):
    spec = tiny(ffn=MOE | {"intermediate": 32})
    decoder = Decoder(spec, random_weights(spec, 3).to(device), kernels, "int3")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    mixture = decoder.blocks[0].ffn
    assert mixture(x).isfinite().all() and mixture.together is None
    assert decoder.graph_problem == "which experts a step reads is decided on the host"


RULES = st.builds(
    lambda scores, normalized, bias, groups, score: Routing(
        scores=scores, normalized=normalized, bias=bias, scale=2.5, group_score=score, **groups
    ),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.sampled_from(["logits", "selection"]),
    st.sampled_from([{}, {"groups": 4, "group_top_k": 2}, {"groups": 2, "group_top_k": 1}]),
    st.sampled_from(["best", "best_two"]),
)


@settings(deadline=None, max_examples=30)
@given(rule=RULES, tokens=st.integers(1, 5), top_k=st.integers(1, 4), biased=st.booleans())
def test_the_router_chooses_and_weighs_as_the_plain_one(kernels, device, rule, tokens, top_k, biased):
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, 12, generator=generator).to(device)
    bias = torch.randn(12, generator=generator).to(device) if biased else None
    found, plain = kernels.route(logits, top_k, rule, bias), routing.route(logits, top_k, rule, bias)
    for name in ("experts", "order", "offsets"):
        assert torch.equal(getattr(found, name), getattr(plain, name))
    assert torch.allclose(found.weights, plain.weights, atol=1e-5)
    assert torch.allclose(found.probabilities, plain.probabilities, atol=1e-6)


def ragged(new, started):
    """Sequences that bring `new` tokens each; those in `started` have some before."""
    return batch_of(
        [(4 * (i in started), 4 * (i in started) + count) for i, count in enumerate(new)],
        torch.device("cpu"),
        TABLE.repeat(2, 1),
    )


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scans(tokens):
    """Each recurrence by name: its state's shape and its other arguments."""
    r, v = normal(tokens, 2, 6, seed=1), normal(tokens, 2, 10, seed=2)
    w, k, a, b = (torch.sigmoid(normal(tokens, 2, 6, seed=seed)) for seed in (3, 4, 5, 6))
    of_heads, of_channels = (normal(4, seed=seed) for seed in (1, 2, 3)), normal(20, 8, seed=6)
    dt_bias, rate, d = of_heads
    wide = normal(tokens, 40, seed=9)  # whose parts have gaps between tokens
    x, z = normal(tokens, 4, 5, seed=1), normal(tokens, 4, 5, seed=2)
    keys, queries = (part.unflatten(1, (2, 8)) for part in wide[:, :32].chunk(2, dim=1))
    return {
        "causal_convolution": ((3, 20), (wide[:, :20], normal(20, 4, seed=1), normal(20, seed=2))),
        "mamba2_scan": (
            (4, 5, 8),
            (x, normal(tokens, 4, seed=3), keys, queries, z, Mamba2Vectors(dt_bias, -rate.abs(), d)),
        ),
        "mamba1_scan": (
            (20, 8),
            (
                wide[:, :20],
                wide[:, 20:].abs(),
                *(normal(tokens, 8, seed=seed) for seed in (4, 5)),
                wide[:, 10:30],
                -of_channels.abs(),
                normal(20, seed=7),
            ),
        ),
        "rwkv6_scan": ((2, 6, 10), (r, w, k, v, normal(2, 6, seed=8))),
        "delta_scan": ((2, 6, 10), (r, w, k, v, -a / 3, b / 3)),
    }


@settings(deadline=None, max_examples=12)
@given(
    new=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    started=st.sets(st.integers(0, 2)),
    name=st.sampled_from(["causal_convolution", "mamba2_scan", "mamba1_scan", "rwkv6_scan", "delta_scan"]),
)
def test_every_recurrence_takes_a_ragged_batch_as_the_plain_one(kernels, device, new, started, name):
    """States of sequences that begin hold what others left, and no other seat's state changes."""
    batch = ragged(new, started)
    shape, arguments = scans(sum(new))[name]
    state = normal(4, *shape, seed=7)
    plain, found = state.clone(), state.clone().to(device)
    expected = getattr(recurrent, name)(plain, *arguments, batch)
    moved = [_to(argument, device) for argument in arguments]
    y = getattr(kernels, name)(found, *moved, batch.to(device))
    assert torch.allclose(y.cpu(), expected, atol=1e-4, rtol=1e-4)
    assert torch.allclose(found.cpu(), plain, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[3].cpu(), state[3])


def _to(argument, device):
    if isinstance(argument, Mamba2Vectors):
        return Mamba2Vectors(*(part.to(device) for part in vars(argument).values()))
    return argument.to(device)


@settings(deadline=None, max_examples=15)
@given(
    tokens=st.integers(1, 5),
    heads=st.sampled_from([1, 3, 20]),
    sizes=st.sampled_from([(32, 16, 8), (20, 6, 0), (64, 64, 12)]),
)
def test_latents_are_normed_turned_and_stored_and_q_is_turned(device, tokens, heads, sizes):
    rank, rope, nope = sizes
    q = normal(tokens, heads, nope + rope, seed=1).bfloat16().to(device)
    latents = normal(tokens, rank + rope + 5, seed=2).bfloat16().to(device)[:, : rank + rope]
    norm, angles = normal(rank, seed=3).to(device), normal(9, rope // 2, seed=4).to(device)
    positions = torch.arange(tokens, device=device) + 3
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(tokens))[:tokens].to(device)
    slots[tokens // 2] = -1
    cache = torch.zeros(3, 4, rank + rope, dtype=torch.bfloat16, device=device)
    plain_q, plain = q.clone(), cache.clone()
    where = latents, norm, 1e-6, angles.cos(), angles.sin(), positions, slots
    latent_store(q, *where, cache)
    latent_store_reference(plain_q, *where, plain)
    assert torch.allclose(q.float(), plain_q.float(), atol=0.03, rtol=0.02)
    assert torch.allclose(cache.float(), plain.float(), atol=0.03, rtol=0.02)
    assert torch.equal(cache == 0, plain == 0)


def test_a_latent_store_names_what_does_not_fit(device):
    q, latents = (torch.zeros(2, *shape, dtype=torch.bfloat16, device=device) for shape in ((1, 8), (20,)))
    norm, table = torch.ones(16, device=device), torch.zeros(4, 2, device=device)
    places = torch.zeros(2, dtype=torch.int64, device=device)
    cache = torch.zeros(2, 4, 20, dtype=torch.bfloat16, device=device)
    good = dict(
        q=q, latents=latents, norm=norm, eps=1e-6, cos=table, sin=table, positions=places, slots=places, cache=cache
    )
    wrong = {
        "q": q.float(),
        "latents": latents[:, 1:],
        "norm": norm.long(),
        "cos": table.double(),
        "sin": table[:1],
        "positions": places.int(),
        "slots": places[:1],
        "cache": cache[..., 1:],
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"^{name}: "):
            latent_store(**{**good, name: value})


def test_a_run_samples_on_the_kernels_and_keeps_the_distribution(kernels, device):
    """Certain and drawn guesses beside sequences without; Leviathan et al., ICML 2023, appendix A.1."""
    count, temperature = 25, 0.8
    row = torch.tensor([0.5, 1.5, -0.5, 1.0])
    logits = row.repeat(5 * count, 1).to(device)
    q = torch.softmax(torch.tensor([1.0, 0.0, 1.0, 0.5]), -1)
    drawn = torch.multinomial(q, count, replacement=True, generator=torch.Generator().manual_seed(1)).tolist()
    guesses = [
        *(Guesses((token,), drawn_from=q[None].to(device)) for token in drawn),
        *([Guesses((3,))] * count),
        *([Guesses()] * count),
    ]
    sampler = sampler_for(temperature, 5, device, kernels=kernels)
    assert isinstance(sampler, FusedSampler)
    verified = sampler.verify(logits, guesses)
    p = torch.softmax(row / temperature, -1)
    for part in range(3):
        tokens = [found.tokens[0] for found in verified[part * count : (part + 1) * count]]
        frequency = torch.bincount(torch.tensor(tokens), minlength=4) / count
        assert ((frequency - p).abs() < 4.5 * (p * (1 - p) / count).sqrt()).all()
    for found, guess in zip(verified, guesses, strict=True):
        accepted = len(found.tokens) - 1
        assert found.path == tuple(range(accepted)) and found.tokens[:accepted] == guess.tokens[:accepted]
    assert verified != sampler.verify(logits, guesses)


def test_a_cold_sampler_on_the_kernels_is_greedy_trees_are_left_to_the_host_and_nan_is_found(kernels, device):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).to(device)
    cold = sampler_for(1e-4, 0, device, kernels=kernels)
    chain = Guesses((int(logits[0].argmax()), 7))
    tree = Guesses((7, int(logits[0].argmax())), parents=(-1, -1))
    for guesses in ([Guesses()] * 6, [chain, chain], [tree, tree]):
        assert cold.verify(logits, guesses) == GreedySampler().verify(logits, guesses)
    logits[4, 3] = torch.nan
    with pytest.raises(LogitsError, match="row 4"):
        cold.verify(logits, [Guesses()] * 6)
    assert not isinstance(sampler_for(1.0, 0, "cpu", kernels=TorchKernels()), FusedSampler)


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1])
def test_a_sampler_on_the_kernels_takes_every_seed_and_a_step_that_emits_nothing(seed, kernels, device):
    sampler = sampler_for(1.0, seed, device, kernels=kernels)
    logits = torch.zeros(40, 50, device=device)
    assert sampler.verify(logits[:0], []) == []
    assert sampler.verify(logits, [Guesses()] * 40) != sampler.verify(logits, [Guesses()] * 40)
