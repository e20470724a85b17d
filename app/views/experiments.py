"""Page Experiments: which open questions can be answered here, and what was found?"""

from __future__ import annotations

import json
import re
import time

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.commands import experiment
from membound.app.experiments import EXPERIMENTS, PREDICTED, recorded
from membound.app.experiments.finding import Finding
from membound.app.figures.experiments import experiment_figure
from membound.app.i18n import Translate
from membound.app.records import Run
from membound.app.views import asked, fields, linked, states
from membound.app.views.charts import chart
from membound.app.views.said import in_words
from membound.app.views.session import has_torch, store, translate

# Names of bounds that are no word of any language.
_BOUNDS = re.compile(r"\b(memory_weights|memory_kv|drafting)\b")
_PERCENT = re.compile(r"(?<=\d)%")


def page() -> None:
    """Draw the experiment that the URL names, and what it found when somebody last ran it."""
    t = translate()
    st.title(t("experiments.title"), anchor="top")
    st.caption(t("experiments.intro"))
    names = list(EXPERIMENTS)
    linked.seed("experiment", linked.one_of(names), "x5")
    name = st.segmented_control(
        t("experiments.which"),
        names,
        key="experiment",
        required=True,
        wrap=True,
        format_func=lambda one: t(f"experiments.{one}"),
    )
    assert name is not None, "one is always chosen"
    linked.keep("experiment", "x5")
    st.write(t(f"experiments.about_{name}"))
    quick = not fields.switch("experiments", "whole", t)
    if name not in PREDICTED and not has_torch():
        states.no_torch()
        return
    run = asked.answer("experiment", {"name": name, "quick": quick}, t("experiments.run"))
    if run is not None:
        _finding(_found(run), t)
        return
    before = next((one for one in store().runs(kind="experiment") if one.label == name), None)
    finding = recorded(name) if before is None else _found(before)
    if finding is None:
        st.info(t("experiments.empty"), icon=":material/science:")
        return
    of = "earlier" if before is not None else "recorded" if finding.machine else "predicted"
    made = finding.made if before is None else time.strftime("%Y-%m-%d", time.localtime(before.created))
    st.info(t(f"experiments.{of}", made=made, machine=text.plain(finding.machine)), icon=":material/science:")
    _finding(finding, t)


def _found(run: Run) -> Finding:
    document = run.comparison()
    assert document is not None, "an experiment's run has its finding"
    return Finding.of(document)


def _finding(finding: Finding, t: Translate) -> None:
    st.header(t("experiments.found"), anchor="found")
    st.markdown("\n".join(f"- {text.plain(_sentence(_worded(line, t)))}{t('sign.stop')}" for line in finding.says))
    rows = [
        {key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in row.items()}
        for row in finding.rows
    ]
    axes = finding.chart
    chart(
        experiment_figure(finding, worded=lambda words: _worded(words, t)),
        key=finding.name,
        alt=t("experiments.alt", rows=len(rows), title=_worded(axes.y.title, t), over=_worded(axes.x.title, t)),
        caption=" ".join(f"{_sentence(_worded(line, t))}{t('sign.stop')}" for line in finding.conditions),
        table=pd.DataFrame(rows),
    )
    _downloads(finding, t)


def _worded(line: str, t: Translate) -> str:
    """What an experiment says, with words for what bounds a step and for techniques."""
    said = _BOUNDS.sub(lambda bound: t(f"bound.{bound.group()}"), in_words(line, t))
    return _PERCENT.sub(" %", said)


def _sentence(line: str) -> str:
    """A worker's line with a capital."""
    return line[:1].upper() + line[1:]


def _downloads(finding: Finding, t: Translate) -> None:
    """The finding as a page and as a document, as `membound experiment --out` writes them; its rows are the chart's."""
    with st.container(horizontal=True):
        st.download_button(
            t("download.html"),
            lambda: experiment.page(finding).encode(),
            f"{finding.name}.html",
            "text/html",
            on_click="ignore",
            help=t("experiments.html_help"),
        )
        content = json.dumps(finding.to_json(), ensure_ascii=False, indent=1)
        st.download_button(t("download.json"), content, f"{finding.name}.json", "application/json", on_click="ignore")
