"""How does a person compare any two runs of the history? Both are in the URL: a link is the comparison."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st

from membound.app import two_runs
from membound.app.figures import two_runs as figures
from membound.app.home import StoreError
from membound.app.i18n import Translate
from membound.app.records import Run
from membound.app.text import plain
from membound.app.views import linked, states
from membound.app.views.charts import chart, words_table
from membound.app.views.said import said
from membound.app.views.session import store, translate
from membound.roofline.errors import MemboundError

MOST_OFFERED = 200
NONE = ""
FIRST, SECOND = "a", "b"
# Conditions that a person has a word for; the others are names of packages.
CONDITIONS = (
    *("commit", "membound", "machine", "threads", "calibrated", "kernels", "stalls"),
    *("server", "tool", "conditions"),
)


def two_runs_chosen(kinds: Sequence[str]) -> None:
    """The choice of two runs and, once there are two, what they differ in."""
    t = translate()
    st.header(t("two.title"), anchor="two-runs")
    offered = {run.id: run for run in store().runs(kinds, limit=MOST_OFFERED)}
    for key in (FIRST, SECOND):
        if (named := st.query_params.get(key)) and named not in offered:
            offered |= _found(named, kinds)
    if len(offered) < 2:
        st.info(t("two.empty"), icon=":material/compare_arrows:")
        return
    left, right = st.columns(2)
    with left:
        a = _choice(FIRST, offered, t)
    with right:
        b = _choice(SECOND, offered, t)
    if a is None or b is None:
        st.caption(t("two.choose"))
    elif a.id == b.id:
        st.caption(t("two.same_run"))
    else:
        try:
            _compared(a, b, t)
        except MemboundError as error:
            states.problem(str(error), t("two.unreadable"))


def _found(run_id: str, kinds: Sequence[str]) -> Mapping[str, Run]:
    """An older run that the URL names."""
    try:
        run = store().run(run_id)
    except StoreError:
        st.warning(translate()("two.missing", run=plain(run_id[:60])), icon=":material/search_off:")
        return {}
    return {run.id: run} if run.kind in kinds else {}


def _choice(key: str, offered: Mapping[str, Run], t: Translate) -> Run | None:
    names = [NONE, *offered]
    linked.seed(key, linked.one_of(names), NONE)
    name = st.selectbox(
        t(f"two.{key}"),
        names,
        key=key,
        persist_state="session",
        format_func=lambda name: t("two.none") if name == NONE else title(offered[name], t),
        help=t("two.help"),
    )
    linked.keep(key, NONE)
    return offered.get(name or NONE)


def title(run: Run, t: Translate) -> str:
    """A run as a list names it."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created))
    return f"{when} · {run.label} · {t(f'kind.{run.kind}')}"


def _compared(a: Run, b: Run, t: Translate) -> None:
    pairs = two_runs.pairs(a, b)
    if any(pair.ratio is not None for pair in pairs):
        table = _numbers(pairs, t)
        both = sum(pair.ratio is not None for pair in pairs)
        caption = t("two.caption", a=title(a, t), b=title(b, t))
        if both > figures.MOST_ROWS:
            caption += " " + t("two.cut", shown=figures.MOST_ROWS, numbers=both)
        chart(
            figures.ratio_figure(pairs, t),
            key="two",
            alt=figures.alt_text(pairs, t),
            caption=caption,
            table=table,
        )
        st.dataframe(table, hide_index=True, key="two_numbers")
    else:
        st.info(t("two.nothing_shared"), icon=":material/compare_arrows:")
    left, right = st.columns(2)
    with left:
        st.subheader(t("two.scenario"), anchor="two-scenario")
        _differences(two_runs.scenario_differences(a, b), t)
    with right:
        st.subheader(t("two.conditions"), anchor="two-conditions")
        told = two_runs.differences(two_runs.conditions_of(a), two_runs.conditions_of(b))
        words = [(_condition(name, t), _said(of_a, t), _said(of_b, t)) for name, of_a, of_b in told]
        _differences(words, t)


def _condition(name: str, t: Translate) -> str:
    return t(f"two.c_{name}") if name in CONDITIONS else name


def _said(value: str | None, t: Translate) -> str | None:
    return None if value is None else said(value, t)


def _numbers(pairs: Sequence[two_runs.Pair], t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {
            t("column.metric"): figures.named(pair.key, t),
            "A": figures.shown(pair.a, t),
            "B": figures.shown(pair.b, t),
            t("two.ratio"): "–" if pair.ratio is None else f"{pair.ratio:.3g}×",
            t("two.verdict"): _verdict(pair, t),
        }
        for pair in pairs
    )


def _verdict(pair: two_runs.Pair, t: Translate) -> str:
    return "–" if pair.ratio is None else f"{figures.MARKS[pair.verdict]} {t(f'two.{pair.verdict}')}"


def _differences(told: Sequence[tuple[str, str | None, str | None]], t: Translate) -> None:
    if not told:
        st.caption(t("two.no_difference"))
        return
    rows = [{t("two.field"): name, "A": a or "–", "B": b or "–"} for name, a, b in told]
    words_table(pd.DataFrame(rows))
