"""How does a page get an answer that takes seconds without holding up its session? From processes beside the server.

Answers are kept for all sessions, the newest of them. What takes longer than seconds is a job of the store instead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from itertools import zip_longest
from typing import Any, TypeVar

import streamlit as st
from joblib.externals.loky import ProcessPoolExecutor

from membound.app.answering import who_answers
from membound.app.home import membound_home
from membound.app.views.session import translate
from membound.roofline.errors import MemboundError

# A page waits so long before it shows that it waits. Nearly all answers are there by then, and to draw a page that
# waits, and then another with the answer, would take longer than they do.
WAIT_S = 0.6
POLL_S = 0.25
PROCESSES, IDLE_S = 2, 600
KEPT = 1000
HEIGHT = 420
KILLED = "the process that computes this was ended from outside, or ran out of memory; reload the page"
Answer = TypeVar("Answer")
Thing = TypeVar("Thing")
_NONE: Any = object()


def ask(key: object, function: Callable[..., Answer], *arguments: object) -> Future[Answer]:
    """The answer to come of a function of a module, which another process calls, once for each `key` and for each who
    answers."""
    asked = (function.__module__, function.__qualname__, key, who_answers())
    try:
        future: Future[Answer] = _asked(asked, function, arguments)
        if not (future.done() and isinstance(future.exception(), BrokenProcessPool)):
            return future
    except BrokenProcessPool:
        pass  # it was known to be broken before anything was asked
    # A process was killed; new ones answer.
    _processes.clear()
    _asked.clear()
    return _asked(asked, function, arguments)


def answer(future: Future[Answer], key: str, *, wait_s: float | None = None, height: int = HEIGHT) -> Answer | None:
    """What was asked for; None while it is not there yet: then its place is drawn, and the page runs again with it.

    Raises what the function raised, and MemboundError where its process was killed: the page's next run asks anew.
    """
    try:
        return future.result(timeout=WAIT_S if wait_s is None else wait_s)
    except BrokenProcessPool:
        raise MemboundError(KILLED) from None
    except TimeoutError:
        st.caption(translate()("state.computing"))
        st.skeleton(height)
        st.fragment(_watch, run_every=POLL_S, key=f"watch_{key}")(future)
        return None


def parts_of(things: Sequence[Thing]) -> list[Sequence[Thing]]:
    """As many parts as there are processes to compute them, each with every so many-th thing: neighbours cost alike."""
    return [things[first::PROCESSES] for first in range(min(PROCESSES, len(things)))]


def in_order(parts: Iterable[Sequence[Thing]]) -> list[Thing]:
    """The things of such parts as they stood before."""
    return [thing for each in zip_longest(*parts, fillvalue=_NONE) for thing in each if thing is not _NONE]


def answers(futures: Iterable[Future[Answer]], key: str) -> list[Answer] | None:
    """The same of an answer that was asked in parts; None while one of them is not there yet."""
    found: list[Answer] = []
    for future in futures:
        part = answer(future, key)
        if part is None:
            return None
        found.append(part)
    return found


def _watch(future: Future[Any]) -> None:
    if future.done():
        st.rerun()


@st.cache_resource(max_entries=KEPT, show_spinner=False)
def _asked(asked: tuple[object, ...], _function: Callable[..., Any], _arguments: tuple[object, ...]) -> Future[Any]:
    return _processes().submit(_called, os.fspath(membound_home()), _function, _arguments)


@st.cache_resource(show_spinner=False)
def _processes() -> ProcessPoolExecutor:
    # loky's processes, unlike those of the standard library, do not run the page's script when they start
    return ProcessPoolExecutor(PROCESSES, timeout=IDLE_S, initializer=_ignore_interrupts)


def _ignore_interrupts() -> None:
    """Ctrl-C in the terminal ends the server, and the server ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _called(home: str, function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    os.environ["MEMBOUND_HOME"] = home
    return function(*arguments)
