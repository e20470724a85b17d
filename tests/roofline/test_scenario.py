"""A scenario is all that a run needs, survives YAML, and refuses what is wrong in one sentence."""

from __future__ import annotations

import pytest
import yaml

from membound.roofline.errors import MemboundError
from membound.roofline.scenario import load_scenario, parse_scenario, shipped_scenarios
from membound.roofline.techniques import TECHNIQUES, EngineSetup, engine_setup


@pytest.mark.parametrize("name", shipped_scenarios())
def test_every_shipped_scenario_survives_yaml(name):
    scenario = load_scenario(name)
    assert scenario.name == name
    assert parse_scenario(yaml.safe_load(scenario.to_yaml())) == scenario
    assert all(not point.sweep for _, point in scenario.points())


def test_live_cpu_asks_what_the_newcomer_is_shown():
    scenario = load_scenario("live-cpu")
    concurrency = [point.workload.arrivals.concurrency for _, point in scenario.points()]
    assert concurrency == [1, 4, 16]
    assert {t.name for t in scenario.techniques} == {"int8_weights", "continuous_batching", "ngram_speculation"}


def test_the_digest_follows_what_determines_the_result():
    scenario = load_scenario("live-cpu")
    assert scenario.digest == load_scenario("live-cpu").digest
    assert scenario.digest != scenario.with_value("workload.seed", 2).digest


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("workload.arrivals", {"kind": "poisson", "rate_rps": -1}, r"rate_rps' is -1: input should be greater than 0"),
        ("workload.arrivals", {"kind": "poisson", "rate_rps": float("nan")}, r"rate_rps' is nan"),
        ("workload.requests", 0, r"workload.requests' is 0"),
        ("engine.block_size", "many", r"engine.block_size' is 'many'"),
        ("workload.output_tokens", {"kind": "uniform", "low": 9, "high": 3}, r"high is 3, below low \(9\)"),
        ("techniques", [{"name": "int9_weights"}], r"techniques.0"),
        ("techniques", [{"name": "int8_weights"}] * 2, r"int8_weights twice"),
        ("speed", 3, r"field 'speed' is not in the scenario"),
    ],
)
def test_bad_values_name_the_field_and_the_value(path, value, sentence):
    with pytest.raises(MemboundError, match=sentence) as caught:
        load_scenario("live-cpu").with_value(path, value)
    assert "\n" not in str(caught.value)


def test_bad_files_are_one_sentence(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [")
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text(load_scenario("live-cpu").to_yaml() + "colour: blue\n")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    listing = tmp_path / "list.yaml"
    listing.write_text("- 1\n")
    for path, sentence in (
        (broken, "not valid YAML at line 1"),
        (unknown, "field 'colour' is unknown"),
        (binary, "it is not UTF-8 text"),
        (listing, "is list, not a mapping"),
        (tmp_path / "missing.yaml", "No such file"),
        ("life-cpu", "neither a file nor shipped; shipped are"),
    ):
        with pytest.raises(MemboundError, match=sentence):
            load_scenario(str(path))


def test_each_technique_declares_what_it_is_compared_with_and_changes_the_set_up():
    for name, declaration in TECHNIQUES.items():
        technique = declaration()
        assert technique.name == name
        assert technique.baseline and technique.title
        assert engine_setup((technique,)) != EngineSetup()
