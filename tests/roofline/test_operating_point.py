"""Does a step add up from its operators, say what would still fit, and admit what nobody measured?"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.cost import step_cost
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import catalog as devices
from membound.roofline.hardware import get_hardware, hardware_of
from membound.roofline.hardware.calibration import Calibration
from membound.roofline.memory import weights_bytes
from membound.roofline.models import catalog as models
from membound.roofline.models import get_model
from membound.roofline.operating_point import MOST_SEQUENCES, OperatingPoint
from membound.roofline.parallel import Parallelism
from membound.roofline.scenario import load_scenario
from membound.roofline.serving import Deployment
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import TECHNIQUES, W8A8, EngineSetup, engine_setup

H100 = get_hardware("H100-SXM5")
PLAIN = EngineSetup()
KINDS = ("Llama-3.1-8B", "DeepSeek-V3", "Jamba-v0.1", "Mamba-2.8B", "Gemma-2-9B", "gpt-oss-20b", "RWKV-7-1.5B")
KINDS = tuple(name for name in KINDS if name in models())
SCENARIO = load_scenario("live-cpu").with_value("hardware", "H100-SXM5")


def point(model: str = "Llama-3.1-8B", setup: EngineSetup = PLAIN, **changes: object) -> OperatingPoint:
    given = {"hardware": H100, "phase": "decode", "batch": 8, "context": 1024} | changes
    return OperatingPoint(get_model(model), setup=setup, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["decode", "prefill", "verify"])
@pytest.mark.parametrize("model", KINDS)
def test_groups_and_operators_add_up_to_the_step(model: str, phase: str) -> None:
    document = point(model, phase=phase).to_json()
    step, groups, operators = document["step"], document["groups"], document["operators"]
    assert sum(op["time_s"] for op in operators) == pytest.approx(step["time_s"])
    assert sum(group["time_s"] for group in groups) == pytest.approx(step["time_s"])
    assert sum(group["share"] for group in groups) == pytest.approx(1.0)
    assert sum(step["bottleneck_share"].values()) == pytest.approx(1.0)
    for amount in ("flops", "bytes"):
        assert sum(group[amount] for group in groups) == pytest.approx(step[amount])
    assert [op["name"] for group in groups for op in operators if op["group"] == group["name"]] == [
        name for group in groups for name in group["operators"]
    ]
    assert len({op["name"] for op in operators}) == len(operators)


@pytest.mark.parametrize("model", KINDS)
def test_linears_are_in_the_group_that_they_serve(model: str) -> None:
    groups = {group["name"]: set(group["operators"]) for group in point(model).to_json()["groups"]}
    assert groups["lm_head"] == {"lm_head"}
    assert not {name for name in groups["attention"] if "gate_up" in name or "experts" in name}
    assert not {name for name in groups.get("ffn", ()) if name.split(".")[-1] in ("qkv", "o", "in_proj", "attention")}


@given(
    model=st.sampled_from(KINDS),
    batch=st.integers(1, 512),
    context=st.integers(8, 4096),
    phase=st.sampled_from(["decode", "prefill"]),
)
@settings(max_examples=30)
def test_bounds_of_one_step_are_those_of_many_at_once(model: str, batch: int, context: int, phase: str) -> None:
    one = point(model, batch=batch, context=context, phase=phase)
    many = np.array([float(batch), 2.0 * batch])
    shape = StepShape.prefill(many, context) if phase == "prefill" else StepShape.decode(many, context)
    shares = step_cost(one.model, PLAIN, one.times, shape).shares()
    for bound, share in one.shares.items():
        assert np.broadcast_to(shares[bound], 2)[0] == pytest.approx(share, abs=1e-9)


def test_the_ridge_is_where_the_data_sheets_roofs_meet() -> None:
    """H100 SXM data sheet: 989 TFLOP/s in bf16 and twice that in fp8, over 3.35 TB/s."""
    decode, prefill = point(batch=1), point(phase="prefill", context=8192)
    assert decode.ridge.dtype == "bf16"
    assert decode.ridge.flops_per_byte == pytest.approx(989.4 / 3.35, rel=0.01)
    assert decode.ridge.distance < 0.01 < 1.0 < prefill.ridge.distance
    eight_bits = point(setup=engine_setup([W8A8()])).ridge
    assert eight_bits.flops_per_byte == pytest.approx(2 * decode.ridge.flops_per_byte, rel=0.01)


def test_a_decode_step_of_batch_one_does_about_a_flop_a_byte() -> None:
    """2 FLOPs a weight of 2 bytes: the textbook intensity of decoding in 16 bits."""
    assert point(batch=1, context=16).ridge.intensity == pytest.approx(1.0, rel=0.02)


@given(
    model=st.sampled_from([*KINDS, "Llama-3.1-70B"]),
    batch=st.integers(1, 4096),
    context=st.integers(1, 8192),
    phase=st.sampled_from(["decode", "prefill", "verify"]),
    memory_gib=st.integers(1, 400),
)
@settings(max_examples=150)
def test_the_largest_batch_and_context_are_the_last_that_fit(
    model: str, batch: int, context: int, phase: str, memory_gib: int
) -> None:
    device = H100.model_copy(update={"memory_bytes": memory_gib * 2**30})
    here = point(model, hardware=device, batch=batch, context=context, phase=phase)
    most = here.largest_batch()
    assert most == 0 or here.with_batch(most).fits
    assert most == MOST_SEQUENCES or not here.with_batch(most + 1).fits
    longest = here.largest_context()
    assert longest == 0 or replace(here, context=longest).fits
    assert longest == here.model.max_context or not replace(here, context=longest + 1).fits


def test_weights_that_do_not_fit_leave_room_for_nothing() -> None:
    memory = point("Llama-3.1-405B").to_json()["memory"]
    assert not memory["fits"]
    assert (memory["largest_batch"], memory["largest_context"], memory["free_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize("model", KINDS)
def test_weights_by_part_are_all_weights(model: str) -> None:
    here = point(model)
    parts = here.to_json()["memory"]["weights_by_part"]
    assert sum(parts.values()) == pytest.approx(weights_bytes(here.model, PLAIN))
    assert sum(parts.values()) == pytest.approx(2.0 * here.model.params, rel=0.01)  # bf16


@pytest.mark.parametrize(("model", "bytes_per_token"), [("Llama-2-7B", 512 * 1024), ("DeepSeek-V3", 70_272)])
def test_a_token_takes_the_published_bytes_in_the_cache(model: str, bytes_per_token: int) -> None:
    """Llama-2-7B: 2 x 32 layers x 4096 x 2 bytes; DeepSeek-V3's report: 576 elements in each of 61 layers, bf16."""
    assert point(model, batch=3, context=1000).memory.kv_bytes == 3000 * bytes_per_token


def test_states_do_not_grow_with_the_context() -> None:
    recurrent = [name for name, model in models().items() if model.kv_bytes_per_token(16) == 0]
    short, long = (point(recurrent[0], context=context) for context in (16, 2000))
    assert short.state_bytes == long.state_bytes == short.memory.kv_bytes > 0
    assert short.largest_context() == short.model.max_context


def test_what_nobody_measured_is_inherited_and_says_so() -> None:
    unknown = H100.model_copy(update={"name": "an H100 of my own"})
    origin = point(hardware=unknown).origin
    assert origin.kind == "inherited" and origin.measured_share == 0.0
    assert "Hopper HBM" in origin.inherited_from
    assert all(kernel.fit.scope != H100.name for kernel in origin.kernels)
    assert sum(kernel.share for kernel in origin.kernels) == pytest.approx(1.0, abs=0.1)


def test_a_device_of_an_unmeasured_generation_inherits_from_its_makers_with_its_kind_of_memory() -> None:
    origin = point(hardware=get_hardware("MI210")).origin
    assert origin.kind == "inherited" and origin.inherited_from[0] == "AMD HBM"
    assert {kernel.level for kernel in origin.kernels} <= {"memory", "any"}


def test_a_measured_device_says_on_how_many_rows() -> None:
    origin = point().to_json()["origin"]
    assert origin["kind"] in ("measured", "partly")
    assert all(kernel["rows"] > 0 for kernel in origin["kernels"] if kernel["level"] == "device")


def test_a_calibrated_machine_is_its_own_origin() -> None:
    calibration = Calibration.load(Path(__file__).parents[1] / "app" / "calibration.json")
    here = point("SmolLM2-135M", hardware=hardware_of(calibration), context=256)
    document = here.to_json()
    assert document["origin"]["kind"] == "calibrated" and document["origin"]["kernels"] == []
    assert here.ridge.bytes_per_s == calibration.memory_bandwidth


def test_devices_that_share_a_model_send_messages_and_hold_a_part() -> None:
    alone, shared = point(), point(setup=EngineSetup(parallel=Parallelism(tp=4)))
    assert "communication" not in {group.name for group in alone.groups}
    (messages,) = (group for group in shared.groups if group.name == "communication")
    assert messages.link_bytes > 0 and messages.time_s > 0
    assert shared.memory.weights_bytes == pytest.approx(alone.memory.weights_bytes / 4, rel=0.01)
    assert shared.to_json()["parallel"]["devices"] == 4
    assert shared.largest_batch() > alone.largest_batch()


def test_a_verify_step_must_yield_between_one_and_all_tokens_to_be_worth_it() -> None:
    here = point(phase="verify", batch=1)
    document = here.to_json()["step"]
    assert 1.0 < document["breakeven_tokens"] < document["most_tokens"] == here.gamma + 1


def verified(batch: int, **eagle: int) -> OperatingPoint:
    scenario = SCENARIO.with_value("model", "Llama-3.1-8B").with_value("techniques", [{"name": "eagle", **eagle}])
    return OperatingPoint.of(scenario, batch=batch, context=1024, phase="verify")


def test_a_verify_step_checks_the_drafts_that_gain_most_unless_the_scenario_names_them() -> None:
    """Fewer guesses as the batch grows (Leviathan et al., 2023, section 3.5); what is named stays as it is."""
    guesses = [verified(batch).drafts for batch in (1, 16, 128)]
    assert guesses == sorted(set(guesses), reverse=True)
    assert verified(1, depth=2, tree_size=7).drafts == 7
    for point_, said in ((verified(1), "the best here"), (verified(1, depth=2, tree_size=7), "as the scenario says")):
        assert any(said in remark and "eagle" in remark for remark in point_.to_json()["remarks"])
    plain = OperatingPoint.of(SCENARIO.with_value("techniques", []), batch=1, context=512, phase="verify")
    assert "names no speculation" in plain.to_json()["remarks"][0]


def test_a_token_of_speculation_is_as_uncertain_as_its_step_and_its_acceptance() -> None:
    given, counted = ({"name": "eagle", "depth": 4, **more} for more in ({"alpha": 0.7}, {}))
    sure, guessed = (
        OperatingPoint.of(SCENARIO.with_value("techniques", [named]), batch=2, context=1024, phase="verify")
        for named in (given, counted)
    )
    known, counted_token = sure.emitted_token(), guessed.emitted_token()
    assert known is not None and counted_token is not None
    error = 1 + float(sure.cost.relative_error)
    assert known.acceptance_error == 0.0
    assert (known.low_s * error, known.high_s / error) == pytest.approx((known.time_s, known.time_s))
    assert counted_token.high_s / counted_token.time_s > 1 + float(guessed.cost.relative_error)
    assert guessed.to_json()["step"]["emitted_token"]["per_step"] == pytest.approx(counted_token.per_step)
    plain = OperatingPoint.of(SCENARIO.with_value("techniques", []), batch=2, context=512, phase="verify")
    assert plain.emitted_token() is None and "emitted_token" not in plain.to_json()["step"]


def test_sizes_unlike_those_that_were_measured_are_named() -> None:
    def remarks_of(**sizes: int) -> str:
        spec = get_model("Llama-3.1-8B")
        return " ".join(replace(point(), model=spec.model_copy(update=sizes)).to_json()["remarks"])

    assert remarks_of() == ""
    assert "no multiple of 16 (3001" in remarks_of(hidden=3001)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phase": "sleep"}, "phase is 'sleep'; give decode, prefill, verify"),
        ({"batch": 0}, "batch is 0; give a whole number, 1 or more"),
        ({"batch": float("nan")}, "batch is nan; give a whole number"),
        ({"batch": "4"}, "batch is '4'; give a whole number"),
        ({"context": -1}, "context is -1; give a whole number, 1 or more"),
        ({"context": 10**9}, "more than the 8192 tokens of 'SmolLM2-135M'"),
    ],
)
def test_an_operating_point_that_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(MemboundError, match=said):
        OperatingPoint.of(SCENARIO, **{"batch": 1, "context": 128, "phase": "decode"} | changes)  # type: ignore[arg-type]


def test_a_division_that_the_model_does_not_allow_is_refused() -> None:
    divided = SCENARIO.with_value("parallel", {"pp": 99})
    with pytest.raises(MemboundError, match="pp is 99, more than the 30 layers"):
        OperatingPoint.of(divided, batch=1, context=128, phase="decode")


def test_every_model_device_and_technique_gives_a_document_or_a_sentence() -> None:
    """Each model and each device with each technique, in the three phases by turns: a number or a MemboundError."""
    setups = [PLAIN, *(engine_setup([technique(name=name)]) for name, technique in TECHNIQUES.items())]
    setups.append(EngineSetup(parallel=Parallelism(tp=2)))
    phases, some_devices, some_models = cycle(("decode", "prefill", "verify")), cycle(devices()), cycle(models())
    pairs = [(model, next(some_devices), setup) for setup in setups for model in models()]
    pairs += [(next(some_models), device, setup) for setup in setups for device in devices()]
    refused = 0
    for model, device, setup in pairs:
        phase, spec = next(phases), get_model(model)
        here = OperatingPoint(spec, get_hardware(device), setup, phase, 4, min(512, spec.max_context))  # type: ignore[arg-type]
        try:
            document = here.to_json()
        except MemboundError as error:
            assert "\n" not in str(error) and len(str(error)) > 20
            refused += 1
            continue
        assert document["step"]["low_s"] <= document["step"]["time_s"] <= document["step"]["high_s"]
        json.dumps(document, allow_nan=False)
    assert refused < 0.15 * len(pairs)


def test_a_single_prediction_takes_less_than_a_millisecond() -> None:
    scenario = SCENARIO.with_value("model", "Llama-3.1-8B")

    def once() -> float:
        start = time.process_time()
        assert OperatingPoint.of(scenario, batch=8, context=1024, phase="decode").time_s > 0
        return time.process_time() - start

    assert min(once() for _ in range(200)) < 1e-3


@pytest.mark.parametrize("model", [*KINDS, "DeepSeek-V2-Lite", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"dp": 2, "pp": 2}])
def test_no_step_reads_more_weights_than_a_device_holds(model: str, parallel: dict[str, int]) -> None:
    """Of a stage: its share of the layers. What decode reads of MLA's unpacked halves is held beside `kv_b`."""
    spec, pp = get_model(model), parallel.get("pp", 1)
    for techniques in ((), (W8A8(),)):
        setup = replace(engine_setup(techniques), parallel=Parallelism(**parallel))
        both = StepShape.decode(4096.0, 100.0) + StepShape.prefill(8.0, 512.0)
        read = sum(
            float(op.weight_bytes) * op.calls for op in step_operators(spec, setup, both) if op.name != "lm_head"
        )
        assert read / pp <= weights_bytes(spec, setup) * (1 + 1e-9)


@pytest.mark.parametrize("device", ["H100-SXM5", "L40S", "A100-SXM4-80GB"])
@pytest.mark.parametrize("profile", ["vllm", "eager", "kernels"])
@pytest.mark.parametrize("context", [2048, 8192, 32768])
def test_as_many_sequences_fit_as_in_a_run(device: str, profile: str, context: int) -> None:
    """Where the activations of decode are among what an engine reserves."""
    setup = replace(PLAIN, profile=profile)
    hardware = get_hardware(device)
    one = point(setup=setup, hardware=hardware, context=context)
    run = Deployment(one.model, hardware, setup).largest_batch(float(context))
    assert one.largest_batch() <= run
    if profile != "eager":
        assert one.largest_batch() == run


def test_logits_are_held_of_every_row_that_is_needed() -> None:
    """fp32 scores over a vocabulary of 128,256: of each sequence, and of each of its guesses."""
    few, many = point(batch=64).memory.activation_bytes, point(batch=512).memory.activation_bytes
    assert many == pytest.approx(8 * few) and many > 512 * 4 * 128_256
    guessed = point(batch=64, phase="verify").memory.activation_bytes
    assert guessed == pytest.approx((1 + point(phase="verify").drafts) * few)
