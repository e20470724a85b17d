"""Which whole scenario does a person simulate instead of the form's: one that ships, or one of their own?

Their own is in the URL too, compressed, so that a link is the page.
"""

from __future__ import annotations

import base64
import binascii
import zlib

import streamlit as st

from membound.app.i18n import Translate
from membound.app.named_files import scenario_of_page
from membound.app.tasks import scenario_of
from membound.app.views import linked
from membound.app.views.session import store
from membound.roofline.scenario import Scenario, shipped_scenarios

OWN = "own"
# Characters of a scenario's text, and of its compressed form in a URL, at most.
MOST_TEXT, MOST_PACKED = 50_000, 6_000


def chosen(name: str, t: Translate) -> Scenario | None:
    """The scenario of that name, or the reader's own; None while there is none.

    Raises MemboundError for text that is no scenario, and for a scenario that names a file that no page may open.
    """
    text = _own(t) if name == OWN else shipped_scenarios()[name]
    if not text.strip():
        st.info(t("simulate.need_scenario"), icon=":material/edit_note:")
        return None
    if name == OWN:
        return scenario_of_page(text, store())
    scenario = scenario_of({"scenario": text})
    st.markdown(scenario.description)
    with st.expander(t("live.show_yaml")):
        st.code(text, language="yaml")
    return scenario


def _own(t: Translate) -> str:
    linked.seed("draft_simulate", str, unpacked(st.query_params.get("yaml", "")))
    uploaded = st.file_uploader(t("simulate.scenario_file"), type=["yaml", "yml"], max_upload_size=1)
    if uploaded is not None and st.session_state.get("drafted_from") != uploaded.file_id:
        st.session_state["drafted_from"] = uploaded.file_id
        st.session_state["draft_simulate"] = uploaded.getvalue().decode("utf-8", errors="replace")[:MOST_TEXT]
    text = st.text_area(
        t("simulate.scenario_text"),
        key="draft_simulate",
        height=280,
        max_chars=MOST_TEXT,
        persist_state="session",
        placeholder=shipped_scenarios()["cluster-failover"],
    )
    short = packed(text)
    if not text.strip() or len(short) > MOST_PACKED:
        st.query_params.pop("yaml", None)
    elif st.query_params.get("yaml") != short:
        st.query_params["yaml"] = short
    return text


def packed(text: str) -> str:
    """A text as a URL holds it."""
    return base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


def unpacked(short: str) -> str:
    """The text again; empty where it is none, or longer than a scenario may be."""
    try:
        data = base64.b64decode(short + "=" * (-len(short) % 4), altchars=b"-_", validate=True)
        reader = zlib.decompressobj()
        text = reader.decompress(data, 4 * MOST_TEXT).decode()
    except (binascii.Error, ValueError, zlib.error):
        return ""
    return text if reader.eof and len(text) <= MOST_TEXT else ""
