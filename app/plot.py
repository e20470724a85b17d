"""How is a chart drawn in a page: in its place, only once, and with the reader's zoom kept as it grows?

`st.plotly_chart` takes a chart down at each change of its data and draws the new one several times. This component
keeps the node and lets Plotly find the difference.
"""

import os
import zlib
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import streamlit as st

from membound.app.feed import PLOTLY_URL_VARIABLE, with_news

if TYPE_CHECKING:
    import plotly.graph_objects as go

HEIGHT = 450
# A chart's buttons have a line of their own above it, where they lie on no legend and no bar.
BAR_HEIGHT = 28
STYLE = f"""
.membound-chart:not(:fullscreen) {{ box-sizing: content-box; padding-top: {BAR_HEIGHT}px; }}
.membound-chart:not(:fullscreen) .modebar-container {{ top: -{BAR_HEIGHT}px !important; }}
"""
# What the buttons of a chart's bar say.
TITLES = {"png": "Download as PNG", "svg": "Download as SVG", "full": "Full screen"}


def draw(
    figure: "go.Figure",
    key: str,
    *,
    alt: str | None = None,
    titles: Mapping[str, str] = TITLES,
    keeps_zoom: bool = False,
    selectable: bool = False,
    feed: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Draw a figure in the page's theme; it keeps its node when the page runs again with other data under its key.

    `alt` is read to those who do not see the chart, by default the figure's title and the names of its series. With
    `keeps_zoom` a chart that grows stays where the reader zoomed to. With `selectable` a point can be clicked, and its
    custom data is returned. From its `feed` (`feed.feed_of`) a chart whose traces name their series in `meta` hears of
    new points itself. Without the server of `membound dashboard`, which serves Plotly, the chart is Streamlit's own.
    """
    alt = alt or describe(figure)
    height = figure.layout.height or HEIGHT
    plotly_url = os.environ.get(PLOTLY_URL_VARIABLE)
    if plotly_url is None:
        if not selectable:
            st.plotly_chart(figure, key=key, height=height, alt=alt)
            return []
        state = st.plotly_chart(figure, key=key, height=height, alt=alt, on_select="rerun", selection_mode="points")
        return [point.get("customdata") for point in state.selection.points]
    drawn = figure.to_json()
    data = {
        "figure": drawn,
        "name": zlib.crc32(drawn.encode()),
        "key": key,
        "height": height,
        "alt": alt,
        "titles": dict(titles),
        "keepsZoom": keeps_zoom,
        "selectable": selectable,
        "feed": None if feed is None else dict(feed),
        "plotlyUrl": plotly_url,
    }
    state = _component()(
        key=key, data=data, height=height + BAR_HEIGHT, default={"picked": {}}, on_picked_change=_noted
    )
    return list(state.picked["points"]) if state.picked.get("of") == data["name"] else []


def describe(figure: "go.Figure") -> str:
    """Say what a figure shows, from its title and the names of its series."""
    names = [trace.name for trace in figure.data if trace.name]
    title = figure.layout.title.text or "Chart"
    return f"{title}: {', '.join(names)}" if names else title


def _noted() -> None:
    """What was picked is read when the page runs: Streamlit wants to call something."""


@cache
def _component() -> Any:
    return st.components.v2.component(
        "membound.chart",
        html='<div class="membound-chart" role="figure"></div>',
        css=STYLE,
        js=with_news("plot.js"),
        isolate_styles=False,
    )
