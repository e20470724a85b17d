"""Does a page say one sentence, and lose nothing, where links are garbage, files are broken or the store is gone?"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from screenshots import PAGES

from membound.app import jobs
from membound.app.i18n import Translate
from membound.app.views.scenario_choice import packed
from membound.roofline.scenario import shipped_scenarios

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Session = Callable[..., Any]
EN = Translate("en")
TIMEOUT_MS = 60_000
# Names, numbers, paths, markup and bytes where a page expects a choice of its own.
GARBAGE = "&".join(
    f"{key}={value}"
    for keys, value in (
        (("model", "task", "trace"), "%00..%2F..%2Fetc"),
        (("hw", "profile", "experiment", "scenario"), "%FF%F0%9F%92%A9"),
        (("batch", "prompt", "replicas", "gamma"), "-1"),
        (("ctx", "rate", "requests", "users"), "1e999"),
        (("tp", "gain", "against", "kind"), "%3Cscript%3Ealert(1)%3C%2Fscript%3E"),
        (("with", "stack", "has", "sweep", "devices"), ",,weight_quantization,weight_quantization,nope"),
        (("yaml", "table", "lang", "weights", "kv"), "AAAA"),
    )
    for key in keys
)
# A trace that cannot be read, and what is said of it.
BROKEN_TRACES = {
    "bytes.csv": (b"\x00\xff\xfe", "is not UTF-8 text"),
    "model.csv": (b"GGUF\x03\x00\x00\x00\xff\xff", "is not UTF-8 text"),
    "empty.csv": (b"", "is empty"),
    "cut.jsonl": (b'{"timestamp": 1,', "is not a complete JSON object"),
    "\u8ddf\u8e2a.csv": (b"a,b\n1,2\n", "of no known format"),
    "words.csv": (b"TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n", "column TIMESTAMP is 'x'"),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_broken_link_opens_the_page_by_its_defaults(session: Session, name: str) -> None:
    tab = session().open(f"/{'' if name == 'start' else name}?{GARBAGE}")
    tab.sees(EN(f"{name}.title"))
    tab.settle()


def test_a_link_to_what_is_gone_is_one_sentence(session: Session) -> None:
    for key in ("job", "run"):
        tab = session().open(f"/live?{key}=20990101-000000-..%2F..%2Fabc")
        alert = tab.page.locator("[data-testid=stAlert]", has_text=f"There is no {key}")
        alert.wait_for(timeout=TIMEOUT_MS)
        assert "Traceback" not in alert.inner_text()
        tab.settle()


@pytest.mark.parametrize("field", ["model", "name", "hardware"])
def test_a_link_with_a_picture_of_another_host_asks_for_none_and_shows_its_words(session: Session, field: str) -> None:
    picture = "![x](//evil.example/p)"
    text = re.sub(
        rf"^{field}: .*", f"{field}: '{picture}'", shipped_scenarios()["live-cpu"], count=1, flags=re.MULTILINE
    )
    tab = session().open(f"/simulate?from=own&yaml={packed(text)}")
    alert = tab.page.locator("[data-testid=stAlert]")
    alert.wait_for(timeout=TIMEOUT_MS)
    assert picture in alert.inner_text() and tab.page.locator("[data-testid=stAlert] img").count() == 0
    tab.check()


def test_marks_of_markdown_and_of_streamlit_are_shown_as_they_were_written(session: Session) -> None:
    marks = ":red[hot] $x$ and $y$ **b** _i_ `c` <b>u</b> ~~s~~ [a](b) &lt; | #1 :material/error:"
    text = re.sub("(?m)^model: .*", f"model: '{marks}'", shipped_scenarios()["live-cpu"], count=1)
    tab = session().open(f"/simulate?from=own&yaml={packed(text)}")
    alert = tab.page.locator("[data-testid=stAlert]")
    alert.wait_for(timeout=TIMEOUT_MS)
    assert marks[:70] in alert.inner_text()


def test_pages_may_not_ask_another_host_for_a_picture(session: Session) -> None:
    tab = session().open("/simulate")
    refused = """() => new Promise(resolve => {
        document.addEventListener("securitypolicyviolation", event => resolve(event.violatedDirective));
        new Image().src = "http://evil.example/p.png"; })"""
    assert tab.page.evaluate(refused) == "img-src"


def test_a_broken_trace_is_one_sentence_and_the_next_file_is_read(session: Session) -> None:
    tab = session().open("/simulate?traffic=trace")
    for name, (content, words) in BROKEN_TRACES.items():
        file = {"name": name, "mimeType": "text/csv", "buffer": content}
        tab.page.locator("input[type=file]").first.set_input_files([file])
        alert = tab.page.locator("[data-testid=stAlert]", has_text=words)
        alert.wait_for(timeout=TIMEOUT_MS)
        assert len(alert.inner_text().strip().splitlines()) <= 3, "an icon and one sentence"
        tab.settle()


@pytest.mark.parametrize("path", ["/simulate?traffic=trace", "/validate?against=table"])
def test_a_file_of_300_mb_is_refused_in_one_sentence_and_is_never_sent(
    session: Session, tmp_path: Path, path: str
) -> None:
    large = tmp_path / "large.csv"
    with large.open("wb") as file:
        file.truncate(300 * 2**20)
    tab = session().open(path)
    tab.page.on("request", lambda request: tab.problems.append(f"sent {request.method}") if request.post_data else None)
    tab.page.locator("input[type=file]").first.set_input_files(large)
    tab.sees(re.compile("must be 20.0MB or smaller"))
    tab.settle()


def test_a_worker_that_is_killed_is_said_with_what_to_do(session: Session, dashboard: Any) -> None:
    spec = {"scenario": (Path(__file__).parent / "short.yaml").read_text("utf-8"), "policies": []}
    job_id = jobs.submit(dashboard.store, "policies", spec)
    os.killpg(dashboard.store.job(job_id).pid, signal.SIGKILL)
    for tab in (session(), session()):
        tab.open(f"/live?job={job_id}")
        tab.page.locator("[data-testid=stAlert]", has_text="run it again").wait_for(timeout=TIMEOUT_MS)
        tab.settle()
    assert dashboard.store.job(job_id).state == "lost"


def test_a_store_that_is_deleted_while_pages_are_open_is_begun_anew(
    session: Session, uncalibrated: Callable[..., Any]
) -> None:
    server = uncalibrated(MEMBOUND_TASKS="calibrate=fake_tasks:calibrate", PYTHONPATH=str(Path(__file__).parent))
    tab = session(server).open("/explore")
    for kept in server.home.iterdir():
        shutil.rmtree(kept) if kept.is_dir() and not kept.is_symlink() else kept.unlink()
    tab.choose(EN("choice.batch"), "64")
    tab.page.wait_for_url(re.compile("batch=64"), timeout=TIMEOUT_MS)
    tab.settle()
    for path in ("/live", "/validate", "/experiments"):
        tab.open(path)


def test_back_and_forward_show_the_page_that_the_address_names(session: Session) -> None:
    tab = session().open("/explore?batch=64")
    answer = tab.answer
    tab.page.locator("[data-testid=stTopNavLink]", has_text=EN("nav.validate")).click()
    tab.page.wait_for_url(re.compile("/validate"), timeout=TIMEOUT_MS)
    tab.settle()
    tab.page.go_back()
    tab.page.get_by_role("heading", name=answer).wait_for(timeout=TIMEOUT_MS)
    tab.settle().at("batch=64")
    tab.page.go_forward()
    tab.sees(EN("validate.title"))
    tab.settle()


def test_quick_clicks_end_in_the_last_choice(session: Session) -> None:
    tab = session().open("/explore")
    for batch in ("1", "16", "64", "32"):
        tab.choose(EN("choice.batch"), batch)
    tab.page.wait_for_url(re.compile("batch=32"), timeout=TIMEOUT_MS)
    tab.settle()
    tab.chosen(EN("choice.batch"), "32")
