"""What does a newcomer look at in the first minute? A few steps of one sentence each, over four pages; no script."""

from __future__ import annotations

from dataclasses import dataclass, field

import streamlit as st

from membound.app.i18n import Translate
from membound.app.views import linked
from membound.app.views.session import translate

TOUR, CLOSED = "tour", 0


@dataclass(frozen=True)
class Step:
    """A page of the tour, and what its address says."""

    page: str
    query: dict[str, str] = field(default_factory=dict)


STEPS = (
    Step("start"),
    Step("explore"),
    Step("techniques", {"batch": "32"}),
    Step("live"),
)


def tour(page: str) -> None:
    """Above the page: the step of the tour that the URL names, with the way to the next one and out."""
    number = linked.seed(TOUR, linked.one_of(range(len(STEPS) + 1)), CLOSED)
    linked.keep(TOUR, CLOSED)
    if number == CLOSED:
        return
    t = translate()
    step = STEPS[number - 1]
    with st.container(border=True, key="tour_box"):
        place = t("tour.place", number=number, steps=len(STEPS))
        st.markdown(f"**{place}** · {t(f'tour.{step.page}')}")
        with st.container(horizontal=True, vertical_alignment="center"):
            if page != step.page:
                _link(number, t("tour.to", page=t(f"nav.{step.page}")))
            elif number < len(STEPS):
                following = t(f"nav.{STEPS[number].page}")
                _link(number + 1, t("tour.next", page=following))
            st.button(
                t("tour.done") if number == len(STEPS) else t("tour.close"),
                key="tour_close",
                icon=":material/close:",
                on_click=_go,
                args=(CLOSED,),
            )


def begin(t: Translate) -> None:
    """The button that begins the tour."""
    st.button(t("tour.begin"), key="tour_begin", icon=":material/tour:", on_click=_go, args=(1,))


def _link(number: int, label: str) -> None:
    step = STEPS[number - 1]
    query = {**step.query, TOUR: str(number)}
    st.page_link(st.session_state["pages"][step.page], label=label, icon=":material/arrow_forward:", query_params=query)


def _go(number: int) -> None:
    st.session_state[TOUR] = number
