"""What papers and engines call a technique is answered with what a scenario says for it, and that is accepted."""

from __future__ import annotations

import re

import pytest
import yaml

from membound.roofline.errors import MemboundError
from membound.roofline.reading.meant import FIELDS, SETTINGS, technique_meant
from membound.roofline.scenario import Scenario, load_scenario, parse_scenario
from membound.roofline.techniques import TECHNIQUES


def asked(technique: str) -> Scenario:
    document = yaml.safe_load(load_scenario("live-cpu").to_yaml())
    return parse_scenario(document | {"techniques": [yaml.safe_load(technique)]})


@pytest.mark.parametrize("word", [word for technique in TECHNIQUES.values() for word in technique.meant_by])
def test_what_a_scenario_is_said_to_say_it_may_say(word):
    (technique,) = asked(technique_meant(word)).techniques
    assert word in technique.meant_by


@pytest.mark.parametrize("setting", sorted(set(SETTINGS.values())))
def test_a_setting_that_is_named_can_be_set(setting):
    path, _, value = setting.partition("=")
    scenario = load_scenario("live-cpu")
    before = scenario.with_value("engine.profile", "eager")
    assert before.with_value(path, yaml.safe_load(value)) != before


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("chunked_prefill", "engine.batching: chunked_prefill"),
        ("AWQ", "method: awq"),
        ("EAGLE-3", "eagle"),
        ("Paged-Attention", "blocks are paged"),
        ("MLA", "another model"),
        ("LoRA", "adapters are not modelled"),
    ],
)
def test_a_name_of_the_field_is_answered(word, meant):
    with pytest.raises(MemboundError, match="unknown name") as refused:
        asked(word)
    assert f"meant: {technique_meant(word)}" in str(refused.value)
    assert meant in str(refused.value)


def test_a_technique_of_membound_has_no_other_meaning():
    assert not [name for name in TECHNIQUES if technique_meant(name) not in (None, name)]


@pytest.mark.parametrize("written", [written for written in FIELDS if "." in written])
def test_a_servers_flag_is_answered_with_a_field_that_there_is(written):
    with pytest.raises(MemboundError, match=r"\(meant: "):
        load_scenario("live-cpu").with_value(written, 1)
    for path in re.findall(r"(?:parallel|engine|workload)\.\w+", FIELDS[written]):
        section, field = path.split(".")
        assert field in type(getattr(load_scenario("live-cpu"), section)).model_fields
    document = yaml.safe_load(load_scenario("live-cpu").to_yaml())
    section, field = written.split(".")
    document[section][field] = 1
    with pytest.raises(MemboundError, match=r"\(meant: "):
        parse_scenario(document)


def test_a_scenario_without_a_load_is_answered_with_one():
    document = {"name": "bare", "model": "Llama-3.1-8B", "hardware": "H100-SXM5"}
    with pytest.raises(MemboundError, match="field 'workload' is missing") as refused:
        parse_scenario(document)
    given = yaml.safe_load(str(refused.value).partition("; for example ")[2])
    assert parse_scenario(document | given).workload.requests
