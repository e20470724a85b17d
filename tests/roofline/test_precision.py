"""Do formats take the bytes that are published, and is every name of the tables understood?"""

from __future__ import annotations

import csv
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware, parse_hardware
from membound.roofline.precision import GGML_BLOCKS, GGML_MIXES, PRECISIONS, get_precision, integer, sparse24
from membound.roofline.precision.names import parse_plan, parse_precision
from membound.roofline.precision.plan import PARTS, PrecisionPlan, compute_dtype, plan_of

FACTS = Path(__file__).parents[3] / "shared" / "facts"
SIZES = st.integers(1, 40).map(lambda i: 256 * i)

# facts/roofline-notes.md 4.2: bits of an element with its metadata
PUBLISHED_BITS = {
    "int4_g128": 4.125,
    "int4_g128_zero": 4.156,
    "int4_g32": 4.5,
    "int4_g32_zero": 4.625,
    "nf4": 4.5,
    "nf4_dq": 4.127,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
    "fp8_block": 8.002,
    "fp8_g128": 8.25,
    "q4_0": 4.5,
    "q4_k": 4.5,
    "q5_k": 5.5,
    "q6_k": 6.5625,
    "q8_0": 8.5,
    "int4_g32_zero16": 5.0,
    "kivi2": 3.0,
    "fp16_sparse24": 9.0,
    "fp8_sparse24": 5.0,
    "int8_sparse24": 5.0,
}


@pytest.mark.parametrize(("name", "bits"), PUBLISHED_BITS.items())
def test_a_format_takes_its_published_bits(name: str, bits: float) -> None:
    assert get_precision(name).bits == pytest.approx(bits, abs=1e-3)


def test_a_row_scale_is_counted_once_a_row() -> None:
    """roofline-notes 4.2: int8 per channel 8 + 16/k bits, int8 per token and head 8 + 16/d."""
    assert integer(8).matrix_bytes(1, 4096) * 8 / 4096 == pytest.approx(8 + 16 / 4096)
    assert get_precision("int8_head").cache_bytes(1, 1, 128) * 8 / 128 == pytest.approx(8 + 16 / 128)


@pytest.mark.parametrize("name", GGML_BLOCKS)
def test_blocks_take_the_bytes_that_the_gguf_package_gives_them(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert get_precision(name).matrix_bytes(7, 4 * 256) == pytest.approx(7 * 4 * 256 / block * block_bytes)


@pytest.mark.parametrize("name", sorted(GGML_MIXES.keys() - {"q3_k_m"}))
def test_a_mix_takes_the_file_that_llama_cpp_publishes(name: str) -> None:
    """llama.cpp tools/quantize/README.md, Llama-3.1-8B: GiB of the file, which has 8 MB of vocabulary beside it."""
    gib = {"q2_k_s": 2.78, "q2_k_m": 2.95, "q3_k_s": 3.41, "q3_k_l": 4.02, "q4_k_s": 4.36, "q4_k_m": 4.58}
    gib |= {"q5_k_s": 5.21, "q5_k_m": 5.33}
    plan = plan_of(name)
    table, layers = 128_256 * 4096, 8_030_261_248 - 2 * 128_256 * 4096
    parts = {"lm_head": table, "embedding": table, "ffn": layers}
    total = sum(plan.weights_of(part).vector_bytes(elements) for part, elements in parts.items())
    assert total / 2**30 == pytest.approx(gib[name], rel=0.003)


def test_mixes_take_the_published_bits_of_a_model_that_they_were_not_made_of() -> None:
    """llama.cpp's older table of Llama-2-7B (6.738 B parameters, tables of 32000 x 4096): bits per weight."""
    published = {"q3_k_m": 3.91, "q3_k_l": 4.27, "q4_k_s": 4.58, "q4_k_m": 4.84, "q5_k_s": 5.52, "q5_k_m": 5.68}
    table, params = 32_000 * 4096, 6_738_415_616
    for name, bits in published.items():
        plan = plan_of(name)
        parts = {"lm_head": table, "embedding": table, "ffn": params - 2 * table}
        total = sum(plan.weights_of(part).bits * elements for part, elements in parts.items())
        assert total / params == pytest.approx(bits, rel=0.012)


@pytest.mark.parametrize(("mix", "block"), [("q3_k_s", "q3_k"), ("q5_k_s", "q5_k")])
def test_the_layers_of_a_pure_mix_have_the_bits_of_its_block(mix: str, block: str) -> None:
    """Both file types store every linear of the layers in one format, so their published average must lead to it."""
    assert get_precision(mix).bits == pytest.approx(get_precision(block).bits, rel=0.001)


def test_two_to_four_sparsity_leaves_the_published_share() -> None:
    """roofline-notes 4.2: fp16 0.5625x, int8 and fp8 0.625x; int4 3 bits of 4."""
    for name, share in {"fp16": 0.5625, "int8": 0.625, "fp8": 0.625, "int4": 0.75}.items():
        dense = get_precision(name)
        assert sparse24(dense).element_bits / dense.element_bits == share
    assert 16 / get_precision("fp16_sparse24").bits == pytest.approx(1.78, abs=0.003)


@given(name=st.sampled_from(sorted(PRECISIONS)), n=SIZES, k=SIZES)
def test_sparsity_never_gains_more_than_at_sixteen_bits(name: str, n: int, k: int) -> None:
    dense = get_precision(name)
    gain = dense.matrix_bytes(n, k) / sparse24(dense).matrix_bytes(n, k)
    assert gain <= 16 / 9 + 1e-9 or dense.element_bits > 16


@given(name=st.sampled_from(sorted(PRECISIONS)), n=SIZES, k=SIZES, more=st.integers(1, 1000))
def test_more_elements_never_take_fewer_bytes(name: str, n: int, k: int, more: int) -> None:
    precision = get_precision(name)
    assert precision.matrix_bytes(n + more, k) > precision.matrix_bytes(n, k)
    assert precision.matrix_bytes(n, k + more) > precision.matrix_bytes(n, k)
    assert precision.matrix_bytes(n, k) >= precision.vector_bytes(n * k) - 1e-6


@given(bits=st.integers(1, 7), group=st.sampled_from([16, 32, 64, 128]), n=SIZES, k=SIZES)
def test_bytes_grow_with_bits_and_with_smaller_groups(bits: int, group: int, n: int, k: int) -> None:
    few = integer(bits, group).matrix_bytes(n, k)
    assert few < integer(bits + 1, group).matrix_bytes(n, k)
    assert few <= integer(bits, group, zero_bits=bits).matrix_bytes(n, k)
    assert integer(bits, 2 * group).matrix_bytes(n, k) <= few


@given(bits=st.integers(1, 8), zero=st.booleans())
def test_a_group_format_tends_to_its_nominal_bits(bits: int, zero: bool) -> None:
    assert integer(bits, 2**20, zero_bits=bits * zero).bits == pytest.approx(bits, rel=1e-4)


@given(k=st.integers(1, 1000))
def test_a_started_group_has_a_whole_scale(k: int) -> None:
    groups = -(-k // 128)
    assert integer(4, 128).matrix_bytes(1, k) * 8 == 4 * k + 16 * groups


@given(tokens=st.integers(1, 5000))
def test_kivi_keeps_its_newest_128_tokens_in_16_bits(tokens: int) -> None:
    stored = float(get_precision("kivi2").cache_bytes(tokens, 16, 128))
    newest = min(tokens, 128)
    assert stored == 16 * 128 * (2 * newest + (tokens - newest) * 3 / 8)
    assert stored <= float(get_precision("fp16").cache_bytes(tokens, 16, 128))


def test_cache_bytes_take_arrays() -> None:
    tokens = np.array([1.0, 100.0, 4000.0])
    for name in ("bf16", "int8_head", "kivi2"):
        precision = get_precision(name)
        together = precision.cache_bytes(tokens, 16, 128)
        np.testing.assert_allclose(together, [precision.cache_bytes(float(t), 16, 128) for t in tokens])


def test_llama_2_7b_caches_512_kib_a_token_and_half_of_it_in_fp8() -> None:
    """Llama-2-7B: 32 layers x 32 heads x 128, keys and values: 512 KiB in fp16 (facts/models.csv)."""
    assert get_precision("fp16").cache_bytes(1, 2 * 32 * 32, 128) == 512 * 1024
    assert get_precision("fp8").cache_bytes(1, 2 * 32 * 32, 128) == 256 * 1024


@pytest.mark.parametrize("name", ["bf17", "int9_g32", "int4_g0", "exl2_40", "q4_k_x", "int4_g64_sparse23", ""])
def test_an_unknown_format_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(MemboundError, match=f"precision '{name}' is unknown; (did you mean|give one)"):
        get_precision(name)


@pytest.mark.parametrize("name", [*PRECISIONS, "int4_g64_zero", "int3_row", "exl2_4.25", "int4_g64_sparse24"])
def test_a_format_is_found_by_the_name_that_it_has(name: str) -> None:
    assert get_precision(name).name == name


# --- names ---


def _columns() -> list[tuple[str, str, str]]:
    found: dict[tuple[str, str, str], None] = {}
    for file in ("measured_ops_dev.csv", "measured_e2e_dev.csv"):
        with (FACTS / file).open(encoding="utf-8") as table:
            for row in csv.DictReader(table):
                weights = row.get("weight_dtype") or row.get("dtype") or ""
                found[(weights, row.get("act_dtype", ""), row.get("kv_dtype", ""))] = None
    return list(found)


@pytest.mark.skipif(not FACTS.is_dir(), reason="../shared/facts is not here")
def test_every_dtype_of_the_development_tables_is_understood() -> None:
    for weights, activations, kv in _columns():
        plan = parse_plan(weights, activations, kv)
        stated = {"weights": weights, "activations": activations, "kv": kv}
        for name in plan.assumed:
            assert stated[name] in ("", "nan")
        for text, format in ((weights, plan.weights), (activations, plan.activations), (kv, plan.kv)):
            if text in ("bf16", "fp16", "fp32", "nvfp4", "mxfp4", "nf4"):
                assert format.name == text


@pytest.mark.parametrize(
    ("text", "name"),
    {
        "bfloat16": "bf16",
        "int8_wo": "int8",
        "sq": "int8",
        "int8 sq": "int8",
        "int4(awq g128)": "int4_g128_zero",
        "int4(gptq g32 act-order yes)": "int4_g32",
        "int4(gptq g- act-order yes)": "int4_row",
        "int8(gptq)": "int8_g128",
        "int4(g64)": "int4_g64",
        "4.0 bpw": "exl2_4.0",
        "Q4_K_M": "q4_k_m",
        "Q4_K - Medium": "q4_k_m",
        "fp8 2:4 sparse": "fp8_sparse24",
        "int4(g64) 2:4": "int4_g64_sparse24",
        "w4a16_mxfp4": "mxfp4",
        "W4A8": "int4",
        "AWQ 4-bit": "int4_g128_zero",
        "gptq-int8": "int8_g128",
        "int4 group size 64": "int4_g64",
        "int8 (weight-only)": "int8",
        "W8A8 (FP8)": "fp8",
        "nvfp4 (w4a4)": "nvfp4",
        "FP8 (block-wise)": "fp8_block",
        "exl3 3.5bpw": "exl2_3.5",
        "q4f16_1": "int4_g32",
        "2-bit (QTIP)": "int2_g128",
        "nf4 (double quant)": "nf4_dq",
    }.items(),
)
def test_weight_names_of_tables_and_engines(text: str, name: str) -> None:
    precision = parse_precision(text)
    assert precision is not None
    assert precision.name == name


def test_the_same_word_means_another_format_for_a_cache_and_for_activations() -> None:
    formats = {role: parse_precision("int8", role) for role in ("weights", "kv")}  # type: ignore[arg-type]
    assert [format and format.name for format in formats.values()] == ["int8", "int8_head"]
    assert parse_plan("fp8_block").activations.name == "fp8_g128"
    assert [parse_plan(text).activations.name for text in ("w8a8 (fp8)", "w4a8 (fp8)", "w4afp8")] == ["fp8"] * 3
    assert parse_plan("int8 w8a8").activations.name == "int8" and parse_plan("int4 w4a16").activations.name == "bf16"
    assert parse_plan("int8_wo").activations.name == "bf16"
    assert parse_plan("sq").activations.name == "int8"
    assert parse_plan("q4_k_m", "fp16(int8 dot for Q4)").activations.name == "q8_1"
    assert parse_plan("fp16", "fp16(int8 dot for Q4)").activations.name == "fp16"


def test_a_cache_that_skips_sliding_layers_keeps_those_in_16_bits() -> None:
    plan = parse_plan("mxfp4", "bf16", "fp8 (skip sliding-window layers)")
    assert (plan.kv_of().name, plan.kv_of(sliding=True).name) == ("fp8", "bf16")


def test_what_is_not_stated_is_named() -> None:
    assert parse_plan("nan", "nan", "").assumed == ("weights", "activations", "kv")
    assert parse_plan("int4", "fp16", "fp16").assumed == ()
    assert parse_plan("int4").assumed == ("activations", "kv")


@pytest.mark.parametrize("text", ["int5000", "int4(quux)", "bf16 maybe", "4..0 bpw", "fp8 (moe mxfp4)", "mixed"])
def test_a_name_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(MemboundError, match=r"weights precision '.*' is (not understood|unknown)"):
        parse_precision(text)


# --- plans ---


def test_weight_only_and_fp8_checkpoints_keep_their_tables_in_16_bits() -> None:
    for weights, activations in (("int4_g128", "fp16"), ("fp8", "fp8"), ("nvfp4", "nvfp4"), ("int8", "int8")):
        plan = plan_of(weights, activations)
        for part in ("lm_head", "embedding", "router"):
            assert plan.weights_of(part).bits == 16
            assert plan.activations_of(part).bits == 16
        assert plan.weights_of("ffn").name == weights
        assert plan.activations_of("ffn").name == activations


def test_k_quants_have_a_head_of_six_bits_and_gpt_oss_only_experts_in_mxfp4() -> None:
    assert plan_of("q4_k_m", "fp16").weights_of("lm_head").name == "q6_k"
    assert plan_of("q8_0", "fp16").weights_of("lm_head").name == "q8_0"
    gpt_oss = plan_of("mxfp4")
    assert gpt_oss.weights_of("experts").name == "mxfp4"
    assert gpt_oss.weights_of("attention").name == "bf16"


def test_an_exception_replaces_a_usual_one() -> None:
    """gpt-fast quantizes the head too."""
    plan = plan_of("int8", "bf16", exceptions={"lm_head": "int8"})
    assert plan.weights_of("lm_head").name == "int8"
    assert plan.weights_of("router").name == "bf16"
    with pytest.raises(MemboundError, match="precision exception 'head' is unknown; parts are"):
        plan_of("int8", exceptions={"head": "bf16"})


@given(first=st.integers(0, 50), last=st.integers(0, 50), layers=st.integers(1, 60))
def test_every_layer_has_one_format(first: int, last: int, layers: int) -> None:
    plan = plan_of("int4", "fp16", plain_first_layers=first, plain_last_layers=last)
    kept = [plan.keeps(layer, layers) for layer in range(layers)]
    assert sum(kept) == min(layers, first + last)
    assert kept[: min(first, layers)] == [True] * min(first, layers)
    assert {plan.of_kept_layers().weights_of(part).name for part in PARTS} == {"fp16"}


def test_the_plain_plan_is_bf16_throughout() -> None:
    assert PrecisionPlan() == plan_of("bf16")


# --- what the device multiplies in ---


def _compute(weights: str, activations: str, device: str, **options: bool) -> tuple[str, bool, bool]:
    found = compute_dtype(get_precision(weights), get_precision(activations), get_hardware(device), **options)
    return found.dtype, found.dequantizes, found.emulated


@pytest.mark.parametrize(
    ("weights", "activations", "device", "expected"),
    [
        ("bf16", "bf16", "H100-SXM5", ("bf16", False, False)),
        ("int4_g128", "fp16", "A100-SXM4-80GB", ("fp16", True, False)),  # weight-only gains no rate
        ("int8", "bf16", "A100-SXM4-80GB", ("bf16", True, False)),
        ("int8", "int8", "A100-SXM4-80GB", ("int8", False, False)),
        ("int4_g128", "int8", "A100-SXM4-80GB", ("int8", True, False)),  # QServe's W4A8
        ("fp8", "fp8", "H100-SXM5", ("fp8", False, False)),
        ("fp8_block", "fp8_g128", "H100-SXM5", ("fp8", False, False)),
        ("fp8", "fp8", "A100-SXM4-80GB", ("bf16", True, True)),  # Ampere has no fp8: Marlin unpacks
        ("nvfp4", "nvfp4", "B200-SXM", ("fp4", False, False)),
        ("nvfp4", "nvfp4", "H100-SXM5", ("bf16", True, True)),
        ("int4_g128", "fp8", "H100-SXM5", ("fp8", True, False)),
        ("q4_k_m", "q8_1", "RTX-4090", ("int8", True, False)),
    ],
)
def test_what_a_device_multiplies(
    weights: str, activations: str, device: str, expected: tuple[str, bool, bool]
) -> None:
    assert _compute(weights, activations, device) == expected


def test_emulation_can_be_refused() -> None:
    with pytest.raises(MemboundError, match="'A100-SXM4-80GB' has no fp8 matrix rate; it has"):
        _compute("fp8", "fp8", "A100-SXM4-80GB", emulate=False)


def test_sparse_weights_use_the_sparse_rate_where_there_is_one() -> None:
    a100, fp16 = get_hardware("A100-SXM4-80GB"), get_precision("fp16")
    sparse = compute_dtype(sparse24(fp16), fp16, a100)
    dense = compute_dtype(fp16, fp16, a100)
    assert sparse.sparse and sparse.flops_per_s == pytest.approx(2 * dense.flops_per_s)


def test_a_device_without_any_wide_rate_is_refused() -> None:
    document = dict(name="x", vendor="v", kind="gpu", memory_bytes=2**30, bandwidth_bytes_per_s=1e12, source="test")
    device = parse_hardware({**document, "matrix_flops": {"int8": 1e12}}, "test")
    with pytest.raises(MemboundError, match="has no bf16 matrix rate; it has int8"):
        compute_dtype(get_precision("bf16"), get_precision("bf16"), device)
    with pytest.raises(MemboundError, match="has no fp8 matrix rate; it has int8"):
        compute_dtype(get_precision("fp8"), get_precision("fp8"), device)
