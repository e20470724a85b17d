"""The dashboard's entry: pages, language, and what they have in common."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from membound.app.i18n import LANGUAGES, language_of
from membound.app.views import (
    advisor,
    experiments,
    explore,
    linked,
    live,
    plan,
    simulate,
    stack,
    start,
    techniques,
    tour,
    validate,
)
from membound.app.views.session import language, translate

ASSETS = Path(__file__).parent / "assets"
# The language of the document, and tables that a keyboard can scroll where they are wider than the screen.
DOCUMENT = """
const reached = () => {
  for (const box of document.querySelectorAll("[data-testid=stTable] :has(> table)")) box.tabIndex = 0;
};
export default ({ data }) => {
  document.documentElement.lang = data;
  reached();
  window.memboundTables ??= new MutationObserver(reached);
  window.memboundTables.observe(document.querySelector("[data-testid=stMain]"), { childList: true, subtree: true });
};
"""

st.set_page_config(page_title="membound", page_icon=str(ASSETS / "favicon.png"), layout="wide")
st.logo(str(ASSETS / "logo.svg"), size="large")
st.html(ASSETS / "page.css")


def choose_language() -> None:
    """The switch at the top; the browser's own language holds until somebody uses it."""
    default = language_of(st.context.locale)
    linked.seed("lang", linked.one_of(LANGUAGES), default)
    with st.container(horizontal=True, horizontal_alignment="right", key="language_row"):
        st.segmented_control(
            "Language / 语言",
            list(LANGUAGES),
            key="lang",
            required=True,
            format_func=LANGUAGES.__getitem__,
            label_visibility="collapsed",
        )
    linked.keep("lang", default)


t = translate()
pages = {
    "start": st.Page(start.page, title=t("nav.start"), url_path="start", default=True),
    "explore": st.Page(explore.page, title=t("nav.explore"), url_path="explore"),
    "techniques": st.Page(techniques.page, title=t("nav.techniques"), url_path="techniques"),
    "stack": st.Page(stack.page, title=t("nav.stack"), url_path="stack"),
    "advisor": st.Page(advisor.page, title=t("nav.advisor"), url_path="advisor"),
    "simulate": st.Page(simulate.page, title=t("nav.simulate"), url_path="simulate"),
    "plan": st.Page(plan.page, title=t("nav.plan"), url_path="plan"),
    "live": st.Page(live.page, title=t("nav.live"), url_path="live"),
    "experiments": st.Page(experiments.page, title=t("nav.experiments"), url_path="experiments"),
    "validate": st.Page(validate.page, title=t("nav.validate"), url_path="validate"),
}
st.session_state["pages"] = pages
page = st.navigation(list(pages.values()), position="top")
linked.arrive(page.url_path)
choose_language()
if getattr(st.user, "is_logged_in", True):  # unknown where the deployment names no OIDC provider
    tour.tour(next(name for name, known in pages.items() if known.url_path == page.url_path))
    page.run()
else:
    st.title(t("login.title"), anchor="top")
    st.button(t("login.button"), on_click=st.login, type="primary")
st.components.v2.component("membound.document", js=DOCUMENT)(key="document", data=language())
