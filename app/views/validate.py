"""Page Validate: how far off are the predictions, and where are they worst?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import judged, text, uploads
from membound.app.figures import validation as figures
from membound.app.i18n import Translate, sentences
from membound.app.records import Run
from membound.app.views import asked, fields, linked, states
from membound.app.views.charts import chart
from membound.app.views.said import in_words, said
from membound.app.views.session import store, translate
from membound.app.views.verdicts import baseline_words
from membound.roofline.errors import MemboundError
from membound.roofline.validation.tables import END_TO_END_COLUMNS, OPERATOR_COLUMNS

PAGE = "validate"
AGAINST = ("published", "machine", "table")
MOST_RUNS = 30
# What the sections of the published validation are about, by their headings.
SECTIONS = {
    "Devices and sources that were not fitted": "unfitted",
    "Sources that nothing was fitted to": "unseen",
    "Ratios": "ratios",
    "Engines": "engines",
    "Beside membound": "peers",
    "Beside the measurement": "measured",
}
# What the words of the other tables are called in the catalog, and how a range of numbers is typed.
WORD = f"{PAGE}.word_"
_RANGE = re.compile(r"(?<=[\d%]) to (?=\d)")
# What a row of the document gives beside its figure.
_BRACKETS = re.compile(r" ?[(（].*")


def page() -> None:
    """Draw the errors against what the URL names: what is published, this machine's runs, or a table."""
    t = translate()
    st.title(t("validate.title"), anchor="top")
    st.caption(t("validate.intro"))
    against = fields.one_of(PAGE, "against", AGAINST, AGAINST[0], t)
    try:
        {"published": _published, "machine": _machine, "table": _table}[against](t)
    except MemboundError as error:
        states.problem(str(error), t("validate.fix"))


# --- what is published ---


def _published(t: Translate) -> None:
    listed = judged.published()
    promises = judged.promises(listed[0])
    kept = int((promises["reached"] <= promises["promised"]).sum())
    whole, missed = len(listed[0].table), listed[0].missed
    medians = promises["reached"][~promises["what"].str.contains("percentile")]
    ends = {"least": _percent(medians.min()), "most": _percent(medians.max())}
    st.header(t("validate.published_answer", kept=whole - len(missed), promises=whole, **ends), anchor="answer")
    if missed:
        st.write(t("validate.published_missed", missed=t("sign.semicolon").join(_missed(listed[0], t))))
    kernels, runs = judged.counts(listed[0])
    st.write(t("validate.published_said", kernels=kernels, runs=runs))
    promises["what"] = [_BRACKETS.sub("", _row(what, t)) for what in promises["what"]]
    chart(
        figures.promises_figure(promises, t),
        key="promises",
        alt=t("validate.promises_alt", kept=kept, promises=len(promises)),
        caption=t("validate.promises_caption"),
        table=_said_table(listed[0].table, t),
    )
    first = {found.title: found.table for found in reversed(listed[1:])}
    for title, section in SECTIONS.items():
        with st.expander(t(f"validate.section_{section}")):
            st.dataframe(_told_table(first[title], t), hide_index=True, key=f"published_{section}")
    st.caption(t("validate.published_caption"))


def _missed(figures: judged.Figures, t: Translate) -> list[str]:
    """Each promise that is missed, with what was reached and what is promised."""
    rows = figures.table[figures.table["what"].isin(figures.missed)]
    return [
        f"{_row(row['what'], t)}{t('sign.colon')}"
        + t(
            "validate.missed_by",
            reached=row["reached"].replace(" and ", " + "),
            promised=row["promised"].replace("all", "100 %"),
        )
        for row in rows.to_dict("records")
    ]


def _row(what: str, t: Translate) -> str:
    """What a row of the document is of, with signs that are not typed."""
    return said(what, t).replace("<=", "≤").replace(">=", "≥")


def _said_table(table: pd.DataFrame, t: Translate) -> pd.DataFrame:
    """A table of the document with its columns, and what its rows are of, in the reader's language."""
    named = table.assign(what=[_row(what, t) for what in table["what"]])
    return named.rename(columns={name: said(name, t) for name in named.columns})


def _told_table(table: pd.DataFrame, t: Translate) -> pd.DataFrame:
    """Another table of the document in the reader's language, but for the names of engines and tools."""
    return table.map(lambda cell: told(cell, t)).rename(columns=lambda name: told(name, t))


def told(cell: str, t: Translate) -> str:
    """What a cell of the document says, with signs that are not typed; a name or a number as it is."""
    name = _word_names().get(cell)
    words = said(cell, t) if name is None else t(f"validate.word_{name}")
    return _RANGE.sub("–", words).replace("<=", "≤").replace(">=", "≥")


@cache
def _word_names() -> dict[str, str]:
    """The names that words of the document have in the catalog."""
    return {words: key.removeprefix(WORD) for key, words in sentences("en").items() if key.startswith(WORD)}


# --- this machine ---


def _machine(t: Translate) -> None:
    runs = store().runs("compare", limit=MOST_RUNS)
    rows, unread = judged.of_runs(runs)
    if unread:
        st.caption(t("validate.unread", runs=unread))
    if elsewhere := sum(bool(run.measurers()) and not run.measured_here() for run in runs):
        st.caption(t("validate.elsewhere", runs=elsewhere))
    if rows.empty:
        st.info(t("validate.no_runs"), icon=":material/straighten:")
        rows = judged.shipped()
    _errors(rows, "machine", t("validate.machine_caption"), t)


# --- a table ---


def _table(t: Translate) -> None:
    with st.container(border=True):
        left, right = st.columns([3, 2], gap="large")
        with left:
            uploaded = st.file_uploader(
                t("validate.upload"), type="csv", max_upload_size=uploads.MOST_MB, help=t("validate.upload_help")
            )
        with right:
            st.markdown(t("validate.columns"))
            for name, columns in (("operators", OPERATOR_COLUMNS), ("end_to_end", END_TO_END_COLUMNS)):
                header = (",".join(columns) + "\n").encode()
                st.download_button(
                    t(f"validate.empty_{name}"),
                    header,
                    f"{name}.csv",
                    "text/csv",
                    key=f"empty_{name}",
                    on_click="ignore",
                )
    digest = linked.seed("table", str, "")
    if uploaded is not None:
        digest = st.session_state["table"] = uploads.keep(store(), uploaded.getvalue())
    linked.keep("table", "")
    if not digest:
        st.info(t("validate.no_table"), icon=":material/upload_file:")
        return
    uploads.find(store(), digest)
    run = asked.answer(PAGE, {"table": digest}, t("validate.run"), start=uploaded is not None)
    document = None if run is None else run.comparison()
    if run is not None and document is not None:
        _validated(run, document, t)


def _validated(run: Run, document: Mapping[str, Any], t: Translate) -> None:
    st.write(
        t(
            "validate.counts",
            rows=f"{document['rows']:,}",
            predicted=f"{document['predicted']:,}",
            refused=f"{document['refused']:,}",
            judged=f"{document['judged']:,}",
        )
    )
    rows = _rows_of(run.id)
    if rows.empty:
        st.warning(t("validate.nothing_judged"), icon=":material/block:")
    else:
        _errors(rows, "table", t("validate.table_caption"), t)
    reasons = [
        (t(f"validate.{kind}"), reason, count)
        for kind in ("refusals", "set_aside")
        for reason, count in document[kind].items()
    ]
    if reasons:
        with st.expander(t("validate.left_out", rows=sum(count for _, _, count in reasons))):
            columns = [t("validate.c_kind"), t("validate.c_reason"), t("validate.c_rows")]
            st.dataframe(pd.DataFrame(reasons, columns=columns), hide_index=True, key="left_out")


@st.cache_data(max_entries=8, show_spinner=False)
def _rows_of(run_id: str) -> pd.DataFrame:
    return judged.of_table(store().run(run_id))


# --- errors of rows ---


def _errors(rows: pd.DataFrame, name: str, conditions: str, t: Translate) -> None:
    """The answer in a sentence, the rows on the diagonal, errors by group, and the worst rows."""
    rows = rows.assign(**{name: [_of(words, t) for words in rows[name]] for name in ("phase", "what")})
    whole = judged.errors_by(rows).iloc[0]
    st.header(
        t("validate.answer", median=_percent(whole["median"]), p90=_percent(whole["p90"]), rows=f"{len(rows):,}"),
        anchor="answer",
    )
    direction = "high" if whole["bias"] > 0 else "low"
    bias = _percent(abs(whole["bias"]))
    st.write(
        t("validate.within", within=text.percent(whole["within"])) + " " + t(f"validate.bias_{direction}", bias=bias)
    )
    by = fields.one_of(PAGE, "by", judged.GROUPED, "phase", t)
    left, right = st.columns(2, gap="large")
    with left:
        st.header(t("validate.scatter"), anchor="scatter")
        metrics = rows["metric"].value_counts().index.tolist()
        metric = metrics[0]
        if len(metrics) > 1:
            metric = fields.choice(PAGE, "of", metrics, metrics[0], t, lambda name: _metric(name, t))
        shown = rows[rows["metric"] == metric]
        chart(
            figures.scatter_figure(shown, metric, by, t),
            key=f"scatter_{name}",
            alt=figures.scatter_alt(shown, t),
            caption=t("validate.scatter_caption", conditions=conditions),
            table=shown,
        )
    with right:
        st.header(t("validate.groups"), anchor="groups")
        errors = judged.errors_by(rows, by)
        chart(
            figures.groups_figure(errors, t),
            key=f"groups_{name}",
            alt=t("validate.groups_alt", groups=len(errors)),
            caption=t("validate.groups_caption", shown=min(len(errors), figures.MOST_GROUPS), groups=len(errors)),
            table=_group_table(errors, t),
        )
    st.header(t("validate.worst"), anchor="worst")
    st.dataframe(_worst_table(judged.worst(rows), t), hide_index=True, key=f"worst_{name}")
    st.download_button(
        t("validate.rows_csv"),
        lambda: rows.to_csv(index=False).encode(),
        f"{name}-rows.csv",
        "text/csv",
        on_click="ignore",
    )


def _of(words: str, t: Translate) -> str:
    """What a row is of: a technique, with its baseline behind a slash, or the engine without any."""
    name, slash, baseline = words.partition(" / ")
    if name == "baseline":
        return t("validate.plain")
    return in_words(name, t) + (f" / {baseline_words(name, baseline, t)}" if slash else "")


def _metric(name: str, t: Translate) -> str:
    return t(f"validate.metric_{name}") if name in ("gain", "tpot_s") else name


def _group_table(errors: pd.DataFrame, t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {
            t("validate.c_group"): row["group"] or "–",
            t("validate.c_rows"): row["rows"],
            t("validate.median"): _percent(row["median"]),
            t("validate.p90"): _percent(row["p90"]),
            t("validate.c_bias"): text.signed_percent(row["bias"]),
            t("validate.c_within"): text.percent(row["within"]),
        }
        for row in errors.to_dict("records")
    )


def _worst_table(rows: pd.DataFrame, t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {
            t("validate.c_error"): text.signed_percent(row["predicted"] / row["measured"] - 1),
            t("validate.c_measured"): _value(row, "measured"),
            t("validate.c_predicted"): f"{_value(row, 'predicted')} ({_value(row, 'low')} – {_value(row, 'high')})",
            t("validate.c_device"): row["device"],
            t("validate.c_model"): row["model"],
            t("validate.c_what"): row["what"],
            t("validate.c_source"): row["source"],
        }
        for row in rows.to_dict("records")
    )


def _value(row: Mapping[Any, Any], name: str) -> str:
    scale, unit = figures.unit_of(row["metric"])
    return f"{text.digits(row[name] * scale)} {unit}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
