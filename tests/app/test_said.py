"""Is whatever a worker says of its progress, or refuses, said in Chinese too?"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from membound.app import judged
from membound.app.i18n import Translate, sentences
from membound.app.views import validate
from membound.app.views.said import said
from membound.roofline.hardware import catalog
from membound.roofline.scenario import Slo
from membound.roofline.techniques import TECHNIQUES
from membound.simulator.load import Lengths
from membound.simulator.planning.demand import Demand
from membound.simulator.planning.sensitivity import changes_of

ROOT = Path(__file__).parents[2]
# what jobs of the dashboard run, as far as it tells how far it is
SPEAKERS = [
    *(ROOT / "app" / name for name in ("compare.py", "deployments.py", "serving.py", "tasks.py", "worker.py")),
    *sorted((ROOT / "app" / "experiments").glob("*.py")),
    *(ROOT / "runtime" / "calibration" / name for name in ("calibrate.py", "passes.py")),
    *(
        ROOT / "simulator" / name
        for name in (
            "planning/planner.py",
            "planning/most.py",
            "stacking/stacking.py",
            "sweeping/sweep.py",
            "workers.py",
        )
    ),
]
# what refuses a technique on a card, in a stack or among the advisor's moves
REFUSERS = [
    *sorted((ROOT / "roofline" / "techniques").glob("*.py")),
    *(ROOT / "roofline" / name for name in ("speculation/draft_models.py", "speculation/drafters.py")),
    ROOT / "roofline" / "times" / "calibrated.py",
]
SAYS = {"progress", "report", "Part", "LiveObserver", "_measure"}
EN, ZH = Translate("en"), Translate("zh")
QUICK_NOTE = sentences("en")["says.quickly"]
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def sentences_of(source: Path, says: Collection[str] = frozenset(SAYS)) -> Iterator[str]:
    """Every literal sentence that is passed on, as progress if not said otherwise, with a number for what is filled."""
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [*node.args, *(keyword.value for keyword in node.keywords)] if name in says else []
            for value in given:
                yield from _sentences(value)
        elif isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "message" for target in node.targets):
            yield from _sentences(node.value)


def _sentences(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Tuple):
        for part in value.elts:
            yield from _sentences(part)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else _filled(part) for part in value.values)


def _filled(part: ast.expr) -> str:
    """What stands in a placeholder: one of the words to choose from, if it says which, else a number."""
    chosen = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(chosen, ast.IfExp):
        return next(_sentences(chosen.body), "7")
    return "7"


def test_speakers_are_heard() -> None:
    heard = [sentence for source in SPEAKERS for sentence in sentences_of(source)]
    assert {"predicting", "loading 7", "simulating 7", "waiting for run 7 to finish"} <= set(heard) and len(heard) > 15


@pytest.mark.parametrize("source", SPEAKERS, ids=lambda path: path.stem)
def test_every_sentence_of_a_worker_is_said_in_chinese(source: Path) -> None:
    for sentence in sentences_of(source):
        if re.search(r"[a-z]{2,}", sentence):
            told = said(sentence, ZH)
            assert CHINESE.search(told) or not re.search(r"[a-z]{2,}", told), sentence
            assert said(sentence, EN) == sentence


@pytest.mark.parametrize("source", REFUSERS, ids=lambda path: path.stem)
def test_every_refusal_of_a_technique_is_said_in_chinese(source: Path) -> None:
    for sentence in sentences_of(source, {"MemboundError"}):
        assert CHINESE.search(said(sentence, ZH)), sentence
        assert said(sentence, EN) == sentence


def test_refusals_are_heard() -> None:
    assert sum(len(list(sentences_of(source, {"MemboundError"}))) for source in REFUSERS) > 12


FORMS = [
    *({"name": name} for name in TECHNIQUES),
    {"name": "w8a8", "format": "int8"},
    {"name": "weight_quantization", "format": "int3_g64"},
    *({"name": "kv_quantization", "format": name} for name in ("int4", "kivi2", "kivi4")),
    {"name": "medusa", "acceptance": "typical"},
    *({"name": "kv_eviction", "policy": name} for name in ("streaming", "h2o", "quest")),
]


@pytest.mark.parametrize("fields", FORMS)
def test_what_a_technique_costs_is_said_in_chinese(fields: dict[str, str]) -> None:
    note = TECHNIQUES[fields["name"]](**fields).quality.note
    assert CHINESE.search(said(note, ZH)), note


def test_what_would_change_a_plan_is_said_in_chinese() -> None:
    slo, lengths = Slo(ttft_s=1, tpot_s=1, e2e_s=9), Lengths.fixed(100, 10)
    changes = [*changes_of(Demand(2.0, None, lengths, slo)), *changes_of(Demand(None, 4.0, lengths, slo))]
    assert len(changes) == 16
    for change in changes:
        told = said(change.name, ZH)
        assert CHINESE.search(told) and told.endswith(f"{change.name[-5:]}"), change.name


def test_what_a_sentence_holds_is_said_too_and_names_are_not() -> None:
    linears = "int8 linears with weights from a cache, pass 1 of 2"
    assert not re.search(r"weights|cache|pass", said(linears, ZH)) and "int8" in said(linears, ZH)
    assert "memory" in said("measuring memory", ZH), "a scenario's name is no sentence"
    assert said("point 2 of 9, 3 of 8", ZH) == "第 2 / 9 点，3 / 8"
    assert said("5 of 9", ZH) == "5 / 9" and said("queen of spades", ZH) == "queen of spades"
    assert said("something that nobody expected", ZH) == "something that nobody expected"
    assert said("", ZH) == ""


@pytest.mark.parametrize(
    "note",
    [
        "kernels cpp (C++ kernels (512-bit vectors), torch's threads), 2 threads",
        "load average 2.0 at the end, threads held up by other programs 1 times",
        "the bounds of steps are attributed by the roofline of their shapes",
        "21 runs were repeated because other programs held up their threads",
        "10 of 135 cells stayed disturbed by other programs: close them",
        "4 runs were repeated because memory was not as when this machine was calibrated",
        "3 of 135 cells had other memory than the calibration: run `membound calibrate` again",
        "memory gave 64 GB/s before the run and 36 after it, 35 when this machine was calibrated: predictions are for "
        "that",
        "memory changed between states of this machine: 3 parts were also measured in another than that of 35 GB/s",
        "SmolLM2-135M, pretrained weights, Intel(R) Xeon(R) Processor, 2 threads, 3 repeats",
        "requests were turned away; request 7, because 40 requests wait, and at most 32 may",
        "requests were turned away; request 0, because 9000 tokens are more than the 8192 of the model's context; give "
        "shorter requests",
        "of the trace the first 1,048,576 rows are looked at; workload.arrivals.start_s begins later",
        "up to 4,000 requests of the trace are simulated; workload.requests names another number",
        "the requests cover 09:00 to 09:40 of the day: 3.2 arrivals/s, of a mean of 2; workload.arrivals.start_s says "
        "where the run begins, workload.requests how far it gets",
        "times of steps are within ±12%: from this machine's calibration",
        "times of steps are within ±18%: from kernels measured on H100-SXM5",
        "times of steps are within ±46%: no kernel was measured on MI300X, all are inherited from MI250X, any",
        "times of steps are within ±21%: 60% from kernels measured on L4, the rest inherited from Ada",
        "prefill engines busy 81% of the time, decode engines 40%, links 3%",
        QUICK_NOTE,
    ],
)
def test_what_is_noted_of_a_run_is_said_in_chinese(note: str) -> None:
    told = said(note, ZH)
    assert CHINESE.search(told) and said(note, EN) == note
    assert sorted(re.findall(r"\d+", told)) == sorted(re.findall(r"\d+", note))
    assert not re.search(r"held up|repeated|attributed|stayed|turned away|because|cover|measured|memory|tokens", told)


def test_who_lists_a_price_is_said_in_chinese() -> None:
    prices = [device.price for device in catalog().values() if device.price is not None]
    assert prices
    for price in prices:
        told = said(price.source, ZH)  # names, and titles of articles, stay as they are
        assert not re.search(r"transcribed|recorded|on demand|starting|whole instance|as of", told), told


def test_the_rows_of_the_published_promises_have_chinese_names() -> None:
    rows = judged.published()[0].table["what"]
    assert all(CHINESE.search(said(what, ZH)) for what in rows), [what for what in rows if said(what, ZH) == what]


def test_every_word_of_the_published_tables_but_names_is_said_in_chinese() -> None:
    untold = set()
    for found in judged.published()[1:]:
        names = {"engine", "peer"} & set(found.table.columns)
        cells = found.table.drop(columns=[*names]).to_numpy().ravel()
        for cell in (*found.table.columns, *cells):
            told = validate.told(str(cell), ZH)
            if re.search(r"[a-z]{3}", told) and not CHINESE.search(told):
                untold.add(cell)
    assert untold <= {"decode", "prefill"}, "terms that stay English"


def test_every_section_of_the_published_validation_has_a_title_in_both_languages() -> None:
    assert {found.title for found in judged.published()[1:]} == set(validate.SECTIONS)
    assert all(CHINESE.search(ZH(f"validate.section_{section}")) for section in validate.SECTIONS.values())
