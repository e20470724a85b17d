"""Do Techniques, Stack and Advisor answer at any operating point, beside measurements, and say what cannot be?"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from pages import open_page, words_of
from streamlit.testing.v1 import AppTest

from membound.app import jobs
from membound.app.engine_choice import (
    CACHES,
    WEIGHTS,
    WORKLOAD,
    EngineChoice,
    contexts_of,
    effects_of,
    lengths_at,
    not_to_combine,
)
from membound.app.figures import stack as stack_figures
from membound.app.figures import techniques as figures
from membound.app.i18n import LANGUAGES, Translate, sentences
from membound.app.stacks import parse_techniques, stack_document
from membound.app.store import Store
from membound.app.tasks import run_stack
from membound.app.views import background
from membound.app.views.measured import measured_gains, nearest
from membound.app.views.technique_sweep import MOST_SWEPT
from membound.app.views.verdicts import verdict_of
from membound.app.worker import TASKS
from membound.roofline.errors import MemboundError
from membound.roofline.models import catalog, get_model
from membound.roofline.scenario import load_scenario, parse_scenario
from membound.roofline.techniques import TECHNIQUES, Eagle, Int8Weights
from membound.simulator.advice.advisor import advise

PAGES = ("techniques", "stack", "advisor")
ENGINE = EngineChoice(
    "Llama-3.1-8B", "H100-SXM5", 1, "graphs", batch=8, context=2048, metric="output_tokens_per_s", task="chat"
)
T = Translate("en")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store on a calibrated machine, which starts no worker and no process."""
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    asked: dict[object, Future[Any]] = {}

    def ask(key: object, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        known = (function.__qualname__, key)
        if known not in asked:
            asked[known] = _asked_here(key, function, *arguments)
        return asked[known]

    monkeypatch.setattr(background, "ask", ask)
    monkeypatch.setattr(jobs, "submit", lambda store, kind, spec, owner="": store.submit_job(kind, spec, owner))
    (tmp_path / "calibration").mkdir()
    shutil.copy(Path(__file__).with_name("calibration.json"), tmp_path / "calibration" / "local.json")
    return Store(tmp_path)


def _asked_here(key: object, function: Callable[..., Any], *arguments: object) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function(*arguments))
    except MemboundError as error:
        future.set_exception(error)
    return future


def _measured(store: Store, **rows: tuple[int, float]) -> None:
    """A comparison on this machine: for each technique its users and its measured gain of tokens/s."""
    comparisons = [
        {
            "technique": name, "baseline": "plain engine", "metric": "output_tokens_per_s", "unit": "ratio",
            "point": {"workload.arrivals.concurrency": users}, "predicted": gain, "low": gain, "high": gain,
            "measured": gain, "spread": 0.02, "error": 0.0, "verdict": "gain", "lossless": True, "quality": None,
            "bottleneck_before": "memory_weights", "bottleneck_after": "overhead", "samples": [], "conditions": "here",
        }
        for name, (users, gain) in rows.items()
    ]  # fmt: skip
    store.save_run(
        kind="compare", label="live-cpu", digest="d", scenario_yaml=load_scenario("live-cpu").to_yaml(),
        summary={"rows": len(rows)}, comparison={"comparisons": comparisons},
    )  # fmt: skip


# --- all three ---


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("language", list(LANGUAGES))
def test_a_page_answers_from_an_empty_start_in_both_languages(store: Store, name: str, language: str) -> None:
    at = open_page(name, lang=language)
    assert not at.error and at.title[0].value == Translate(language)(f"{name}.title")
    assert "×" in at.header[0].value


@pytest.mark.parametrize(
    ("name", "model", "device"),
    [
        ("techniques", "DBRX", "MI300X"),
        ("techniques", "RWKV-7-1.5B", "RTX-4090"),
        ("stack", "Mamba-2-130M", "H100-SXM5"),
        ("stack", "GPT-2", "local"),
        ("advisor", "DeepSeek-V3", "A10G"),
    ],
)
def test_a_page_stands_any_model_on_any_device(store: Store, name: str, model: str, device: str) -> None:
    at = open_page(name, model=model, hw=device, batch="256", ctx="512")
    assert at.header or at.error or at.warning


@pytest.mark.parametrize("name", PAGES)
def test_a_model_that_does_not_fit_is_said_with_what_would_help(store: Store, name: str) -> None:
    at = open_page(name, model="Llama-3.1-70B", hw="H100-SXM5")
    assert "does not fit" in words_of(at)
    if name != "stack":  # four bits as engines read them
        assert "weight quantization, AWQ" in words_of(at)


@pytest.mark.parametrize("name", PAGES)
def test_a_machine_that_was_not_calibrated_is_one_sentence(store: Store, name: str) -> None:
    (store.home / "calibration" / "local.json").unlink()
    at = open_page(name, hw="local")
    assert "calibrat" in at.error[0].value and T(f"{name}.error_help") in words_of(at)


@pytest.mark.parametrize("name", PAGES)
def test_a_link_reproduces_the_point(store: Store, name: str) -> None:
    at = open_page(name, model="Qwen2.5-7B", hw="A100-SXM4-80GB", batch="64", ctx="4096", profile="vllm", gain="tpot_s")
    assert at.selectbox(key="model").value == "Qwen2.5-7B" and at.selectbox(key="profile").value == "vllm"
    assert "Qwen2.5-7B on A100-SXM4-80GB, batch 64, context 4,096" in words_of(at)


# English that stays: names of papers and tables
SOURCES = ("Wanda's table; claims A2-16 and A2-18",)
ENGLISH = re.compile(r"(?:[A-Za-z][\w'-]*[ ,;:]+){3,}[A-Za-z][\w'-]*")


def _all_words(at: AppTest) -> list[str]:
    """Whatever a page shows, its tables and the names of its choices too."""
    shown = [str(element.value) for kind in (at.title, at.header, at.subheader, at.markdown) for element in kind]
    shown += [str(element.value) for kind in (at.caption, at.info, at.warning, at.error) for element in kind]
    shown += [str(element.label) for kind in (at.button, at.selectbox, at.number_input) for element in kind]
    for table in at.dataframe:
        shown += [*map(str, table.value.columns), *map(str, table.value.to_numpy().ravel())]
    return shown


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(
    ("model", "device"), [("Llama-3.1-8B", "H100-SXM5"), ("DeepSeek-V3", "H100-SXM5"), ("GPT-2", "local")]
)
def test_a_chinese_page_has_no_english_sentence(store: Store, name: str, model: str, device: str) -> None:
    at = open_page(name, lang="zh", model=model, hw=device, stack="eagle,kv_eviction,mtp,sparsity_2_4")
    left = [words for words in _all_words(at) if words not in SOURCES and ENGLISH.search(words)]
    assert not left, left


def test_every_technique_of_the_registry_is_explained_in_both_languages() -> None:
    for language in LANGUAGES:
        assert {f"techniques.about_{name}" for name in TECHNIQUES} <= set(sentences(language))


def test_contexts_leave_room_for_the_longest_prompt_and_output() -> None:
    for model in catalog().values():
        longest = lengths_at(contexts_of(model)[-1])
        assert longest.prompt_tokens + longest.output_tokens <= model.max_context


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_that_it_computes_and_then_shows_what_came(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    coming: dict[object, Future[Any]] = {}
    asked: dict[object, Callable[[], Any]] = {}

    def ask(key: object, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        asked.setdefault((function, key), lambda: function(*arguments))
        return coming.setdefault((function, key), Future())

    monkeypatch.setattr(background, "ask", ask)
    monkeypatch.setattr(background, "WAIT_S", 0.0)
    at = open_page(name)
    assert T("state.computing") in words_of(at) and not at.header
    while pending := [key for key, future in coming.items() if not future.done()]:
        for key in pending:
            coming[key].set_result(asked[key]())
        at.run()
    assert not at.exception and T("state.computing") not in words_of(at) and "×" in at.header[0].value


# --- Techniques ---


def test_a_newcomer_reads_whether_speculation_helps_at_batch_32(store: Store) -> None:
    answers = {batch: words_of(open_page("techniques", batch=str(batch))) for batch in (32, 1024)}
    asked = "**Does speculation help at batch {}?**"
    (line,) = (line for line in answers[32].splitlines() if asked.format(32) in line)
    assert "▲ Yes: 1." in line and "guesses a step" in line
    assert asked.format(1024) in answers[1024]


def test_content_that_is_easy_to_guess_makes_speculation_gain_more(store: Store) -> None:
    gains = {}
    for task in ("chat", "retrieval"):
        choice = EngineChoice("Llama-3.1-8B", "H100-SXM5", 1, "graphs", 8, 2048, "tpot_s", task)
        gains[task] = effects_of(choice, ("ngram_speculation",))["ngram_speculation"].gain("tpot_s") or 0.0
    assert gains["retrieval"] > gains["chat"] > 1.0
    assert "acceptance as measured for chat" in words_of(open_page("techniques"))
    assert "acceptance assumed" in words_of(open_page("techniques", task="any"))


def test_a_chosen_format_is_costed_and_named_and_in_the_url(store: Store) -> None:
    at = open_page("techniques", hw="B200-SXM", batch="256", weights="nvfp4/nvfp4")
    assert "weight quantization, nvfp4 + nvfp4" in words_of(at)
    at.selectbox(key="weights").set_value("fp8").run()
    assert "weight quantization, fp8" in words_of(at) and at.query_params["weights"] in ("fp8", ["fp8"])
    assert "weight quantization, kivi2" not in words_of(open_page("techniques", weights="kivi2"))


@pytest.mark.parametrize("device", ["H100-SXM5", "B200-SXM", "MI300X", "A100-SXM4-80GB"])
def test_every_format_that_a_page_offers_is_costed_or_refused_in_a_sentence(device: str) -> None:
    base = EngineChoice("Llama-3.1-8B", device, 1, "graphs", 8, 2048, "tpot_s")
    choices = [replace(base, weights=name) for name in WEIGHTS] + [replace(base, kv=name) for name in CACHES]
    for choice in choices:
        for effect in effects_of(choice, ("weight_quantization", "kv_quantization")).values():
            assert effect.gain("tpot_s") or (effect.reason and "\n" not in effect.reason)


def test_weights_that_are_multiplied_with_narrow_activations_are_named_and_said_to_be_faster(store: Store) -> None:
    """int4 weights with int8 activations: on a device with an int8 rate a prompt is not slower than with bf16 ones."""
    words = words_of(open_page("techniques", hw="A10G", weights="int4/int8", part="cards"))
    assert "weight quantization, int4 + int8" in words
    assert T("techniques.about_weight_quantization_multiplied") in words
    unpacked = words_of(open_page("techniques", hw="A10G", weights="int4", part="cards"))
    assert T("techniques.about_weight_quantization") in unpacked
    base = EngineChoice("Llama-3.1-8B", "A10G", 1, "graphs", 32, 2048, "output_tokens_per_s")
    alone, multiplied = (
        effects_of(replace(base, weights=name), ["weight_quantization"])["weight_quantization"]
        for name in ("int4", "int4/int8")
    )
    assert (multiplied.gain("output_tokens_per_s") or 0) > (alone.gain("output_tokens_per_s") or 0)


def test_only_the_part_that_is_looked_at_is_drawn_and_it_is_in_the_url(store: Store) -> None:
    at = open_page("techniques")
    assert not at.multiselect and at.toggle(key="techniques_gains_table")
    at.segmented_control(key="part").set_value("sweep").run()
    assert at.multiselect(key="sweep") and at.query_params["part"] in ("sweep", ["sweep"])
    assert "techniques_gains_table" not in [toggle.key for toggle in at.toggle]


def test_the_sweep_says_where_fixed_drafts_stop_to_pay(store: Store) -> None:
    assert "pays up to batch" in words_of(open_page("techniques", part="sweep", sweep="eagle"))
    assert "pays up to batch" in words_of(open_page("techniques", part="sweep", sweep="weight_quantization"))
    context = words_of(open_page("techniques", part="sweep", sweep="kv_quantization", over="ctx", batch="32"))
    assert "at every context" in context or "pays from context" in context


def test_a_technique_that_cannot_be_swept_is_one_sentence(store: Store) -> None:
    at = open_page("techniques", part="sweep", sweep="mtp")
    assert "has no module for multi-token prediction" in at.warning[0].value


def test_a_link_sweeps_each_technique_once_and_no_more_than_can_be_told_apart(store: Store) -> None:
    at = open_page("techniques", part="sweep", sweep=",".join(("eagle", *TECHNIQUES)))
    assert not at.exception
    swept = at.multiselect(key="sweep").value
    assert swept[0] == "eagle" and len(swept) == len(set(swept)) == MOST_SWEPT


def test_an_empty_sweep_says_what_to_do(store: Store) -> None:
    at = open_page("techniques", part="sweep")
    at.multiselect(key="sweep").set_value([]).run()
    assert not at.exception and T("techniques.none_swept") in words_of(at)


def test_experts_are_drawn_of_a_mixture_only(store: Store) -> None:
    mixture = words_of(open_page("techniques", part="experts", model="Mixtral-8x7B", hw="H100-SXM5", tp="2", batch="1"))
    assert "uses 2 of 8 experts" in mixture and "**25 %**" in mixture
    assert "From batch 8 on" in mixture  # 1 - (1 - 2/8)^8 = 90 %
    assert "has no experts" in words_of(open_page("techniques", part="experts"))


def test_a_measured_gain_stands_beside_the_prediction(store: Store) -> None:
    _measured(store, int8_weights=(4, 1.53), ngram_speculation=(4, 1.04))
    at = open_page("techniques", model="SmolLM2-135M", hw="local", ctx="512", batch="4", part="cards")
    words = words_of(at)
    assert "Measured here: 1.53× ± 0.02 tokens/s at users: 4 (" in words and "1.04× ± 0.02" not in words
    assert "against plain engine)" in words
    at.session_state["layers"] = T("techniques.section_steps")
    assert "Measured here: 1.04× ± 0.02" in words_of(at.run())


def test_this_machine_without_measurements_says_where_to_make_them(store: Store) -> None:
    words = words_of(open_page("techniques", model="SmolLM2-135M", hw="local", ctx="512", batch="1"))
    assert T("techniques.not_measured", model="SmolLM2-135M") in words
    assert T("techniques.not_measured", model="Llama-3.1-8B") not in words_of(open_page("techniques"))


def test_a_measurement_is_of_its_model_on_this_machine_only(store: Store) -> None:
    _measured(store, int8_weights=(4, 1.53))
    assert [one.users for one in measured_gains("SmolLM2-135M", "local")] == [4]
    assert measured_gains("SmolLM2-360M", "local") == measured_gains("SmolLM2-135M", "H100-SXM5") == []


def test_the_nearest_measurement_is_the_newest_of_those_at_as_many_users(store: Store) -> None:
    _measured(store, int8_weights=(4, 1.5))
    _measured(store, int8_weights=(4, 1.6))
    _measured(store, int8_weights=(64, 1.1))
    known = measured_gains("SmolLM2-135M", "local")
    near, far = nearest(known, Int8Weights(), 5), nearest(known, Int8Weights(), 50)
    assert near is not None and near.row.measured == 1.6 and far is not None and far.users == 64
    assert nearest(known, Int8Weights(), 16, within=2.0) is None and nearest(known, Eagle(), 4) is None


def test_a_damaged_run_is_left_out(store: Store) -> None:
    _measured(store, int8_weights=(4, 1.53))
    (run,) = store.runs("compare")
    (run.folder / "scenario.yaml").write_text("name: [", encoding="utf-8")
    assert measured_gains("SmolLM2-135M", "local") == []


@pytest.mark.parametrize(
    ("gain", "error", "verdict"),
    [(1.5, 0.2, "helps"), (1.1, 0.2, "may_help"), (1.0, 0.2, "same"), (0.9, 0.2, "may_slow"), (0.5, 0.2, "slower")],
)
def test_a_verdict_is_as_sure_as_the_interval(gain: float, error: float, verdict: str) -> None:
    assert verdict_of(gain, error) == verdict


def test_the_gains_are_drawn_hollow_with_bands_and_the_measured_ones_solid() -> None:
    gains = [figures.Gain("a", 2.0, 1.7, 2.4, 1.9, 0.1), figures.Gain("b", 0.5, 0.4, 0.6)]
    fig = figures.gains_figure(gains, T)
    predicted, measured = fig.data
    assert list(predicted.x) == [0.5, 2.0] and predicted.marker.symbol == "circle-open"
    assert list(predicted.error_x.array) == pytest.approx([0.1, 0.4])
    assert list(measured.x) == [1.9] and measured.marker.symbol == "square" and measured.error_x.array[0] == 0.1
    low, high = fig.layout.xaxis.range
    assert low < math.log10(0.4) and high > math.log10(2.4)


def test_a_sweep_marks_each_crossing_and_tells_curves_apart_without_colour() -> None:
    curve = figures.Curve("a", (1, 2, 4), (2, 1, 0.5), (1.8, 0.9, 0.4), (2.2, 1.1, 0.6), (2.0,), ((2, 1.1, 0.1),))
    other = figures.Curve("b", (1, 2, 4), (1.1, 1.1, 1.1), (1, 1, 1), (1.2, 1.2, 1.2))
    fig = figures.sweep_figure([curve, other], 2, "batch", T)
    crosses = [trace for trace in fig.data if trace.marker.symbol == "x" and list(trace.x)]
    assert [list(trace.x) for trace in crosses] == [[2.0]]
    lines = [trace for trace in fig.data if trace.mode == "lines+markers"]
    assert len({trace.line.dash for trace in lines}) == len({trace.marker.symbol for trace in lines}) == 2
    assert any(trace.marker.symbol == "circle" and trace.error_y.array[0] == 0.1 for trace in fig.data)


# --- Stack ---


def _engine(batch: int = 8) -> Any:
    return parse_scenario(
        {
            "name": "engine", "model": "Llama-3.1-8B", "hardware": "H100-SXM5", "engine": {"max_num_seqs": 1024},
            "techniques": ["continuous_batching"],
            "workload": {"arrivals": {"kind": "closed_loop", "concurrency": batch}, "task": "chat", **WORKLOAD},
        }
    )  # fmt: skip


def _document(*names: str) -> dict[str, Any]:
    techniques = parse_techniques([{"name": name} for name in names])
    return stack_document(_engine(), techniques, batch=8, context=2048, metric="output_tokens_per_s")


def test_the_shares_multiply_to_the_whole_and_steps_lead_there() -> None:
    stack = _document("weight_quantization", "kv_quantization", "eagle")["stack"]
    assert math.exp(sum(stack["shapley_ln_gain"].values())) == pytest.approx(stack["together"])
    for order in ("given_order", "greedy_order"):
        assert math.prod(step["gain"] for step in stack[order]) == pytest.approx(stack["together"])
        assert stack[order][-1]["together"] == pytest.approx(stack["together"])


def test_the_engine_keeps_what_is_not_stacked() -> None:
    kept, stacked = _document("weight_quantization"), _document("continuous_batching", "weight_quantization")
    assert kept["kept"] == ["continuous_batching"] and stacked["kept"] == []
    plain = {
        name: document["stack"]["plain"]["output_tokens_per_s"] for name, document in (("k", kept), ("s", stacked))
    }
    assert plain["k"] > plain["s"]  # static batches wait for their longest output
    alone = next(step for step in stacked["stack"]["alone"] if step["technique"] == "continuous_batching")
    assert plain["s"] * alone["gain"] == pytest.approx(plain["k"])


def test_fused_attention_is_stacked_on_an_engine_without_it() -> None:
    document = _document("flash_attention")
    assert document["stack"]["together"] > 1.0 and document["kept"] == ["continuous_batching"]


def test_the_page_says_together_against_multiplied_and_where_the_bottleneck_went(store: Store) -> None:
    at = open_page("stack", batch="32")
    document = stack_document(
        _engine(), parse_techniques([{"name": n} for n in ("weight_quantization", "kv_quantization", "eagle")]),
        batch=32, context=2048, metric="output_tokens_per_s",
    )["stack"]  # fmt: skip
    assert f"without them: {document['together']:.2f}×" in at.header[0].value
    assert f"not the {document['product']:.2f}×" in at.header[0].value
    assert "What binds moves: ● reading weights" in words_of(at)


def test_what_several_techniques_make_fit_is_not_said_to_need_one_of_them(store: Store) -> None:
    words = words_of(open_page("techniques", model="Llama-3.1-70B", hw="H100-SXM5", batch="1", ctx="1024"))
    fits = T("techniques.makes_fit").replace("**", "").lstrip("▲ ")
    assert words.count(fits) > 1 and "only possible" not in words.lower()


def test_techniques_that_exclude_each_other_are_refused_in_one_sentence(store: Store) -> None:
    at = open_page("stack", stack="weight_quantization,w8a8,eagle,medusa")
    assert len(at.warning) == 2
    assert "weights cannot be awq and fp8 at once" in at.warning[0].value
    assert all("\n" not in warning.value for warning in at.warning)


def test_no_technique_asks_for_one_and_the_order_changes_the_steps_only(store: Store) -> None:
    at = open_page("stack", batch="32")
    header = at.header[0].value
    at.segmented_control(key="added").set_value("given").run()
    assert at.header[0].value == header and at.query_params["added"] in ("given", ["given"])
    at.pills(key="stack").set_value([]).run()
    assert not at.exception and T("stack.empty") in words_of(at)


def test_many_techniques_are_a_job_whose_answer_the_page_finds_again(store: Store) -> None:
    query = {"stack": "weight_quantization,kv_quantization,eagle,flash_attention,continuous_batching"}
    at = open_page("stack", **query)
    assert not any("Gain in" in header.value for header in at.header)
    at.button(key="ask_stack").click().run()
    (job,) = store.jobs("stack")
    assert TASKS["stack"].endswith(":run_stack")
    store.start_job(job.id)
    result = run_stack(job.spec, _Context(store, job.id))  # type: ignore[arg-type]
    store.finish_job(job.id, "done", result=result)
    again = open_page("stack", **query)
    assert "Gain in" in again.header[0].value and not again.error


class _Context:
    """What a task sees of its job."""

    def __init__(self, store: Store, job_id: str) -> None:
        self.store, self.job_id = store, job_id

    def progress(self, fraction: float, message: str = "") -> None:
        pass

    def check_cancelled(self) -> None:
        pass


def test_what_two_runs_measured_together_stands_on_the_last_row(store: Store) -> None:
    scenario = load_scenario("live-cpu").model_copy(update={"sweep": ()})
    one = {"mean": 0.02}
    for names, rate in ((("continuous_batching",), 100.0), (("continuous_batching", "int8_weights"), 150.0)):
        techniques = tuple(parse_techniques([{"name": name} for name in names]))
        store.save_run(
            kind="measure", label="r", digest="d", summary={"tpot_s": one, "output_tokens_per_s": rate},
            scenario_yaml=scenario.model_copy(update={"techniques": techniques}).to_yaml(),
        )  # fmt: skip
    query = {"model": "SmolLM2-135M", "hw": "local", "batch": "4", "ctx": "512"}
    assert "Measured: run" in words_of(open_page("stack", stack="int8_weights", **query))
    assert "Nothing measured" in words_of(open_page("stack", stack="int8_weights,ngram_speculation", **query))


def test_the_waterfall_begins_and_ends_where_its_rows_say() -> None:
    levels = [
        stack_figures.Level("plain", 0.0, 100.0, "memory_weights", "1.00×"),
        stack_figures.Level("+ a", 100.0, 180.0, "compute", "1.80×"),
        stack_figures.Level("+ b", 180.0, 150.0, "drafting", "0.83×"),
        stack_figures.Level("all", 0.0, 150.0, "drafting", "1.50×"),
    ]
    fig = stack_figures.waterfall_figure(levels, 170.0, 140.0, 0.1, "tokens/s", T)
    bars = {
        row: (base, base + width) for bar in fig.data if isinstance(bar, go.Bar) for row, base, width in _spans(bar)
    }
    assert bars["+ a"] == (100.0, 180.0) and bars["+ b"] == (150.0, 180.0) and bars["all"] == (0.0, 150.0)
    assert bars[T("stack.multiplied")] == (0.0, 170.0)
    patterns = {bar.marker.pattern.shape for bar in fig.data if isinstance(bar, go.Bar) and bar.marker.pattern.shape}
    assert len(patterns) == 2  # compute and drafting; reading weights is plain
    assert any(trace.name == T("measured") and list(trace.x) == [140.0] for trace in fig.data)


def _spans(bar: Any) -> list[tuple[str, float, float]]:
    bases = bar.base if bar.base is not None else [0.0] * len(bar.x)
    return list(zip(bar.y, bases, bar.x, strict=True))


# --- Advisor ---


def test_the_advice_is_that_of_the_command(store: Store) -> None:
    at = open_page("advisor", batch="32")
    advice = advise(_engine(32), batch=32, context=2048, metric="output_tokens_per_s")
    best = next(one for one in advice.moves if one.gain and one.move.technique and one.move.state != "on")
    assert best.gain is not None
    assert f"{best.gain:.2f}×" in at.header[0].value and best.move.title in at.header[0].value
    assert "of the time is ● reading weights" in at.header[0].value
    assert f"**1. {best.move.title}" in words_of(at)


def test_what_the_engine_has_is_compared_with_the_engine_without_it(store: Store) -> None:
    at = open_page("advisor", batch="32", has="continuous_batching,eagle")
    at.toggle(key="advisor_gains_table").set_value(True).run()
    (moves,) = (frame.value for frame in at.dataframe if T("advisor.move") in frame.value)
    rows = moves.set_index(T("advisor.move"))
    eagle = next(name for name in rows.index if name.startswith("EAGLE"))
    assert rows.loc[eagle, T("column.baseline")] == "one token a step"
    assert any(name.startswith("Medusa") for name in rows.index)


def test_an_impossible_engine_is_one_sentence(store: Store) -> None:
    at = open_page("advisor", has="continuous_batching,weight_quantization,w8a8")
    assert "weights cannot be int4 and fp8 at once" in at.error[0].value and "\n" not in at.error[0].value


def test_what_excludes_each_other_is_named_and_more_devices_are_no_technique(store: Store) -> None:
    words = words_of(open_page("advisor"))
    assert T("advisor.exclude") in words and "Apart from techniques, 2 devices" in words
    assert f"**1. {T('advisor.more_devices', devices=2)}" not in words


def test_moves_are_the_same_whether_pairs_are_costed_or_not(store: Store) -> None:
    engine, asked = _engine(8), {"batch": 8, "context": 2048, "metric": "output_tokens_per_s"}
    alone, whole = advise(engine, pairs=False, **asked), advise(engine, **asked)
    assert alone.moves == whole.moves and alone.now == whole.now and alone.rules == whole.rules
    assert not alone.conflicts and whole.conflicts
    named = [one["moves"] for one in not_to_combine(ENGINE)]
    assert named == [list(one.moves) for one in whole.conflicts]


def test_the_model_of_the_catalog_that_a_page_names_is_known() -> None:
    for name in ("Mixtral-8x7B", "DeepSeek-V3"):
        assert name in T("techniques.no_experts", model="x") and get_model(name)
