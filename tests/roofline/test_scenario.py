"""A scenario is all that a run needs, survives YAML, and refuses what is wrong in one sentence."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
import yaml

from membound.roofline.errors import MemboundError
from membound.roofline.parallel import Parallelism
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario import load_scenario, parse_scenario, shipped_scenarios


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
        ("workload.arrivals", {"kind": "poisson", "rate_rps": 1e-300}, r"rate_rps' is 1e-300: it is less than one req"),
        ("techniques", [{"name": "eagle", "depth": 5, "tree_size": 2}], r"depth is 5, more than tree_size, 2"),
        ("workload.arrivals", {"kind": "poisson", "rate_rps": float("nan")}, r"rate_rps' is nan"),
        ("workload.requests", 0, r"workload.requests' is 0"),
        ("engine.block_size", "many", r"engine.block_size' is 'many'"),
        ("workload.output_tokens", {"kind": "uniform", "low": 9, "high": 3}, r"high is 3, below low \(9\)"),
        ("techniques", [{"name": "int9_weights"}], r"techniques.0"),
        ("techniques", [{"name": "int8_weights"}] * 2, r"int8_weights twice"),
        ("techniques", [{"name": "eagle"}, {"name": "ngram_speculation"}], r"cannot both draft a step"),
        ("without", ["int8_weights"], r"which the plain engine does not have; it has flash_attention, mla_absorption"),
        ("parallel", {"tp": 4, "ep": 3}, r"ep 3 does not divide tp x dp = 4"),
        ("parallel", {"tp": 0}, r"parallel.tp' is 0"),
        ("engine.profile", "vlm", r"engine profile 'vlm' is unknown"),
        ("expert_skew", -1, r"expert_skew' is -1"),
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
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing yet\n")
    listing = tmp_path / "list.yaml"
    listing.write_text("- 1\n")
    for path, sentence in (
        (broken, "not valid YAML at line 1"),
        (unknown, "field 'colour' is unknown"),
        (binary, "it is not UTF-8 text"),
        (empty, "is empty, not a mapping"),
        (listing, "is a list, not a mapping"),
        (tmp_path / "missing.yaml", "No such file"),
        ("life-cpu", "neither a file nor shipped; did you mean 'live-cpu'"),
    ):
        with pytest.raises(MemboundError, match=sentence):
            load_scenario(str(path))


MINIMAL = {
    "name": "m",
    "model": "Llama-3.1-8B",
    "workload": {"arrivals": {"kind": "closed_loop", "concurrency": 1}, "requests": 1, "task": "chat"},
}


def refused(document: object) -> str:
    with pytest.raises(MemboundError) as caught:
        parse_scenario(document)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_fields_that_are_missing_or_unknown_are_named_with_what_was_meant():
    said = refused({"hardware": "H100-SXM5", "tp": 2, "batch": 8, "colour": "blue"})
    assert "fields 'name', 'model' and 'workload' are missing" in said
    for part in ("'tp' (meant: parallel.tp)", "--batch", "'colour' are unknown"):
        assert part in said


def test_a_name_alone_is_a_technique_with_its_defaults():
    whole = parse_scenario(MINIMAL | {"techniques": [{"name": "w8a8"}, {"name": "eagle", "depth": 3}]})
    assert parse_scenario(MINIMAL | {"techniques": ["w8a8", {"name": "eagle", "depth": 3}]}) == whole
    assert parse_scenario(MINIMAL).with_value("techniques", "w8a8").techniques == whole.techniques[:1]


@pytest.mark.parametrize("value", [{"w8a8": {}}, 8, None, [{"eagle": 3}], [7]])
def test_other_shapes_of_techniques_are_answered_with_the_right_one(value):
    assert "give a list such as [w8a8, {name: eagle, depth: 3}]" in refused(MINIMAL | {"techniques": value})


def test_an_unknown_technique_is_answered_with_those_that_there_are():
    assert "unknown name 'w8a9' (meant: w8a8); known are int8_weights" in refused(MINIMAL | {"techniques": ["w8a9"]})


def test_a_device_s_file_is_found_beside_the_scenario(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    sheet = tmp_path / "mine.yaml"
    sheet.write_text("name: Mine\n")
    asked = tmp_path / "asked.yaml"
    asked.write_text(yaml.safe_dump(MINIMAL | {"hardware": "mine.yaml", "sweep": [{"hardware": "mine.yaml"}]}))
    scenario = load_scenario(str(asked))
    assert scenario.hardware == str(sheet) and scenario.sweep == ({"hardware": str(sheet)},)
    sheet.unlink()
    assert load_scenario(str(asked)).hardware == "mine.yaml"


def test_parallelism_profile_and_skew_reach_the_set_up():
    parallel = {"tp": 4, "pp": 2}
    scenario = load_scenario("live-cpu").with_value("parallel", parallel).with_value("engine.profile", "eager")
    setup = scenario.with_value("expert_skew", 0.5).setup
    assert (setup.parallel, setup.profile, setup.expert_skew) == (Parallelism(tp=4, pp=2), "eager", 0.5)


def test_the_baseline_of_a_scenario_lacks_the_usual_techniques_that_it_lists():
    plain = load_scenario("live-cpu").with_techniques(())
    assert plain.setup.fused_attention
    listed = plain.with_value("techniques", [{"name": "flash_attention"}, {"name": "int8_weights"}])
    assert listed.setup.fused_attention
    baseline = listed.with_techniques(())
    assert not baseline.setup.fused_attention
    flash, int8 = listed.techniques
    assert not baseline.with_techniques((int8,)).setup.fused_attention
    assert baseline.with_techniques((flash,)).setup.fused_attention
    assert parse_scenario(yaml.safe_load(baseline.to_yaml())).setup == baseline.setup


def test_an_unknown_field_is_answered_with_those_that_there_are_the_most_alike_first():
    said = refused(MINIMAL | {"engine": {"max_num_seq": 8}, "slo": {"ttft": 1}})
    assert "'engine.max_num_seq' and 'slo.ttft' are unknown" in said
    assert "'engine' has max_num_seqs, " in said and "'slo' has ttft_s, " in said
    said = refused(MINIMAL | {"techniques": [{"name": "eagle", "gamma": 3}]})
    assert "'techniques.0' has " in said and "depth" in said
    with pytest.raises(MemboundError, match=r"did you mean 'max_num_seqs'.*'engine' has max_num_seqs, "):
        parse_scenario(MINIMAL).with_value("engine.max_num_seq", 8)
    with pytest.raises(MemboundError, match=r"'cluster' is empty; give all of 'cluster' instead"):
        parse_scenario(MINIMAL).with_value("cluster.router", "random")


def with_arrivals(arrivals: dict) -> dict:
    return MINIMAL | {"workload": MINIMAL["workload"] | {"arrivals": arrivals}}


def test_a_path_is_what_set_takes_without_the_tags_of_unions():
    said = refused(with_arrivals({"kind": "closed_loop", "concurrency": "x"}))
    assert "'workload.arrivals.concurrency' is 'x'" in said
    think = {"kind": "exponential", "mean_s": "x"}
    said = refused(with_arrivals({"kind": "closed_loop", "concurrency": 1, "think": think}))
    assert "'workload.arrivals.think.mean_s' is 'x'" in said


@pytest.mark.parametrize(
    ("arrivals", "field"),
    [
        ({"kind": "sine"}, "arrivals"),
        ({"rate_rps": 5}, "arrivals"),
        ({"kind": "sinus"}, "arrivals"),
        ({"kind": "closed_loop", "concurrency": 1, "think": 5}, "think"),
    ],
)
def test_a_field_of_several_shapes_shows_one_that_is_taken(arrivals: dict, field: str):
    said = refused(with_arrivals(arrivals))
    example = yaml.safe_load(said.partition("for example ")[2])
    right = example["arrivals"] if field == "arrivals" else arrivals | example
    assert list(example) == [field] and parse_scenario(with_arrivals(right))


def test_a_part_that_may_be_empty_is_shown_empty():
    assert "for example disaggregation: {}" in refused(MINIMAL | {"engine": {"disaggregation": True}})


def test_a_list_is_not_blamed_for_its_items_and_the_right_name_is_said():
    said = refused(MINIMAL | {"cluster": {"groups": [{"device": "H100-SXM5"}]}})
    assert "'cluster.groups.0.device' (meant: hardware) is unknown" in said
    assert "'cluster.groups.0' has " in said and "also" not in said


def test_every_problem_is_named_in_plain_words():
    said = refused(MINIMAL | {"slo": None, "repeats": "many", "engine": {"block_size": None}})
    for part in (
        "'slo' is empty: give its fields",
        "'repeats' is 'many': give a whole number",
        "'engine.block_size' is empty: give a whole number",
    ):
        assert part in said
    groups = refused(MINIMAL | {"cluster": {"router": "random", "groups": []}})
    assert "'cluster.groups' is []: give at least 1 of them" in groups
    for sentence in (said, groups):
        assert not any(word in sentence for word in ("None", "NoneType", "tuple", "dict", "instance", "validation"))


@pytest.mark.parametrize(("levels", "seconds"), [(7, 1.0), (9, 1.0), (60, 1.0)])
def test_aliases_that_grow_without_end_are_refused_at_once(tmp_path, levels, seconds):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    bomb = tmp_path / "bomb.yaml"
    bomb.write_text("\n".join([*lines, f"name: *a{levels - 1}"]))
    before = time.process_time()
    with pytest.raises(MemboundError, match="aliases") as caught:
        load_scenario(str(bomb))
    assert time.process_time() - before < seconds and len(str(caught.value)) < 400


def test_a_few_aliases_are_read_and_values_are_shown_short():
    asked = parse_yaml("a: &a {kind: fixed, tokens: 8}\nb: *a\nc: *a", "it")
    assert asked["b"] == asked["c"] == {"kind": "fixed", "tokens": 8}
    said = refused(MINIMAL | {"repeats": [[["x" * 1000] * 10] * 10] * 10})
    assert len(said) < 300


def test_seats_that_nobody_names_are_those_of_engines_on_that_hardware():
    def seats(**fields):
        return parse_scenario(MINIMAL | fields).seats

    assert seats(hardware="local") == 16
    assert seats(hardware="H100-SXM5") == seats(hardware="local-gpu") == 256
    assert seats(hardware="H100-SXM5", parallel={"dp": 32, "ep": 32}) == 32 * 256, "each dp rank has its scheduler"
    assert seats(hardware="H100-SXM5", engine={"max_num_seqs": 5}) == 5
    moved = parse_scenario(MINIMAL | {"hardware": "local"}).with_value("hardware", "H100-SXM5")
    assert moved.seats == 256, "a default does not stay behind when the hardware changes"


def test_shipped_scenarios_name_their_seats():
    for name in shipped_scenarios():
        assert load_scenario(name).engine.max_num_seqs is not None


def test_a_scenario_comes_through_a_pipe(tmp_path: Path) -> None:
    """As `membound predict <(...)` gives it; text that is none is a sentence there too."""
    pipe, shipped = tmp_path / "pipe", shipped_scenarios()["plan-70b"]
    os.mkfifo(pipe)

    def told(content: bytes) -> threading.Thread:
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        return writer

    writer = told(shipped.encode())
    assert load_scenario(str(pipe)) == load_scenario("plan-70b")
    writer.join()
    writer = told(b"\xff\xfe")
    with pytest.raises(MemboundError, match="UTF-8"):
        load_scenario(str(pipe))
    writer.join()


@pytest.mark.parametrize("weights", ["random", "pretrained", "~/mine", "models/mine", "mine.gguf"])
def test_weights_are_a_choice_or_a_path(weights: str) -> None:
    asked = load_scenario("plan-70b")
    assert asked.with_value("weights", weights).weights == weights
    with pytest.raises(MemboundError, match=r"field 'weights' is 'pretraind'.*pretrained, or the path"):
        asked.with_value("weights", "pretraind")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slo:\n\tttft_s: 1\n", "at line 2: indent with spaces, not with tabs"),
        ("model: @llama\n", "at line 1: quote the text that begins with '@'"),
        ("name: a: b\n", "at line 1: check the indentation, and quote a text that has a colon"),
        ("slo:\n  ttft_s: 1\n tpot_s: 2\n", "at line 3: check the indentation against the lines above"),
        ("techniques: [w8a8, eagle\n", "at line 2: a comma or a closing ] is missing"),
        ("name: 'x\n", "at line 2: a quotation mark is not closed"),
        ("name: *b\n", "at line 1: quote *b, or name with &b what it repeats"),
        ("name: !!python/object:os.x []\n", "at line 1: remove the tag"),
    ],
)
def test_what_yaml_cannot_read_says_what_to_do(text: str, says: str) -> None:
    with pytest.raises(MemboundError, match=re.escape(f"it is not valid YAML {says}")):
        parse_yaml(text, "it")
