"""Do models of any kind keep the laws that their parts promise?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.dispatch import kernels_for
from membound.kernels.reference import TorchKernels
from membound.roofline.models import ModelSpec, MoeFfn, get_model
from membound.roofline.models.catalog import catalog
from membound.roofline.models.layers import Layer
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.runtime.arithmetic import Arithmetic, Routing
from membound.runtime.blocks.routing import RouterStatistics, route
from membound.runtime.blocks.states import SeatStates
from membound.runtime.decoder import Decoder
from membound.runtime.loading.shapes import extra_shapes, matrix_shapes, vector_shapes
from membound.runtime.loading.weights import Weights, random_weights
from membound.runtime.plain import single_sequence
from membound.runtime.rope import FIRST_POSITIONS, RopeTables, rope_frequencies
from membound.runtime.supported import decoder_problem

_TINY: dict[str, Any] = {
    "name": "tiny",
    "layers": 2,
    "hidden": 32,
    "vocab": 64,
    "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8},
    "ffn": {"kind": "gated", "intermediate": 48},
    "tie_embeddings": True,
    "max_context": 256,
    "source": "a test",
}
_MLA = {
    "kind": "mla",
    "heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_MOE = {"kind": "moe", "experts": 6, "top_k": 2, "intermediate": 24}
_CHANNEL_MIX = {"kind": "channel_mix", "intermediate": 48, "receptance": False}
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": {"attention": {"kind": "mamba2", "heads": 4, "head_dim": 16, "d_state": 8, "groups": 2}},
    "mamba1": {"attention": {"kind": "mamba1", "d_inner": 64, "d_state": 8, "dt_rank": 4, "inner_norms": True}},
    "rwkv6": {
        "attention": {"kind": "rwkv6", "heads": 2, "head_dim": 16, "shift_rank": 4, "decay_rank": 6},
        "ffn": _CHANNEL_MIX | {"receptance": True},
        "norm": "layer",
    },
    "rwkv7": {
        "attention": {
            "kind": "rwkv7",
            "heads": 2,
            "head_dim": 16,
            **dict.fromkeys(("decay_rank", "rate_rank", "value_rank", "gate_rank"), 4),
        },
        "ffn": _CHANNEL_MIX,
        "norm": "layer",
        "embedding_norm": True,
    },
    "gated_delta_net": {
        "attention": {
            "kind": "gated_delta_net",
            "key_heads": 2,
            "value_heads": 4,
            "key_head_dim": 8,
            "value_head_dim": 12,
        }
    },
}


class ExactKernels(TorchKernels):
    """The plain kernels with nothing rounded to bf16."""

    kv_dtype = torch.float32


def tiny(**changes: Any) -> ModelSpec:
    return ModelSpec(**_TINY | changes)


def decoder_of(spec: ModelSpec, arithmetic: Arithmetic | None = None, **options: Any) -> Decoder:
    return Decoder(spec, random_weights(spec, 3, arithmetic=arithmetic), ExactKernels(), "fp32", **options)


def logits_of(decoder: Decoder, ids: list[int]) -> Tensor:
    """Logits [tokens, vocab] of one sequence at once."""
    batch = single_sequence(0, len(ids), 8, decoder.device)
    return decoder.forward(torch.tensor(ids), batch, decoder.new_cache(8, 16), torch.arange(len(ids)))


IDS = torch.randint(0, 64, (50,), generator=torch.Generator().manual_seed(0)).tolist()


def test_a_model_has_as_many_parameters_as_its_spec_counts() -> None:
    """Every model of the catalog that is computed; the shapes are counted, no weight is made."""
    for name, spec in catalog().items():
        if decoder_problem(spec):
            continue
        arithmetic = Arithmetic.typical(spec)

        def count(shapes: dict[str, tuple[int, ...]]) -> int:
            return sum(torch.Size(shape).numel() for shape in shapes.values())

        def of_layer(layer: Layer, spec: ModelSpec = spec, arithmetic: Arithmetic = arithmetic) -> int:
            return count(matrix_shapes(layer, spec.hidden)) + count(vector_shapes(spec, layer, arithmetic))

        layers = sum(group.count * of_layer(Layer(group.attention, group.ffn)) for group in spec.groups())
        tables = spec.vocab * spec.hidden * (1 if spec.tie_embeddings else 2)
        final_norm = 0 if spec.norm == "unscaled" else spec.hidden
        assert layers + tables + final_norm + count(extra_shapes(spec)) == spec.params, name


def test_linear_layers_have_the_names_and_shapes_of_the_roofline() -> None:
    spec = tiny(attention=_MLA, ffn=_MOE | {"shared_intermediate": 20, "shared_gate": True})
    decoder = decoder_of(spec)
    layer = spec.attention.linears(32) + spec.ffn.linears(32)
    experts = [(f"experts.{e}.{name}", n, k) for e in range(6) for name, n, k in spec.ffn.expert_linears(32)]
    expected = {f"layers.{i}.{name}": (n, k) for i in range(2) for name, n, k in [*layer, *experts]}
    assert {name: linear.shape for name, linear in decoder.linears()} == expected | {"lm_head": (64, 32)}


@pytest.mark.parametrize("rank", [12, None])
def test_absorbed_latent_attention_is_the_same_as_unpacked(rank: int | None) -> None:
    spec = tiny(attention=_MLA | {"q_lora_rank": rank})
    weights = random_weights(spec, 3)
    states = []
    for absorbed in (True, False):
        decoder = Decoder(spec, weights, ExactKernels(), "fp32", absorbed=absorbed)
        cache = decoder.new_cache(4, 16)
        decoder.forward(torch.tensor(IDS[:20]), single_sequence(0, 20, 4, decoder.device), cache, torch.tensor([0]))
        states.append(
            decoder.forward(
                torch.tensor(IDS[20:21]), single_sequence(20, 21, 4, decoder.device), cache, torch.tensor([0])
            )
        )
    torch.testing.assert_close(*states, rtol=0, atol=1e-4)


def test_this_machines_kernels_attend_to_latents_as_wide_as_deepseeks() -> None:
    """512 elements of latent and 64 that turn; K and V are rounded to bf16."""
    wide = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    spec = tiny(attention=_MLA | wide)
    weights = random_weights(spec, 3)
    ours, theirs = (Decoder(spec, weights, kernels, "bf16") for kernels in (kernels_for("cpu"), ExactKernels()))
    got, expected = [], []
    for decoder, found in ((ours, got), (theirs, expected)):
        cache = decoder.new_cache(2, 16)
        for start, end in ((0, 20), (20, 21), (21, 25)):
            batch = single_sequence(start, end, 2, decoder.device)
            found.append(decoder.forward(torch.tensor(IDS[start:end]), batch, cache, torch.arange(end - start)))
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), rtol=0, atol=0.1)


def test_a_latent_cache_keeps_one_vector_a_token() -> None:
    cache = decoder_of(tiny(attention=_MLA)).new_cache(5, 16)
    assert [layer.nbytes for layer in cache] == [5 * 16 * (16 + 4) * 4] * 2


def test_blocks_of_latents_carry_a_sequence_with_them() -> None:
    decoder = decoder_of(tiny(attention=_MLA))
    here, there = decoder.new_cache(2, 16), decoder.new_cache(2, 16)
    decoder.forward(torch.tensor(IDS[:20]), single_sequence(0, 20, 2, decoder.device), here, torch.tensor([0]))
    for source, target in zip(here, there, strict=True):
        target.write_blocks([0, 1], source.read_blocks([0, 1]))
    step = torch.tensor(IDS[20:21]), single_sequence(20, 21, 2, decoder.device)
    torch.testing.assert_close(
        decoder.forward(*step, there, torch.tensor([0])), decoder.forward(*step, here, torch.tensor([0]))
    )


def test_a_window_changes_nothing_below_it_and_something_beyond() -> None:
    def windowed(window: int | None) -> Tensor:
        return logits_of(decoder_of(tiny(attention=_TINY["attention"] | {"window": window})), IDS)

    full, short = windowed(None), windowed(10)
    torch.testing.assert_close(windowed(50), full)
    torch.testing.assert_close(short[:10], full[:10], rtol=0, atol=1e-5)
    assert (short[11:] - full[11:]).abs().amax(1).min() > 1e-3


def test_narrow_values_are_those_of_wide_ones_that_end_in_zeros() -> None:
    narrow = tiny(attention=_TINY["attention"] | {"v_head_dim": 4})
    wide = tiny()
    weights = random_weights(narrow, 3)

    def widened(layer: dict[str, Tensor]) -> dict[str, Tensor]:
        v = torch.zeros(2, 8, 32, dtype=torch.bfloat16)
        v[:, :4] = layer["qkv"][-2 * 4 :].unflatten(0, (2, 4))
        o = torch.zeros(32, 4, 8, dtype=torch.bfloat16)
        o[..., :4] = layer["o"].unflatten(1, (4, 4))
        return layer | {"qkv": torch.cat([layer["qkv"][: -2 * 4], v.flatten(0, 1)]), "o": o.flatten(1)}

    same = Weights(**vars(weights) | {"layers": tuple(map(widened, weights.layers))})
    ours, theirs = (Decoder(spec, w, ExactKernels(), "fp32") for spec, w in ((narrow, weights), (wide, same)))
    torch.testing.assert_close(logits_of(ours, IDS), logits_of(theirs, IDS), rtol=0, atol=1e-4)


def test_a_mixture_is_the_weighted_sum_of_its_experts() -> None:
    decoder = decoder_of(tiny(ffn=_MOE | {"shared_intermediate": 20}))
    mixture = decoder.blocks[0].ffn
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    scores = mixture.router(x).softmax(-1)
    kept = scores.masked_fill(scores < scores.topk(2).values[:, -1:], 0)
    shares = kept / kept.sum(-1, keepdim=True)  # [tokens, experts]
    expected = sum(shares[:, e : e + 1] * expert(x) for e, expert in enumerate(mixture.experts)) + mixture.shared(x)
    torch.testing.assert_close(mixture(x), expected, rtol=0, atol=1e-5)


def test_router_statistics_count_every_slot_of_a_run() -> None:
    decoder = decoder_of(tiny(ffn=_MOE))
    assert decoder.router_statistics.keys() == {0, 1}
    logits_of(decoder, IDS)
    for statistics in decoder.router_statistics.values():
        assert statistics.tokens == 50 and statistics.load.sum() == 50 * 2
        assert statistics.probability.sum().item() == pytest.approx(50)
        assert 1 <= statistics.busiest <= 6
        statistics.reset()
        assert statistics.tokens == 0 and statistics.busiest == statistics.auxiliary_loss == 1


def test_the_auxiliary_loss_is_one_for_even_and_the_number_of_experts_for_one_expert() -> None:
    for logits, expected in ((torch.eye(4).repeat(8, 1) * 30, 1.0), (torch.eye(4)[:1].repeat(8, 1) * 30, 4.0)):
        statistics = RouterStatistics(4, torch.device("cpu"))
        statistics.add(route(logits, 1, Routing()))
        assert statistics.auxiliary_loss == pytest.approx(expected, rel=1e-6)
        assert statistics.busiest == expected


@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from(["softmax", "sigmoid"]), st.booleans())
@settings(max_examples=30)
def test_a_token_goes_to_top_k_experts_of_its_best_groups(tokens: int, top_k: int, scores: Any, biased: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, 8, generator=generator)
    bias = torch.randn(8, generator=generator) if biased else None
    rule = Routing(scores=scores, bias="selection", groups=4, group_top_k=2, group_score="best_two", scale=2.5)
    routed = route(logits, top_k, rule, bias)
    assert routed.counts.sum() == tokens * top_k
    assert torch.bincount(routed.tokens, minlength=tokens).tolist() == [top_k] * tokens
    sums = torch.zeros(tokens).index_add_(0, routed.tokens, routed.weights)
    torch.testing.assert_close(sums, torch.full((tokens,), 2.5))
    experts = torch.arange(8).repeat_interleave(routed.counts)
    for token in range(tokens):
        assert len(set((experts[routed.tokens == token] // 2).tolist())) <= 2


def test_a_selection_bias_changes_the_choice_but_not_the_weights() -> None:
    logits, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 0.0, 9.0])
    plain = Routing(scores="sigmoid", bias="selection", normalized=False)
    routed = route(logits, 2, plain, bias)
    assert routed.counts.tolist() == [1, 0, 0, 1]
    torch.testing.assert_close(routed.weights, logits[0, [0, 3]].sigmoid())


@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_with_expert_choice_every_expert_takes_equally_many_tokens(tokens: int) -> None:
    logits = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(1))
    routed = route(logits, 2, Routing(), by_expert=True)
    assert routed.counts.tolist() == [-(-tokens * 2 // 6)] * 6
    decoder = decoder_of(tiny(ffn=_MOE | {"choice": "expert"}))
    assert logits_of(decoder, IDS).isfinite().all()
    assert decoder.router_statistics[0].busiest == 1


def test_the_roofline_counts_the_experts_that_choose() -> None:
    """Every expert is read whatever the step, and computes what the runtime has it compute."""
    chosen, choosing = (tiny(ffn=_MOE | {"choice": choice}) for choice in ("token", "expert"))
    for tokens in (1, 5, 30):
        one, other = (
            next(op for op in step_operators(spec, EngineSetup(), StepShape.decode(tokens, 9)) if op.kind == "moe")
            for spec in (chosen, choosing)
        )
        assert other.experts and one.experts
        assert other.experts.active == 6 and other.experts.pairs == 6 * -(-tokens * 2 // 6)
        assert other.weight_bytes >= one.weight_bytes


def test_a_single_token_reads_all_weights_but_those_of_idle_experts() -> None:
    spec = tiny(ffn=_MOE)
    decoder = decoder_of(spec)
    of_expert = 4 * sum(n * k for _, n, k in spec.ffn.expert_linears(32))
    assert decoder.idle_bytes == 2 * (6 - 2) * of_expert
    assert decoder.weight_bytes == 4 * spec.params


@pytest.mark.parametrize("kind", RECURRENT)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5))
@settings(max_examples=3)
def test_a_recurrent_layer_takes_a_sequence_in_any_pieces(kind: str, lengths: list[int]) -> None:
    """In pieces of any length, beside a second sequence, in a seat that another had before."""
    decoder = decoder_of(tiny(**RECURRENT[kind]))
    ids = (IDS * 4)[: sum(lengths)]
    whole = logits_of(decoder, ids)
    cache = decoder.new_cache(1, 16, seats=2)
    for layer in cache:
        assert isinstance(layer, SeatStates)
        for part in layer.parts.values():
            part.fill_(torch.nan)
    got, start = [], 0
    for length in lengths:
        end = start + length
        batch = RaggedBatch(
            positions=torch.tensor([*range(start, end), *range(start, end)]),
            slots=torch.zeros(2 * length, dtype=torch.int64),
            query_start=torch.tensor([0, length, 2 * length], dtype=torch.int32),
            context_len=torch.tensor([end, end], dtype=torch.int32),
            block_table=torch.zeros(2, 1, dtype=torch.int32),
            most_queries=length,
            seats=torch.tensor([1, 0]),
        )
        tokens = torch.tensor(ids[start:end] + ids[start:end][::-1])
        got.append(decoder.forward(tokens, batch, cache, torch.arange(length)))
        start = end
    torch.testing.assert_close(torch.cat(got), whole, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "name",
    [
        "Jamba-v0.1",
        "Nemotron-3-Nano-30B-A3B",
        "Nemotron-3-Super-120B-A12B",
        "Qwen3-Next-80B-A3B",
        "GPT-2",
        "OPT-125M",
        "BLOOM-560M",
        "GPT-J-6B",
        "GPT-NeoX-20B",
        "MiMo-V2-Flash",
        "Llama-4-Scout-17B-16E",
        "Grok-1",
        "Phi-3.5-MoE",
        "Llama-3.3-Nemotron-Super-49B",
    ],
)
def test_the_kinds_of_layers_of_the_catalog_give_finite_logits(name: str) -> None:
    """One layer of each kind that a model has, narrower and with few experts and a small vocabulary."""
    spec = get_model(name)
    fewer = []
    for group in spec.groups()[:4]:
        ffn = group.ffn
        if isinstance(ffn, MoeFfn):
            shared = 64 if ffn.shared_intermediate else 0
            narrow = {"experts": 4, "top_k": 2, "intermediate": 64, "shared_intermediate": shared}
            ffn = ffn.model_copy(update=narrow)
        elif ffn.kind != "none":
            ffn = ffn.model_copy(update={"intermediate": 64})
        fewer.append((group.attention, ffn))
    overrides = [{"layers": (i,), "attention": attention, "ffn": ffn} for i, (attention, ffn) in enumerate(fewer)]
    small = {"vocab": 64, "hidden": 128, "layers": len(fewer), "overrides": overrides}
    spec = spec.model_copy(update=small)
    logits = logits_of(Decoder(spec, random_weights(spec, 0), ExactKernels(), "bf16"), IDS[:20])
    assert logits.isfinite().all() and 0.1 < logits.std() < 10


def test_tables_of_positions_grow_with_the_cache_and_no_further_than_the_model() -> None:
    tables = RopeTables(rope_frequencies(10000.0, 8), most=FIRST_POSITIONS + 100)
    first = tables.cos.clone()
    tables.reach(FIRST_POSITIONS + 64)
    assert len(tables.cos) == len(tables.sin) == FIRST_POSITIONS + 64
    torch.testing.assert_close(tables.cos[:FIRST_POSITIONS], first)
    tables.reach(10**9)
    assert len(tables.cos) == FIRST_POSITIONS + 100
