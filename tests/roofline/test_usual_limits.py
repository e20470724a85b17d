"""Which limits an engine has where nobody names them."""

from dataclasses import replace

import pytest

from membound.roofline.engine_memory import EngineLimits
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import catalog, get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import parse_scenario
from membound.roofline.scenario.usual_limits import usual_limits
from membound.simulator.run import run

WORKLOAD = {
    "arrivals": {"kind": "closed_loop", "concurrency": 4},
    "requests": 8,
    "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 100}},
    "output_tokens": {"kind": "fixed", "tokens": 10},
}


def scenario(model: str = "Llama-3.1-8B", hardware: str = "H100-SXM5", profile: str = "vllm", **more):
    engine = {"profile": profile} | more.pop("engine", {})
    return parse_scenario(
        {"name": "x", "model": model, "hardware": hardware, "engine": engine, "workload": WORKLOAD} | more
    )


@pytest.mark.parametrize(
    ("profile", "hardware", "sequences", "tokens"),
    [
        ("vllm", "H100-SXM5", 1024, 8192),
        ("vllm-0.13", "MI300X", 1024, 8192),
        ("vllm", "A100-SXM4-80GB", 256, 2048),
        ("vllm", "L40S", 256, 2048),
        ("sglang", "RTX-4090", 2048, 2048),
        ("sglang", "L40S", 2048, 4096),
        ("sglang", "H200-SXM", 2048, 8192),
        ("sglang", "B200-SXM", 2048, 16384),
        ("tensorrt-llm", "L4", 2048, 8192),
        ("llama.cpp", "RTX-4090", 4, 2048),
        ("graphs", "H100-SXM5", 256, 4096),
    ],
)
def test_each_engine_has_its_own_by_the_devices_memory(profile, hardware, sequences, tokens):
    asked = scenario(hardware=hardware, profile=profile)
    assert (asked.seats, asked.step_tokens) == (sequences, tokens)
    assert asked.limits == EngineLimits(sequences, tokens)


def test_each_rank_of_data_parallelism_has_the_seats_of_a_scheduler():
    assert scenario(parallel={"dp": 4}).seats == 4 * scenario().seats
    assert scenario(parallel={"dp": 4}).limits == scenario().limits


def test_what_is_named_is_taken_and_the_other_limit_stays_the_engines():
    one = scenario(engine={"max_num_seqs": 7})
    assert (one.seats, one.step_tokens) == (7, 8192)
    other = scenario(engine={"max_batched_tokens": 300})
    assert (other.seats, other.step_tokens) == (1024, 300)


def test_a_run_says_which_limits_nobody_named():
    def said(**engine) -> list[str]:
        notes = run(scenario(engine=engine)).provenance.notes
        return [note for note in notes if note.startswith("limits that nobody names")]

    (both,) = said()
    assert both.endswith("'vllm': engine.max_num_seqs 1024, engine.max_batched_tokens 8192")
    (one,) = said(max_num_seqs=8)
    assert "max_num_seqs" not in one and one.endswith("engine.max_batched_tokens 8192")
    assert said(max_num_seqs=8, max_batched_tokens=512) == []


def test_a_run_says_that_the_first_source_is_the_data_sheets():
    hardware = get_hardware("H100-SXM5")
    assert run(scenario()).provenance.notes[0] == f"data sheet of {hardware.name}: {hardware.source}"


def test_unnamed_seats_are_fewer_where_their_logits_would_leave_less_than_they_take():
    """gpt-oss-120b on one H100: 1,024 rows of 201,088 logits leave no cache at all, 256 leave more than they take."""
    asked = scenario("gpt-oss-120b")
    held = Footprint.of(resolve_model(asked.model), asked.setup, asked.limits)
    room = held.room(get_hardware(asked.hardware).memory_bytes)
    assert asked.seats < 1024 and room >= held.engine.peak_bytes(asked.limits)
    more = Footprint.of(resolve_model(asked.model), asked.setup, replace(asked.limits, sequences=2 * asked.seats))
    assert more.room(get_hardware(asked.hardware).memory_bytes) < more.engine.peak_bytes(more.engine.limits)
    assert scenario("gpt-oss-120b", "H200-SXM").seats == 1024


def test_every_device_and_profile_has_limits():
    for name in catalog():
        hardware = get_hardware(name)
        for profile in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "eager"):
            limits = usual_limits(profile, hardware, hardware.kind)
            assert limits.sequences >= 1 and limits.step_tokens >= 2048
