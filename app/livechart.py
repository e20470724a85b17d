"""How does a chart grow while a run is going on, without losing the reader's zoom?

`st.plotly_chart` draws a new chart at each change of its data. This component keeps the node and lets Plotly find
the difference.
"""

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

if TYPE_CHECKING:
    import plotly.graph_objects as go

PLOTLY_URL_VARIABLE = "MEMBOUND_PLOTLY_URL"


def live_chart(figure: "go.Figure", key: str, height: int = 320, alt: str | None = None) -> None:
    """Draw a figure that keeps its zoom and its node when the page runs again with other data under the same key.

    The page's theme takes the place of the figure's template. `alt` is read to those who do not see the chart, by
    default the figure's title and the names of its series. Without the server of `membound dashboard`, which serves
    Plotly, the chart is Streamlit's own.
    """
    alt = alt or describe(figure)
    plotly_url = os.environ.get(PLOTLY_URL_VARIABLE)
    if plotly_url is None:
        st.plotly_chart(figure, key=key, height=height, alt=alt)
        return
    data = {"figure": figure.to_json(), "key": key, "height": height, "alt": alt, "plotly_url": plotly_url}
    _component()(key=key, data=data, height=height)


def describe(figure: "go.Figure") -> str:
    """Say what a figure shows, from its title and the names of its series."""
    names = [trace.name for trace in figure.data if trace.name]
    title = figure.layout.title.text or "Live chart"
    return f"{title}: {', '.join(names)}" if names else title


@cache
def _component() -> Any:
    return st.components.v2.component(
        "membound.live_chart",
        html='<div class="membound-live-chart" role="img"></div>',
        js=(Path(__file__).parent / "assets" / "livechart.js").read_text(encoding="utf-8"),
        isolate_styles=False,
    )
