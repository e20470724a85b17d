"""Techniques say what they are, change what they say, and refuse what cannot be."""

from __future__ import annotations

import itertools

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from membound.roofline.cost import step_cost
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.memory import kv_bytes, weights_bytes
from membound.roofline.models import get_model
from membound.roofline.precision import PRECISIONS, get_precision
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.shape import StepShape
from membound.roofline.step import step_weight_bytes
from membound.roofline.techniques import (
    TECHNIQUES,
    W8A8,
    AnyTechnique,
    ContinuousBatching,
    DraftModelSpeculation,
    Eagle,
    EngineSetup,
    FlashAttention,
    Int8Weights,
    KvQuantization,
    Medusa,
    MlaAbsorption,
    Mtp,
    NgramSpeculation,
    Sparsity24,
    WeightQuantization,
    engine_setup,
    remarks,
)
from membound.roofline.times.known import times_for

LLAMA = get_model("Llama-3.1-8B")
H100 = times_for(get_hardware("H100-SXM5"))
DECODE = StepShape.decode(1.0, 1000.0)
SPECULATORS = (NgramSpeculation, DraftModelSpeculation, Medusa, Eagle, Mtp)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_technique_declares_what_it_is_compared_with_and_changes_the_set_up(name):
    technique = TECHNIQUES[name]()
    assert technique.name == name
    assert technique.baseline and technique.title and technique.family and technique.__doc__
    without = technique.remove(EngineSetup())
    assert technique.apply(without) != without
    assert engine_setup((technique,), without=(name,) if technique.usual else ()) == technique.apply(without)
    assert TypeAdapter(AnyTechnique).validate_python(technique.model_dump()) == technique


def test_the_plain_engine_has_what_every_engine_has():
    usual = {name for name, technique in TECHNIQUES.items() if technique.usual}
    assert usual == {"flash_attention", "mla_absorption"}
    assert engine_setup((FlashAttention(), MlaAbsorption())) == EngineSetup()


def test_the_order_in_which_techniques_are_listed_does_not_matter():
    listed = (Sparsity24(), ContinuousBatching(), KvQuantization(), Int8Weights(), Eagle())
    setups = {engine_setup(order) for order in itertools.permutations(listed)}
    assert len(setups) == 1
    (setup,) = setups
    assert (setup.weights.name, setup.kv.name) == ("int8_sparse24", "fp8")


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(SPECULATORS, 2)])
def test_two_speculators_are_refused(first, second):
    with pytest.raises(MemboundError, match=r"cannot both draft a step; give one of them") as caught:
        engine_setup((first(), second()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("techniques", "sentence"),
    [
        ((Int8Weights(), WeightQuantization(format="q4_k_m")), r"weights cannot be int8 and q4_k_m at once"),
        ((W8A8(), WeightQuantization()), r"at once; give one technique that quantizes them"),
        ((Sparsity24(), WeightQuantization(format="q4_k_m")), r"q4_k_m weights cannot have 2:4 sparsity"),
        ((Sparsity24(), WeightQuantization(format="nf4")), r"nf4 weights cannot have 2:4 sparsity"),
        ((Sparsity24(), WeightQuantization(format="exl2_4.25")), r"exl2_4.25 weights cannot have 2:4 sparsity"),
    ],
)
def test_what_excludes_each_other_is_refused_in_one_sentence(techniques, sentence):
    with pytest.raises(MemboundError, match=sentence) as caught:
        engine_setup(techniques)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("technique", "fields", "sentence"),
    [
        (WeightQuantization, {"format": "int9"}, "int9"),
        (WeightQuantization, {"format": "fp16"}, "no quantization has 16 bits or more but bf16"),
        (
            WeightQuantization,
            {"format": "bf16", "activations": "fp8"},
            "bf16 weights are multiplied with 16 bits, not with fp8",
        ),
        (WeightQuantization, {"activations": "q4_k_m"}, "activations are rounded in each step"),
        (KvQuantization, {"format": "fp8_block"}, "a cache grows by vectors"),
        (KvQuantization, {"format": "fp16"}, "no quantization has 16 bits"),
        (KvQuantization, {"format": "f8"}, "f8"),
        (Mtp, {"gamma": 0}, "greater than or equal to 1"),
        (Eagle, {"alpha": float("nan")}, "finite"),
    ],
)
def test_a_bad_parameter_names_what_is_wrong(technique, fields, sentence):
    with pytest.raises(ValidationError, match=sentence):
        technique(**fields)


@pytest.mark.parametrize("format", [name for name, known in PRECISIONS.items() if known.width < 16])
def test_every_narrow_format_saves_what_the_bits_of_each_part_say(format):
    quantized = engine_setup((WeightQuantization(format=format),))
    matrices = {
        "attention": 32 * sum(n * k for _, n, k in LLAMA.attention.linears(4096)),
        "ffn": 32 * sum(n * k for _, n, k in LLAMA.ffn.linears(4096)),
        "embedding": 128_256 * 4096,
        "lm_head": 128_256 * 4096,
    }
    saved_bits = sum(size * (16 - quantized.precision.weights_of(part).bits) for part, size in matrices.items())
    saved = weights_bytes(LLAMA, EngineSetup()) - weights_bytes(LLAMA, quantized)
    assert saved * 8 == pytest.approx(saved_bits, rel=2e-3)


def test_two_of_four_weights_give_decode_at_most_nine_sixteenths_of_its_bytes():
    """16 bits become 9: 1.78 times, not 2 (claims.md of the facts); the lm_head stays dense, so that it is less."""
    sparse = engine_setup((Sparsity24(),))
    assert get_precision("bf16_sparse24").bits == 9
    ratio = step_weight_bytes(LLAMA, EngineSetup()) / step_weight_bytes(LLAMA, sparse)
    assert 1.6 < ratio < 16 / 9
    gain = step_cost(LLAMA, EngineSetup(), H100, DECODE).time_s / step_cost(LLAMA, sparse, H100, DECODE).time_s
    assert 1 < gain < 16 / 9


def test_a_cache_of_eight_bits_is_half_as_large_and_leaves_the_weights_alone():
    fp8 = engine_setup((KvQuantization(),))
    assert kv_bytes(LLAMA, fp8, 1000.0) * 2 == kv_bytes(LLAMA, EngineSetup(), 1000.0)
    assert weights_bytes(LLAMA, fp8) == weights_bytes(LLAMA, EngineSetup())
    many = StepShape.decode(64.0, 8000.0)
    assert step_cost(LLAMA, fp8, H100, many).time_s < step_cost(LLAMA, EngineSetup(), H100, many).time_s


def test_eight_bit_activations_help_where_weight_only_does_not():
    """W4A16 and W8A16 keep the 16-bit rate; W8A8 computes at twice that rate (roofline-notes.md 4.2 of the facts)."""
    prompts = StepShape.prefill(4.0, 2048.0)
    plain, w8a8, weight_only = (
        step_cost(LLAMA, engine_setup(techniques), H100, prompts).time_s
        for techniques in ((), (W8A8(),), (WeightQuantization(format="fp8"),))
    )
    assert w8a8 < 0.8 * plain
    assert weight_only > 0.95 * plain


def test_the_lm_head_may_have_a_format_of_its_own():
    usual, narrow = (engine_setup((WeightQuantization(format="int4_g128", lm_head=head),)) for head in (None, "int8"))
    saved = weights_bytes(LLAMA, usual) - weights_bytes(LLAMA, narrow)
    assert saved == pytest.approx(LLAMA.vocab * LLAMA.hidden * (2 - 1), rel=0.01)  # int8 has a scale a row besides


def test_fused_attention_saves_more_the_longer_the_prompt():
    unfused = FlashAttention.remove(EngineSetup())
    gains = []
    for tokens in (256.0, 2048.0, 8192.0):
        shape = StepShape.prefill(1.0, tokens)
        gains.append(
            step_cost(LLAMA, unfused, H100, shape).time_s / step_cost(LLAMA, EngineSetup(), H100, shape).time_s
        )
    assert 1 < gains[0] < gains[1] < gains[2]


def test_absorption_reads_the_latents_and_not_every_head():
    deepseek = get_model("DeepSeek-V3")
    unpacked = MlaAbsorption.remove(EngineSetup())
    shape = StepShape.decode(8.0, 4000.0)
    assert step_cost(deepseek, EngineSetup(), H100, shape).time_s < step_cost(deepseek, unpacked, H100, shape).time_s
    assert step_cost(LLAMA, EngineSetup(), H100, DECODE).time_s == step_cost(LLAMA, unpacked, H100, DECODE).time_s


def test_layers_that_stay_in_16_bits_are_read_and_held_as_such():
    def bytes_of(layers: int) -> tuple[float, float]:
        setup = engine_setup((WeightQuantization(format="int4", plain_layers=layers or None),))
        return weights_bytes(LLAMA, setup), step_weight_bytes(LLAMA, setup)

    plain = engine_setup((WeightQuantization(format="bf16"),))
    half = LLAMA.layers // 2
    held, read = zip(*map(bytes_of, (0, 1, 2, half)), strict=True)
    assert held[1] - held[0] == pytest.approx(held[2] - held[1])
    assert read[1] - read[0] == pytest.approx(held[1] - held[0])
    assert held[3] == pytest.approx(weights_bytes(LLAMA, plain))
    times = [
        step_cost(LLAMA, engine_setup((WeightQuantization(plain_layers=n),)), H100, DECODE).time_s for n in (None, 2)
    ]
    assert times[0] < times[1]


def test_fp8_weights_alone_are_not_what_engines_run_where_the_device_multiplies_fp8():
    alone = engine_setup((WeightQuantization(format="fp8"),))
    (said,) = remarks(alone, get_hardware("H100-SXM5"))
    advised = TypeAdapter(AnyTechnique).validate_python(yaml.safe_load(said[said.index("{name") :]))
    assert remarks(engine_setup((advised,)), get_hardware("H100-SXM5")) == ()
    assert remarks(alone, get_hardware("A100-SXM4-80GB")) == ()


def served(profile: str, hardware: str, **fields) -> Scenario:
    technique = {"name": "weight_quantization", **fields}
    engine = {"profile": profile}
    document = {"name": "rounded", "model": "Llama-3.1-8B", "hardware": hardware, "engine": engine}
    few = {"kind": "fixed", "tokens": 8}
    workload = {"arrivals": {"kind": "closed_loop", "concurrency": 1}, "requests": 1, "output_tokens": few}
    workload |= {"prompts": {"kind": "synthetic", "tokens": few}}
    return parse_scenario(document | {"techniques": [technique], "workload": workload})


@pytest.mark.parametrize(
    ("profile", "hardware", "fields", "activations"),
    [
        ("vllm", "H100-SXM5", {"format": "fp8"}, "fp8"),
        ("sglang", "H100-SXM5", {"format": "fp8_block"}, "fp8_g128"),
        ("tensorrt-llm", "B200-SXM", {"format": "nvfp4"}, "nvfp4"),
        ("vllm", "H100-SXM5", {"format": "fp8", "activations": "bf16"}, "bf16"),
        ("vllm", "A100-SXM4-80GB", {"format": "fp8"}, "bf16"),
        ("vllm", "H100-SXM5", {"format": "awq"}, "bf16"),
        ("graphs", "H100-SXM5", {"format": "fp8"}, "bf16"),
        ("vllm", "no-such-device", {"format": "fp8"}, "bf16"),
    ],
)
def test_engines_that_round_activations_do_so_unless_a_scenario_says_otherwise(profile, hardware, fields, activations):
    assert served(profile, hardware, **fields).setup.precision.activations.name == activations


def test_what_an_engine_rounds_is_what_w8a8_computes():
    asked = served("vllm", "H100-SXM5", format="fp8")
    both = asked.with_techniques((W8A8(format="fp8"),))
    assert asked.setup.precision.activations == both.setup.precision.activations
    assert remarks(asked.setup, get_hardware("H100-SXM5")) == ()


def test_a_device_without_the_matrix_unit_says_that_it_emulates():
    (said,) = remarks(engine_setup((W8A8(format="fp8"),)), get_hardware("A100-SXM4-80GB"))
    assert "no matrix unit for fp8 weights with fp8 activations" in said and "multiplies in bf16" in said
    (said,) = remarks(engine_setup((Sparsity24(),)), get_hardware("V100-SXM2-32GB"))
    assert "no rate for 2:4 sparsity" in said
    for setup in (EngineSetup(), engine_setup((W8A8(), Sparsity24())), engine_setup((WeightQuantization(),))):
        assert remarks(setup, get_hardware("H100-SXM5")) == ()
