"""Is a model's shape what its sources say: its matrices, its caches, its parameters, alone and shared by GPUs?"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.models import (
    DenseFfn,
    GatedFfn,
    GroupedQueryAttention,
    LatentAttention,
    LinearShape,
    Mamba2,
    ModelError,
    ModelSpec,
    MoeFfn,
    catalog,
    get_model,
)
from membound.roofline.models.spec import build

SMALL = {
    "name": "small",
    "layers": 12,
    "hidden": 64,
    "vocab": 100,
    "attention": {"kind": "gqa", "heads": 8, "kv_heads": 2, "head_dim": 16},
    "ffn": {"kind": "gated", "intermediate": 128},
    "tie_embeddings": True,
    "max_context": 1024,
    "source": "made up",
}


def size(shapes: tuple[LinearShape, ...]) -> int:
    return sum(n * k for _, n, k in shapes)


def test_parameters_are_counted_exactly() -> None:
    # counts of the checkpoints: q, k and v biases in the third; a mixture; layer norms with bias, learned positions
    assert get_model("SmolLM2-135M").params == 134_515_008
    assert get_model("Llama-3.1-8B").params == 8_030_261_248
    assert get_model("Qwen2.5-7B").params == 7_615_616_512
    assert get_model("Mixtral-8x7B").params == 46_702_792_704
    assert get_model("GPT-2").params == 124_439_808
    assert get_model("OPT-6.7B").params == 6_658_473_984
    assert get_model("BLOOM-176B").params == 176_247_271_424
    assert get_model("Nemotron-Nano-9B-v2").params == 8_888_227_328


def test_parameters_are_the_parts_that_are_named_apart() -> None:
    deepseek = get_model("DeepSeek-V3")
    assert deepseek.embedding_params == deepseek.lm_head_params == 129280 * 7168
    # the paper: 671B in all, 37B active, 14B in the drafting module, of which two shared tables of 0.93B
    assert deepseek.params / 1e9 == pytest.approx(671, rel=0.005)
    assert deepseek.active_params / 1e9 == pytest.approx(37, rel=0.02)
    assert (deepseek.mtp_params + 2 * deepseek.embedding_params) / 1e9 == pytest.approx(14, rel=0.05)
    assert get_model("SmolLM2-135M").lm_head_params == 0


def test_linears_are_fused_and_in_the_order_of_the_forward_pass() -> None:
    assert get_model("SmolLM2-135M").layer_linears() == (
        LinearShape("qkv", (9 + 2 * 3) * 64, 576),
        LinearShape("o", 576, 9 * 64),
        LinearShape("gate_up", 2 * 1536, 576),
        LinearShape("down", 576, 1536),
    )
    assert get_model("SmolLM2-135M").lm_head == LinearShape("lm_head", 49152, 576)


def test_heads_need_not_fill_the_hidden_size() -> None:
    qwen = get_model("Qwen3-32B")
    assert qwen.attention.heads * qwen.attention.head_dim == 8192 != qwen.hidden
    assert qwen.layer_linears()[1] == LinearShape("o", 5120, 8192)


def test_kv_bytes_are_the_known_figures() -> None:
    assert get_model("Llama-2-7B").kv_bytes_per_token(16) == 512 * 1024
    assert get_model("Llama-3.1-8B").kv_bytes_per_token(16) == 2 * 32 * 8 * 128 * 2
    assert get_model("Llama-3.1-8B").kv_bytes_per_token(4) == 32 * 8 * 128
    assert get_model("DeepSeek-V3").kv_bytes_per_token(16) == 70_272
    assert get_model("Jamba-v0.1").kv_bytes_per_token(16) == 16_384  # attention in 4 of 32 layers
    assert get_model("Mamba-2-2.7B").kv_bytes_per_token(16) == 0


def test_index_keys_keep_their_own_precision() -> None:
    sparse, dense = get_model("DeepSeek-V3.2"), get_model("DeepSeek-V3")
    for bits in (8, 16):  # 128 fp8 elements and an fp32 scale a layer
        assert sparse.kv_bytes_per_token(bits) - dense.kv_bytes_per_token(bits) == 61 * (128 + 4)


def test_a_state_does_not_grow_with_the_sequence() -> None:
    # 80 heads of 64 x 128 in 64 layers: 42 M elements, and three inputs of 5120 + 2 x 128 channels a convolution
    mamba = get_model("Mamba-2-2.7B")
    assert mamba.attention.state_elements * mamba.layers == 41_943_040
    assert mamba.state_bytes_per_sequence == 41_943_040 * 4 + 64 * 3 * (5120 + 256) * 2
    assert get_model("Llama-3.1-8B").state_bytes_per_sequence == 0
    assert get_model("RWKV-7-2.9B").attention.state_elements == 2560 * 64


@pytest.mark.parametrize("name", catalog())
def test_groups_and_the_stack_are_the_same_layers(name: str) -> None:
    spec = get_model(name)
    assert len(spec.stack) == sum(group.count for group in spec.groups()) == spec.layers
    assert Counter(spec.stack) == Counter({(group.attention, group.ffn): group.count for group in spec.groups()})


@pytest.mark.parametrize("name", catalog())
def test_shards_of_a_layer_sum_to_the_whole_but_for_what_every_gpu_holds(name: str) -> None:
    spec = get_model(name)
    for group in spec.groups():
        for tp in (2, 4, 8, 16):
            try:
                shard = group.attention.linears(spec.hidden, tp) + group.ffn.linears(spec.hidden, tp)
            except ModelError:
                continue  # heads that do not divide
            whole = group.attention.linears(spec.hidden) + group.ffn.linears(spec.hidden)
            assert [shape.name for shape in shard] == [shape.name for shape in whole]
            for part, all_of_it in zip(shard, whole, strict=True):
                copies = tp * part.n * part.k / (all_of_it.n * all_of_it.k)
                assert 1 <= copies <= tp
        if isinstance(group.ffn, MoeFfn):
            experts = [size(group.ffn.expert_linears(spec.hidden, tp)) * tp for tp in (1, 2)]
            assert experts[0] <= experts[1] <= experts[0] * 1.01


@given(kv_heads=st.sampled_from([1, 2, 4, 8]), groups=st.integers(1, 4), tp=st.sampled_from([1, 2, 4, 8]))
def test_gpus_share_kv_heads_and_copy_them_where_they_outnumber_them(kv_heads: int, groups: int, tp: int) -> None:
    attention = GroupedQueryAttention(heads=kv_heads * groups * 8, kv_heads=kv_heads, head_dim=64)
    held = tp * attention.kv_elements_on_gpu(tp)
    assert held == attention.kv_elements_per_token * max(1, tp // kv_heads)
    if tp <= kv_heads:
        assert tp * size(attention.linears(1024, tp)) == size(attention.linears(1024))


@given(heads=st.sampled_from([4, 8, 64]), head_dim=st.sampled_from([32, 64, 128]), hidden=st.integers(1, 100))
def test_as_many_kv_heads_as_heads_is_multi_head_attention(heads: int, head_dim: int, hidden: int) -> None:
    attention = GroupedQueryAttention(heads=heads, kv_heads=heads, head_dim=head_dim)
    assert size(attention.linears(hidden)) == 4 * hidden * heads * head_dim
    assert attention.kv_elements_per_token == 2 * heads * head_dim


@given(experts=st.integers(1, 64), width=st.integers(1, 512), hidden=st.integers(1, 512))
def test_all_experts_together_are_one_dense_network(experts: int, width: int, hidden: int) -> None:
    moe = MoeFfn(experts=experts, top_k=experts, intermediate=width)
    dense = GatedFfn(intermediate=experts * width)
    assert experts * size(moe.expert_linears(hidden)) == size(dense.linears(hidden))
    spec = ModelSpec(**SMALL | {"ffn": moe})
    assert spec.active_params == spec.params


def test_latent_attention_holds_the_same_matrices_absorbed_or_not() -> None:
    mla = LatentAttention(
        heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    kv_b = next(shape for shape in mla.linears(7168) if shape.name == "kv_b")
    assert kv_b.n * kv_b.k == 128 * size(mla.absorbed_linears())
    assert mla.kv_elements_on_gpu(8) == mla.kv_elements_per_token == 576  # every head reads the whole latent
    assert [shape.name for shape in mla.linears(7168, 8)] == ["q_a_kv_a", "q_b", "kv_b", "o"]
    assert mla.linears(7168, 8)[0] == mla.linears(7168)[0]


def test_windows_bound_what_is_seen_and_not_what_a_token_leaves() -> None:
    gemma = get_model("Gemma-3-27B")
    assert Counter(layer.attention.window for layer in gemma.stack) == {1024: 52, None: 10}
    assert [index for index, layer in enumerate(gemma.stack) if layer.attention.window is None][:2] == [5, 11]
    assert gemma.kv_bytes_per_token(16) == 62 * 2 * 16 * 128 * 2


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(":3", {0, 1, 2}), ("1::2", {1, 3, 5, 7, 9, 11}), ("-1:", {11}), ([0, 7], {0, 7}), ("5::6", {5, 11})],
)
def test_an_override_says_only_what_differs(layers: str | list[int], expected: set[int]) -> None:
    spec = build(**SMALL, overrides=[{"layers": layers, "attention": {"window": 256}}])
    assert {index for index, layer in enumerate(spec.stack) if layer.attention.window == 256} == expected
    assert {layer.attention.heads for layer in spec.stack} == {8}
    assert len(spec.groups()) == 2 and spec.ffn == GatedFfn(intermediate=128)


def test_a_model_survives_being_written_down() -> None:
    for name in ("Gemma-2-9B", "Jamba-v0.1", "Nemotron-Nano-9B-v2", "DeepSeek-V3"):
        spec = get_model(name)
        assert ModelSpec(**spec.model_dump(by_alias=True)) == spec


def test_what_differs_between_layers_is_named() -> None:
    with pytest.raises(ModelError, match=r"Gemma-2-9B has no single attention.*window is 4096 or None\."):
        _ = get_model("Gemma-2-9B").attention
    with pytest.raises(ModelError, match=r"Jamba-v0\.1 has no single attention.*kind is gqa or mamba1\."):
        _ = get_model("Jamba-v0.1").attention
    with pytest.raises(ModelError, match=r"DeepSeek-V3 has no single ffn.*kind is gated or moe\."):
        _ = get_model("DeepSeek-V3").ffn
    assert get_model("DeepSeek-V3").attention.kv_elements_per_token == 576


def test_gpus_that_cannot_share_heads_are_refused_in_one_sentence() -> None:
    attention = GroupedQueryAttention(heads=14, kv_heads=2, head_dim=64)
    with pytest.raises(ModelError, match=r"tp is 4, which does not divide heads 14"):
        attention.linears(896, 4)
    with pytest.raises(ModelError, match=r"tp is 0: .* must be 1 or more"):
        attention.linears(896, 0)
    with pytest.raises(ModelError, match=r"tp is 3, which does not divide heads 80"):
        Mamba2(heads=80, head_dim=64, d_state=128).linears(2560, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, ["layers", "0", "greater than 0"]),
        ({"attention": {"kind": "gqa", "heads": 0, "kv_heads": 2, "head_dim": 16}}, ["attention.gqa.heads", "0"]),
        ({"attention": {"kind": "gqa", "heads": 8, "kv_heads": 3, "head_dim": 16}}, ["heads 8", "kv_heads 3"]),
        ({"attention": {"kind": "spectral"}}, ["attention", "gqa", "mamba2"]),
        ({"ffn": {"kind": "moe", "experts": 4, "top_k": 8, "intermediate": 16}}, ["top_k 8", "experts 4"]),
        ({"overrides": [{"layers": "12:"}]}, ["'12:'", "12 layers"]),
        ({"overrides": [{"layers": "all"}]}, ["'all'", "slice"]),
        ({"overrides": [{"layers": [12]}]}, ["12 layers"]),
        ({"wheels": 4}, ["wheels", "4"]),
    ],
)
def test_a_model_that_makes_no_sense_is_refused_in_one_sentence(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ModelError) as refusal:
        build(**SMALL | change)
    message = str(refusal.value)
    assert all(word in message for word in [*words, "small"]), message
    assert message.endswith(".") and "\n" not in message


def test_dense_networks_have_two_matrices_and_biases_count() -> None:
    assert DenseFfn(intermediate=256).linears(64) == (LinearShape("up", 256, 64), LinearShape("down", 64, 256))
    without = build(**SMALL | {"ffn": {"kind": "dense", "intermediate": 256}})
    with_bias = build(**SMALL | {"ffn": {"kind": "dense", "intermediate": 256, "bias": True}})
    assert with_bias.params - without.params == 12 * (256 + 64)


def test_a_copy_is_checked_and_its_layers_are_its_own() -> None:
    spec = build(**SMALL)
    assert spec.model_copy(update={"layers": 2}).groups()[0].count == 2
    with pytest.raises(ValueError, match="vocab"):
        spec.model_copy(update={"vocab": 0})


def test_groups_are_found_in_microseconds() -> None:
    spec = get_model("Nemotron-3-Ultra-550B-A55B")

    def once_s() -> float:
        start_s = time.process_time()
        for _ in range(100):
            spec.groups()
        return (time.process_time() - start_s) / 100

    once_s()
    assert min(once_s() for _ in range(10)) < 50e-6


def test_importing_models_loads_neither_torch_nor_gguf() -> None:
    code = "import sys, membound.roofline.models; print(sorted({'torch', 'gguf'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
