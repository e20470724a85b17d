"""How does a finished run against a server read: each metric that a client sees, predicted beside measured?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.figures import served
from membound.app.figures.comparison import point_label
from membound.app.i18n import Translate
from membound.app.views.charts import chart


def served_result(rows: Sequence[Mapping[str, Any]], conditions: str, key: str, t: Translate) -> None:
    """The metrics drawn and as a table."""
    st.header(t("served.title"), anchor="served")
    table = served_table(rows, t)
    caption = t("served.caption", conditions=conditions)
    chart(
        served.served_figure(rows, t), key=f"{key}_served", alt=served.alt_text(rows, t), caption=caption, table=table
    )
    st.dataframe(table, hide_index=True, key=f"{key}_served_rows")


def served_table(rows: Sequence[Mapping[str, Any]], t: Translate) -> pd.DataFrame:
    """Each metric at each point."""
    return pd.DataFrame(
        {
            t("column.point"): point_label(row["point"], t),
            t("column.metric"): served.named(row, t),
            t("served.predicted"): served.value(row, row["predicted"]),
            t("column.interval"): f"{served.value(row, row['low'])} – {served.value(row, row['high'])}",
            t("served.measured"): _measured(row),
            t("column.error"): "–" if row["error"] is None else text.signed_percent(row["error"]),
        }
        for row in rows
    )


def _measured(row: Mapping[str, Any]) -> str:
    spread = "" if row["spread"] is None else f" ± {served.value(row, row['spread'])}"
    return f"{served.value(row, row['measured'])}{spread}"
