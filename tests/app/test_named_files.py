"""Does a page open only those files of this machine that its owner lets it open?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import open_page

from membound.app import named_files, uploads
from membound.app.i18n import Translate
from membound.app.named_files import check_files
from membound.app.store import Store
from membound.app.views import scenario_choice
from membound.app.views.said import said
from membound.roofline.errors import MemboundError
from membound.roofline.scenario import load_scenario, shipped_scenarios

REFUSED = "a page opens files below"
# A config.json that would make a model, so that only the rule keeps it from being read.
ELSEWHERE = "/somewhere/else/config.json"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(named_files.ALLOWED_VARIABLE, "")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Store(tmp_path / "home")


def _with(field: str, value: Any) -> dict[str, Any]:
    """A scenario's document in which a dotted field holds the value."""
    document: dict[str, Any] = load_scenario("plan-70b").model_dump(mode="json")
    *parents, last = field.split(".")
    node = document
    for key in parents:
        node = node[key]
    node[last] = value
    return document


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workload.prompts", {"kind": "text", "file": "/etc/passwd.jsonl"}),
        ("workload.prompts", {"kind": "text", "file": "../../secrets"}),
        ("workload.prompts", {"kind": "trace", "file": "../secrets.csv"}),
        ("model", "/tmp/config.json"),
        ("model", "mine.gguf[:4]"),
        ("weights", "~/models"),
        ("weights", "mine.GGUF"),
        ("hardware", "mine.yaml"),
        ("sweep", [{"hardware": "~/device.yaml"}]),
        ("sweep", [{"workload.prompts.file": "/etc/shadow.jsonl"}]),
        ("techniques", [{"name": "eagle", "head": "/tmp/head.safetensors"}]),
        ("techniques", [{"name": "draft_model", "draft": "/tmp/config.json"}]),
        ("variants", [{"name": "v", "techniques": [{"name": "medusa", "head": "../head.safetensors"}]}]),
        ("model", "\0"),
    ],
)
def test_a_scenario_of_a_page_names_no_file(store: Store, field: str, value: Any) -> None:
    with pytest.raises(MemboundError, match=REFUSED):
        check_files(_with(field, value), store)


def test_nor_a_folder_that_lies_where_the_server_was_started(store: Store) -> None:
    Path("weights-of-mine").mkdir()
    with pytest.raises(MemboundError, match=REFUSED):
        check_files({"model": "weights-of-mine"}, store)


@pytest.mark.parametrize("name", shipped_scenarios())
def test_what_ships_names_nothing_that_is_refused(store: Store, name: str) -> None:
    check_files(load_scenario(name).model_dump(mode="json"), store)


def test_models_of_the_home_and_of_allowed_folders_may_be_named(store: Store, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    inside = [str(store.home / named_files.MODELS / "a.gguf"), str(allowed / "b" / "config.json[:2]")]
    check_files({"model": inside[0]}, store)
    with pytest.raises(MemboundError, match=REFUSED):
        check_files({"model": inside[1]}, store)
    named_files.allow([allowed])
    check_files({"model": inside[0], "techniques": [{"draft": inside[1]}]}, store)
    for outside in (f"{allowed}/../b.gguf", f"{allowed}-too/b.gguf", str(store.home / "index.sqlite.csv")):
        with pytest.raises(MemboundError, match=REFUSED):
            check_files({"model": outside}, store)


def test_a_link_in_an_allowed_folder_does_not_lead_out_of_it(store: Store, tmp_path: Path) -> None:
    models = store.home / named_files.MODELS
    models.mkdir(parents=True)
    os.symlink(tmp_path / "here", models / "way-out")
    with pytest.raises(MemboundError, match=REFUSED):
        check_files({"model": str(models / "way-out" / "config.json")}, store)


@given(st.text(max_size=40))
def test_whatever_a_field_holds_is_answered(name: str) -> None:
    try:
        check_files({"model": name, "sweep": [{"workload.prompts.file": name}]}, Store(Path("/nowhere")))
    except MemboundError as error:
        assert REFUSED in str(error)


def test_what_is_allowed_must_be_a_folder(store: Store, tmp_path: Path) -> None:
    with pytest.raises(MemboundError, match=r"--allow-files is '.*missing', which is no folder"):
        named_files.allow([tmp_path / "missing"])


def test_a_scenario_of_a_page_may_name_an_upload(store: Store) -> None:
    path = uploads.find(store, uploads.keep(store, b"a trace"))
    check_files({"workload": {"prompts": {"kind": "trace", "file": str(path)}}, "hardware": "H100-SXM5"}, store)
    with pytest.raises(MemboundError):
        check_files({"file": str(path.parent.parent / "index.sqlite")}, store)


@pytest.mark.parametrize("page", ["live", "simulate"])
def test_a_page_refuses_in_one_sentence_and_starts_nothing(store: Store, page: str) -> None:
    text = f"name: x\nmodel: {ELSEWHERE}\n"
    query = {"scenario": "own"} if page == "live" else {"from": "own", "yaml": scenario_choice.packed(text)}
    at = open_page(page, **query)
    if page == "live":
        at.text_area(key="draft_live").set_value(text).run()
    assert not at.exception
    assert [REFUSED in error.value for error in at.error] == [True]
    assert "--allow-files" in at.error[0].value
    if page == "live":
        assert at.button(key="run").disabled
    assert store.jobs() == []


def test_the_refusal_is_said_in_chinese(store: Store) -> None:
    with pytest.raises(MemboundError) as refused:
        check_files({"model": ELSEWHERE}, store)
    words = said(str(refused.value), Translate("zh"))
    assert "文件" in words and ELSEWHERE in words
