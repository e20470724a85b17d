"""How is a chart put on a page: drawn, captioned, described for who cannot see it, and as a table on demand?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from membound.app.figures.template import bound_words
from membound.app.i18n import Translate
from membound.app.plot import TITLES, draw
from membound.app.text import percent, plain
from membound.app.views.session import translate


def words_table(table: pd.DataFrame) -> None:
    """A table whose cells are words, which break into lines where a grid of cells would cut them."""
    st.table(table.map(lambda cell: plain(cell) if isinstance(cell, str) else cell), hide_index=True)


def share_bars(shares: Iterable[tuple[str, float]], t: Translate) -> None:
    """A bar for each bound's share of the time."""
    for bound, share in shares:
        st.progress(min(1.0, share), f"{bound_words(bound, t)}{t('sign.colon')}**{percent(share)}**")


def chart(
    figure: go.Figure,
    *,
    key: str,
    alt: str,
    caption: str = "",
    table: pd.DataFrame | None = None,
    select: bool = False,
    keeps_zoom: bool = False,
    feed: Mapping[str, Any] | None = None,
) -> list[Any]:
    """A figure with its caption; with `table` a toggle shows the numbers instead, and they can be downloaded.

    The toggle draws its chart anew and not the page, but for a chart that the page asks what was picked.
    With `select` points can be clicked; their custom data is returned. `keeps_zoom` and `feed` are for a chart
    that grows.
    """
    if select:
        return _chart(figure, key, alt, caption, table, keeps_zoom, feed, select)
    st.fragment(_chart, key=f"{key}_part")(figure, key, alt, caption, table, keeps_zoom, feed, select)
    return []


def _chart(
    figure: go.Figure,
    key: str,
    alt: str,
    caption: str,
    table: pd.DataFrame | None,
    keeps_zoom: bool,
    feed: Mapping[str, Any] | None,
    select: bool,
) -> list[Any]:
    t = translate()
    picked: list[Any] = []
    as_table = table is not None and st.toggle(t("chart.table"), key=f"{key}_table")
    if as_table and table is not None:
        st.dataframe(table, hide_index=True, key=f"{key}_data", alt=alt)
        csv = table.to_csv(index=False).encode()
        st.download_button(t("chart.csv"), csv, f"{key}.csv", "text/csv", key=f"{key}_csv", on_click="ignore")
    else:
        titles = {name: t(f"chart.{name}") for name in TITLES}
        picked = draw(
            figure, f"{key}_chart", alt=alt, titles=titles, keeps_zoom=keeps_zoom, selectable=select, feed=feed
        )
    if caption:
        st.caption(plain(caption))
    return picked
