"""How does a page follow a job without being rerun? Its parts ask the server for what is new and update themselves.

A page that runs again twice a second takes a tenth of a core from the run that it shows; what is new of a run is a few
numbers. Parts that follow the same job share one question, and ask nothing while nobody sees the page.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import streamlit as st

ASSETS = Path(__file__).parent / "assets"
# That the pages are served by `membound dashboard`, which answers these questions, and from where it serves Plotly.
PLOTLY_URL_VARIABLE = "MEMBOUND_PLOTLY_URL"
PROGRESS = """<div class="membound-job"><progress max="1"></progress><span class="membound-job-words"></span>
<p class="membound-job-warning" role="status"></p></div>"""
WRITTEN = """<div class="membound-written" tabindex="0" role="log"><p></p><div></div></div>"""
STYLE = """
.membound-job progress { appearance: none; display: block; width: 100%; height: 0.5rem; margin-bottom: 0.4rem;
  border: 0; border-radius: 1rem; overflow: hidden; background: var(--st-secondary-background-color); }
.membound-job progress::-webkit-progress-bar { background: transparent; }
.membound-job progress::-webkit-progress-value { background: var(--st-primary-color); }
.membound-job progress::-moz-progress-bar { background: var(--st-primary-color); }
.membound-job-warning { margin: 0.3rem 0 0; }
.membound-job-warning:empty { display: none; }
.membound-written { box-sizing: border-box; overflow-y: auto; padding: 1rem;
  border: 1px solid var(--st-border-color); border-radius: var(--st-base-radius); }
.membound-written p { margin: 0 0 0.5rem; font-size: 0.875em; }
.membound-written div { white-space: pre-wrap; overflow-wrap: anywhere; font-family: var(--st-code-font); }
"""


def is_served() -> bool:
    """Whether the server of `membound dashboard` serves this page."""
    return PLOTLY_URL_VARIABLE in os.environ


def feed_of(job_id: str, seq: int, every_s: float, language: str) -> dict[str, Any]:
    """Where a part of a page hears what a job told after the event `seq`, and how often it asks."""
    return {"url": f"/api/jobs/{quote(job_id)}/news?lang={language}", "seq": seq, "everyMs": round(1e3 * every_s)}


def progress(
    job_id: str, known: dict[str, Any], feed: dict[str, Any], on_change: Callable[[], None], *, awaited: bool
) -> None:
    """How far a job is, from what is `known` (`news.news_of`) on; `on_change` is called when the page should run again:
    when the job has ended, has told a row, or has told the first point of those that are `awaited`."""
    data = {**{name: known[name] for name in ("progress", "words", "warning")}, "feed": feed, "awaited": awaited}
    _component("progress", PROGRESS)(key=f"progress_{job_id}", data=data, on_changed_change=on_change)


def written(job_id: str, text: dict[str, Any] | None, words: dict[str, str], feed: dict[str, Any], height: int) -> None:
    """The text that a model writes; `words` say which request's it is, and that there is none yet."""
    data = {"text": text, "words": words, "height": height, "feed": feed}
    _component("written", WRITTEN)(key=f"written_{job_id}", data=data, height=height)


@cache
def _component(name: str, html: str) -> Any:
    return st.components.v2.component(
        f"membound.{name}", html=html, css=STYLE, js=with_news(f"{name}.js"), isolate_styles=False
    )


def with_news(name: str) -> str:
    """A script of the assets behind the one that asks for news."""
    return "\n".join((ASSETS / part).read_text(encoding="utf-8") for part in ("news.js", name))
