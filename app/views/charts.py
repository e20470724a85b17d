"""How is a chart put on a page: drawn, captioned, described for who cannot see it, and as a table on demand?"""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from membound.app.views.session import translate


def chart(figure: go.Figure, *, key: str, alt: str, caption: str = "", table: pd.DataFrame | None = None) -> None:
    """A figure with its caption; with `table` a toggle shows the numbers instead, and they can be downloaded."""
    t = translate()
    as_table = table is not None and st.toggle(t("chart.table"), key=f"{key}_table")
    if as_table and table is not None:
        st.dataframe(table, hide_index=True, key=f"{key}_data", alt=alt)
        csv = table.to_csv(index=False).encode()
        st.download_button(t("chart.csv"), csv, f"{key}.csv", "text/csv", key=f"{key}_csv", on_click="ignore")
    else:
        config = {
            "displaylogo": False,
            "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
            "toImageButtonOptions": {"format": "svg", "filename": f"membound-{key}"},
        }
        st.plotly_chart(figure, key=f"{key}_chart", alt=alt, config=config)
    if caption:
        st.caption(caption)
