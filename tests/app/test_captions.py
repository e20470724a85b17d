"""Is the caption of a comparison about the engine that was compared?"""

import pytest

from membound.app.compare import predict_rows
from membound.app.endpoint_comparison import EndpointComparison, predict
from membound.app.figures import captions
from membound.app.i18n import LANGUAGES, Translate
from membound.app.run_files import run_page
from membound.roofline.hardware import get_hardware
from membound.roofline.results.comparison import Comparison
from membound.roofline.scenario import Scenario, parse_scenario

T = Translate("en")
PLAIN = {
    "name": "a",
    "model": "SmolLM2-135M",
    "hardware": "H100-SXM5",
    "techniques": ["weight_quantization", "kv_quantization"],
    "workload": {
        "arrivals": {"kind": "closed_loop", "concurrency": 2},
        "requests": 4,
        "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 32}},
        "output_tokens": {"kind": "fixed", "tokens": 4},
    },
}


def asked(**changes: object) -> Scenario:
    return parse_scenario(PLAIN | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "bf16 weights, static batching"),
        ({"engine": {"batching": "chunked_prefill"}}, "bf16 weights, chunked prefill batching"),
        ({"model": "gpt-oss-20b"}, "mxfp4 weights, static batching"),
        (
            {"engine": {"batching": "continuous"}, "sweep": [{"model": "SmolLM2-135M"}, {"model": "gpt-oss-20b"}]},
            "bf16 weights, continuous batching; mxfp4 weights, continuous batching",
        ),
    ],
)
def test_the_baselines_caption_names_the_formats_and_batching_that_ran(changes: dict[str, object], words: str) -> None:
    assert f": {words}, one token a step" in captions.of_baseline(asked(**changes).to_yaml(), "where", T)


def test_a_stack_is_not_called_a_technique_alone() -> None:
    alone, together = T("comparison.alone"), T("comparison.engines")
    assert alone in captions.of_gains(asked().to_yaml(), [], "where", T)
    stack = asked(variants=[["weight_quantization", "kv_quantization"]])
    assert together in captions.of_gains(stack.to_yaml(), [], "where", T)
    beside = asked(variants=[{"name": "b", "techniques": ["eagle"], "beside": ["weight_quantization"]}])
    assert together in captions.of_gains(beside.to_yaml(), [], "where", T)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_scenario_that_cannot_be_read_claims_nothing_of_its_engine(language: str) -> None:
    t = Translate(language)
    assert captions.of_baseline("no: scenario", "where", t) == t("comparison.unknown_caption", conditions="where")
    rows = [Comparison.model_validate(row) for row in predicted(asked())["comparisons"]]
    assert t("comparison.alone") in captions.of_gains("no: scenario", rows, "where", t)


def test_the_page_of_a_run_against_a_server_shows_its_metrics_and_no_empty_gains() -> None:
    scenario = asked(techniques=[])
    run = predict(scenario)
    comparison = EndpointComparison([], {}, {})
    comparison.judge({}, run, [run], "against somebody")
    page = run_page(comparison.to_json(), scenario.to_yaml(), "a", "en", T)
    assert T("served.title") in page and T("results.gains") not in page and T("results.baseline") not in page
    assert T("metric.ttft_s").split(" (")[0] in page and "against somebody" in page


def predicted(scenario: Scenario) -> dict[str, list[dict[str, object]]]:
    return predict_rows(scenario, get_hardware(scenario.hardware)).to_json()
