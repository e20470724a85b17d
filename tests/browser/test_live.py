"""Does a page that watches a run follow it by asking for little, and not run again itself?"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from membound.app.i18n import Translate
from membound.app.jobs import process_born
from membound.app.store import Report, Store

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SHORT = (Path(__file__).parent / "short.yaml").read_text("utf-8")
EN, ZH = Translate("en"), Translate("zh")
TIMEOUT_MS = 60_000
ROW = {
    "technique": "int8_weights", "baseline": "bf16 weights", "metric": "tpot_s", "unit": "ratio", "point": {},
    "predicted": 1.8, "low": 1.6, "high": 2.0, "measured": None, "spread": None, "error": None,
    "verdict": "not measured", "lossless": False, "quality": None, "bottleneck_before": "memory_weights",
    "bottleneck_after": "compute", "samples": [], "conditions": "a test",
}  # fmt: skip
CHART = "document.querySelector('.membound-chart')"


def _job(store: Store) -> str:
    """A run of this process, which lives as long as the test does."""
    job_id = store.submit_job("simulate", {"scenario": SHORT})
    store.attach_worker(job_id, os.getpid(), process_born(os.getpid()))
    store.start_job(job_id)
    return job_id


def _tell(store: Store, job_id: str, number: int, *others: Report) -> None:
    now = time.time()
    told: list[Report] = [
        (now, "live", {"t": float(number), "tokens_per_s": 100.0 + number, "running": 2, "kv_utilization": 0.5}),
        (now, "text", {"request": number, "prompt": "A prompt,", "text": f" <i>and</i> text {number}"}),
    ]
    store.report(job_id, [*told, *others], (number / 100, f"{number} of 100"))


def test_a_page_follows_a_run_without_running_again(session: Callable[..., Any], dashboard: Any) -> None:
    job_id = _job(dashboard.store)
    _tell(dashboard.store, job_id, 1)
    tab = session(locale="zh-CN")
    frames: list[int] = []
    tab.page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: frames.append(len(frame))))
    tab.open(f"/live?job={job_id}").drawn(TIMEOUT_MS)
    tab.page.wait_for_timeout(1000)
    before = len(frames)
    for number in (2, 3, 4):
        _tell(dashboard.store, job_id, number)
        tab.page.locator(".membound-written", has_text=f"<i>and</i> text {number}").wait_for(timeout=TIMEOUT_MS)
    tab.page.locator(".membound-job", has_text="4 / 100").wait_for(timeout=TIMEOUT_MS)
    rates = tab.page.evaluate(f"{CHART}._fullData.find(({{ meta }}) => meta === 'tokens_per_s').y.slice(-3)")
    assert list(rates) == [102.0, 103.0, 104.0] and len(frames) == before

    _tell(dashboard.store, job_id, 5, (time.time(), "row", ROW))
    tab.sees(ZH("live.rows"), TIMEOUT_MS)
    assert len(frames) > before, "a table is the page's own"
    dashboard.store.finish_job(job_id, "cancelled")
    tab.sees(ZH("job.cancelled"), TIMEOUT_MS)
    tab.settle()


def test_a_run_that_nobody_sees_is_not_asked_for(session: Callable[..., Any], dashboard: Any) -> None:
    job_id = _job(dashboard.store)
    tab = session()
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url) if "/news?" in request.url else None)
    tab.open(f"/live?job={job_id}").drawn(TIMEOUT_MS)
    tab.page.wait_for_function("performance.getEntriesByType('resource').some(({ name }) => /news/.test(name))")
    hidden = "Object.defineProperty(document, 'hidden', {{ configurable: true, get: () => {} }})"
    tab.page.evaluate(hidden.format("true"))
    tab.page.wait_for_timeout(1500)
    before = len(asked)
    tab.page.wait_for_timeout(2500)
    assert len(asked) == before
    tab.page.evaluate(hidden.format("false"))
    _tell(dashboard.store, job_id, 7)
    tab.page.locator(".membound-written", has_text="text 7").wait_for(timeout=TIMEOUT_MS)

    tab.page.locator("[data-testid=stTopNavLink]", has_text=EN("nav.validate")).click()
    tab.page.wait_for_url(re.compile("/validate"), timeout=TIMEOUT_MS)
    tab.settle()
    tab.page.wait_for_timeout(1500)
    before = len(asked)
    tab.page.wait_for_timeout(2500)
    assert len(asked) == before, "another page follows no run"
    dashboard.store.finish_job(job_id, "cancelled")
