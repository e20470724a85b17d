"""How quickly does the dashboard answer a person, measured in the browser, and does it stay so?

    .venv/bin/python tests/bench/dashboard_speed.py [paint frames controls sessions live] [--json FILE]
        [--home FOLDER] [--pages explore ..] [--repeats 5] [--sessions 20] [--seconds 60] [--minutes 5]
        [--watched simulate]

- `paint`: from the start of navigation to the answer of each page, and to its first chart where the first screen has
  one; the server has served it before.
- `frames`: from pressing the slider of Explore's roofline to the frame that shows the step at its new place.
- `controls`: from clicking a button, an option of a list, the step of a number or a switch to the last change. What a
  page shows while worker processes compute is its answer at first (`shown`), theirs comes after (`answered`). `busy`
  is the processor time of browser, server and worker processes together, which other programs lengthen less;
  `received` is what the browser is sent, which depends on no machine. What a console says and a person should never
  meet is told with its page and the control before it.
- `sessions`: the server's answers to so many sessions, each of which changes a control every few seconds; one is a
  browser, the others speak Streamlit's protocol, because all their browsers would not fit on this machine.
- `live`: memory of the server while a page watches a run for so many minutes, at one sample a second, and the cores
  that server and browser take, with what the page asks and is told in a second. A run that is measured on the CPU
  (`--watched measure`) is looked at less often than others (`views/console.py`).

Times are of this machine with everything else that it does: the load average is in the result. `--home` is a store to
work in (a new one), which is given the calibration of the tests where it has none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))

from driving import DRAWN, IDLE, WAITING, Dashboard, Tab, opened_chromium
from playwright.sync_api import Error as PlaywrightError

from membound.app.jobs import process_born
from membound.app.store import Store

ROOT = Path(__file__).parents[2]
CALIBRATION = ROOT / "tests" / "app" / "calibration.json"
WIDE = {"width": 1440, "height": 1000}
TIMEOUT_MS = 180_000
ANSWERING = ("start", "explore", "techniques", "stack", "advisor", "simulate", "plan", "validate")
PAGES = (*ANSWERING, "live", "experiments")
# How many controls of a kind are tried on a page, and how long it must be calm to have answered.
MOST_CONTROLS, CALM_MS = 8, 500
# A list opens at once, on a busy machine within some seconds.
OPENS_MS = 5_000
# Of each page, the changes that took most processor time are named.
MOST_COSTLY = 3
THINK_S = (2.0, 6.0)
# A page that is still computing runs again and again: its session waits for so long at most.
MOST_WAIT_S = 30.0
ANSWER = ".stMainBlockContainer h2"

WATCH = """
window.membound = {};
const note = () => {
  const now = performance.now(), seen = window.membound;
  if (!seen.heading && document.querySelector('ANSWER')) seen.heading = now;
  if (!seen.chart && document.querySelector('DRAWN')) seen.chart = now;
  seen.last = now;
};
new MutationObserver(note).observe(document, { childList: true, subtree: true, attributes: true, characterData: true });
""".replace("DRAWN", DRAWN).replace("ANSWER", ANSWER)

# From the next click on: when the page was calm first, and when it was calm with nothing left to wait for.
CHANGE = """
async () => {
  const app = document.querySelector('[data-testid=stApp]'), main = document.querySelector('[data-testid=stMain]');
  const seen = { at: 0, last: 0, shown: 0 };
  const begun = new Promise((resolve) => document.addEventListener('click', (event) => {
    seen.at = seen.last = event.timeStamp;
    resolve();
  }, { capture: true, once: true }));
  const observer = new MutationObserver(() => { seen.last = performance.now(); });
  window.membound.armed = true;
  await begun;
  observer.observe(main, { childList: true, subtree: true, attributes: true, characterData: true });
  const calm = () => app.dataset.testScriptState === 'notRunning' && performance.now() - seen.last > CALM;
  const waits = () => document.querySelector('WAITING');
  while (performance.now() - seen.at < 60000) {
    await new Promise((resolve) => setTimeout(resolve, 20));
    if (calm() && !seen.shown) seen.shown = seen.last - seen.at;
    if (calm() && !waits()) break;
    const ran = app.dataset.testScriptState === 'notRunning';
    if (waits() && !seen.shown && ran) seen.shown = performance.now() - seen.at;
  }
  observer.disconnect();
  window.membound.armed = false;
  return { shown: seen.shown, answered: seen.last - seen.at };
}
""".replace("CALM", str(CALM_MS)).replace("WAITING", WAITING)

# From pressing the slider to the frame after the step's marker moved.
SLIDE = """
() => new Promise((resolve) => {
  let at = 0;
  const star = document.querySelector('.js-plotly-plot .cartesianlayer');
  for (const name of ['pointerdown', 'mousedown'])
    document.addEventListener(name, (event) => { at ||= event.timeStamp; }, { capture: true, once: true });
  const observer = new MutationObserver(() => {
    if (!at) return;
    observer.disconnect();
    requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now() - at)));
  });
  observer.observe(star, { childList: true, subtree: true, attributes: true });
  setTimeout(() => resolve(null), 5000);
})
"""


def spread(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile and worst of milliseconds."""
    ordered = sorted(values)
    return {
        "median_ms": round(statistics.median(ordered), 1),
        "p95_ms": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1),
        "worst_ms": round(ordered[-1], 1),
        "samples": len(ordered),
    }


class CountingTab(Tab):
    """A tab that counts what its page is sent."""

    def __init__(self, context: Any, dashboard: Dashboard) -> None:
        super().__init__(context, dashboard)
        self.received = self.asked = 0
        self.page.on("websocket", lambda socket: socket.on("framereceived", self._frame))
        self.page.on("response", self._response)

    def _frame(self, frame: str | bytes) -> None:
        self.received += len(frame)

    def _response(self, response: Any) -> None:
        if "/news?" in response.url:
            self.asked += 1
            self.received += int(response.headers.get("content-length", 0))


def new_tab(chromium: Any, dashboard: Dashboard) -> tuple[Any, CountingTab]:
    context = chromium.new_context(locale="en-US", viewport=WIDE)
    context.add_init_script(WATCH)
    return context, CountingTab(context, dashboard)


def path_of(page: str) -> str:
    return "/" if page == "start" else f"/{page}"


def opened(tab: Tab, page: str) -> Tab:
    tab.page.goto(tab.url + path_of(page), timeout=TIMEOUT_MS)
    tab.page.wait_for_selector(IDLE, timeout=TIMEOUT_MS)
    if page in ANSWERING:
        tab.page.wait_for_selector(ANSWER, timeout=TIMEOUT_MS)
    tab.page.wait_for_function(f"!document.querySelector('{WAITING}')", timeout=TIMEOUT_MS)
    tab.page.wait_for_selector(IDLE, timeout=TIMEOUT_MS)
    tab.page.wait_for_timeout(CALM_MS)
    return tab.check()


# --- what is measured ---


def paint(chromium: Any, dashboard: Dashboard, pages: list[str], repeats: int) -> dict[str, Any]:
    """Navigation to the answer, and to the chart where the first screen has one."""
    found: dict[str, Any] = {}
    for page in pages:
        context, tab = new_tab(chromium, dashboard)
        opened(tab, page)
        times = []
        for _ in range(repeats):
            opened(tab, page)
            seen = tab.page.evaluate("window.membound")
            times.append(max(seen.get("heading", 0.0), seen.get("chart", 0.0)) or seen["last"])
        found[page] = spread(times)
        context.close()
    return found


def frames(chromium: Any, dashboard: Dashboard, repeats: int) -> dict[str, Any]:
    """Places of the slider of Explore's roofline, one after the other."""
    context, tab = new_tab(chromium, dashboard)
    opened(tab, "explore").drawn(TIMEOUT_MS)
    rail = tab.page.locator(".slider-rail-touch-rect").first
    rail.scroll_into_view_if_needed()
    box = rail.bounding_box()
    assert box is not None, "Explore's roofline has a slider"
    times = []
    for repeat in range(4 * repeats):
        share = (0.05, 0.35, 0.65, 0.95)[repeat % 4]
        tab.page.evaluate(f"window.slid = ({SLIDE})(); 0")
        tab.page.mouse.click(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        times.append(tab.page.evaluate("window.slid"))
        tab.page.wait_for_timeout(300)
    context.close()
    assert all(times), "each press moves the step"
    return {"explore": spread(times)}


def controls(chromium: Any, dashboard: Dashboard, pages: list[str], repeats: int) -> dict[str, Any]:
    """Every kind of control of each page, each changed and changed back: buttons, lists, numbers, switches."""
    found: dict[str, Any] = {}
    for page in pages:
        context, tab = new_tab(chromium, dashboard)
        samples: list[dict[str, Any]] = []
        problems: list[str] = []
        try:
            opened(tab, page)
            for kind, changes in CONTROLS.items():
                for at in range(min(tab.page.locator(changes.where).count(), MOST_CONTROLS)):
                    for _ in range(min(repeats, 2)):
                        target = changes.target(tab.page.locator(changes.where).nth(at))
                        if target is not None:
                            samples.append({"kind": kind} | _changed(tab, target))
                            problems += _met(tab, f"{kind} '{samples[-1]['name']}'")
        except (AssertionError, PlaywrightError) as error:
            problems.append(f"stopped: {error}")
        problems += _met(tab, "the page")
        found[page] = _told(samples) | ({"problems": problems} if problems else {})
        context.close()
    return {page: told for page, told in found.items() if told}


def _told(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What the changes of a page's controls took, all together and by kind."""
    if not samples:
        return {}
    costly = sorted(samples, key=lambda one: -one["busy"])[:MOST_COSTLY]
    return {way: spread([one[way] for one in samples]) for way in ("shown", "answered", "busy", "server")} | {
        "received_kb": round(statistics.median(one["received"] for one in samples) / 1e3, 1),
        "by_kind": {
            kind: spread([one["answered"] for one in samples if one["kind"] == kind])
            for kind in dict.fromkeys(one["kind"] for one in samples)
        },
        "slowest": max(((one["name"], one["answered"]) for one in samples), key=lambda one: one[1]),
        "costliest": [
            f"{one['kind']} '{one['name']}': {one['busy']:.0f} ms, server {one['server']:.0f} ms" for one in costly
        ],
    }


def _met(tab: CountingTab, after: str) -> list[str]:
    """What a person should never meet and has met since the last time, after what."""
    met, tab.problems = tab.problems, []
    return [f"after {after}: {problem}" for problem in met]


def _changed(tab: CountingTab, target: Any) -> dict[str, Any]:
    """Words of what is clicked, and milliseconds to what follows."""
    name = " ".join(target.inner_text().split())
    pid = tab.dashboard.process.pid
    before_s, server_s, before = _all_cpu_s(), _cpu_s(pid), tab.received
    tab.page.evaluate(f"window.changed = ({CHANGE})(); 0")
    target.click(timeout=TIMEOUT_MS)
    seen = tab.page.evaluate("window.changed")
    took = {"busy": 1e3 * (_all_cpu_s() - before_s), "server": 1e3 * (_cpu_s(pid) - server_s)}
    return {"name": name, **seen, **took, "received": tab.received - before}


@dataclass(frozen=True)
class Kind:
    """Controls of a kind: where they are, and what of one is to be clicked; None where it cannot be changed now."""

    where: str
    target: Callable[[Any], Any | None]


def _other_button(group: Any) -> Any | None:
    at = _other_option(group.locator("button"))
    return None if at is None else group.locator("button").nth(at)


def _other_of_list(chosen: Any) -> Any | None:
    """Opens the list and returns an option after the first that is not chosen; None of a list without another.

    A list closes where its page is drawn anew that moment, as a person's would, who opens it again.
    """
    if not chosen.is_visible() or not chosen.locator("input").is_enabled():
        return None
    options = chosen.page.locator("[role=option][aria-selected=false]")
    for _ in range(3):
        chosen.locator("input").click()
        with contextlib.suppress(PlaywrightError):
            options.first.wait_for(timeout=OPENS_MS)
            return options.nth(min(1, options.count() - 1))
        chosen.page.keyboard.press("Escape")
    return None


def _visible(one: Any) -> Any | None:
    return one if one.is_visible() and one.is_enabled() else None


CONTROLS = {
    "buttons": Kind(".stMainBlockContainer [data-testid=stButtonGroup]", _other_button),
    "list": Kind(".stMainBlockContainer [data-testid=stSelectbox]", _other_of_list),
    "number": Kind(".stMainBlockContainer [data-testid=stNumberInputStepUp]", _visible),
    "switch": Kind(".stMainBlockContainer [data-testid=stCheckbox] label", _visible),
}


def _other_option(buttons: Any) -> int | None:
    """An option that can be chosen and is not; the last such, as the first is mostly the cheapest."""
    states = [buttons.nth(at).get_attribute("data-selected") == "true" for at in range(buttons.count())]
    free = (at for at, selected in enumerate(states) if not selected)
    usable = [at for at in free if buttons.nth(at).is_visible() and buttons.nth(at).is_enabled()]
    return usable[-1] if usable else None


def _report(store: Store, job_id: str, number: int, minutes: float) -> None:
    """What a run tells of itself twice a second."""
    now = time.time()
    payload = {"t": now, "tokens_per_s": 100 + random.random(), "running": 4, "kv_utilization": 0.5}
    text = {"request": 1, "prompt": "a prompt ", "text": "word " * (number % 400)}
    store.report(job_id, [(now, "live", payload), (now, "text", text)], (number / (120 * minutes), "measuring"))


def live(chromium: Any, dashboard: Dashboard, minutes: float, kind: str) -> dict[str, Any]:
    """A page watches a job that tells of itself twice a second; memory of the server at one sample a second."""
    store = dashboard.store
    job_id = store.submit_job(kind, {"scenario": "name: watched\n"})
    store.attach_worker(job_id, os.getpid(), process_born(os.getpid()))
    store.start_job(job_id)
    _report(store, job_id, 0, minutes)  # a page has no chart before the first point
    context, tab = new_tab(chromium, dashboard)
    rss, heap, reports = [], [], 1
    try:
        tab.page.goto(f"{tab.url}/live?job={job_id}", timeout=TIMEOUT_MS)
        tab.drawn(TIMEOUT_MS)
        began, server_s, all_s = time.monotonic(), _cpu_s(dashboard.process.pid), _all_cpu_s()
        received, asked = tab.received, tab.asked
        while time.monotonic() - began < 60 * minutes:
            _report(store, job_id, reports, minutes)
            reports += 1
            if reports % 2 == 0:
                rss.append(_rss_mib(dashboard.process.pid))
            if reports % 60 == 0:
                heap.append(tab.page.evaluate("performance.memory.usedJSHeapSize / 2**20"))
                print(
                    f"{reports} reports: server {rss[-1]:.0f} MiB, page {heap[-1]:.0f} MiB", file=sys.stderr, flush=True
                )
            tab.page.wait_for_timeout(500)
        drawn = tab.page.evaluate("document.querySelector('.membound-chart')._fullData[0].y.length")
        seconds = time.monotonic() - began
        server_s, all_s = _cpu_s(dashboard.process.pid) - server_s, _all_cpu_s() - all_s
    finally:
        store.finish_job(job_id, "cancelled")
    tab.check()
    context.close()
    tenth = max(1, len(rss) // 10)
    return {
        "minutes": minutes,
        "kind": kind,
        "server_cores": round(server_s / seconds, 3),
        "browser_cores": round((all_s - server_s) / seconds, 3),
        "asked_a_second": round((tab.asked - asked) / seconds, 2),
        "received_bytes_a_second": round((tab.received - received) / seconds),
        "server_rss_mib": {
            "begin": round(statistics.mean(rss[:tenth])),
            "end": round(statistics.mean(rss[-tenth:])),
            "most": round(max(rss)),
        },
        "browser_heap_mib": [round(one) for one in heap[:: max(1, len(heap) // 10)]],
        "points_told": reports,
        "points_drawn": drawn,
    }


def _rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


# --- many sessions ---


class Visitor:
    """A session that speaks Streamlit's protocol: opens a page and changes one of its controls now and then."""

    def __init__(self, url: str, page: str, control: str, seed: int) -> None:
        self.url, self.page, self.control = url.replace("http", "ws", 1), page, control
        self.random = random.Random(seed)
        self.groups: dict[str, Any] = {}
        self.states: dict[str, list[str]] = {}
        self.page_hash = ""
        self.times: list[float] = []

    async def visit(self, until: float) -> None:
        from websockets.asyncio.client import connect

        async with connect(
            f"{self.url}/_stcore/stream", subprotocols=["streamlit"], max_size=None, ping_interval=None
        ) as self.socket:
            await self._run()
            while time.monotonic() < until:
                await asyncio.sleep(self.random.uniform(*THINK_S))
                await self._change()

    async def _change(self) -> None:
        chosen = next((key for key in self.groups if key.endswith(f"-{self.control}")), None)
        assert chosen is not None, f"{self.page} has the control {self.control}: {list(self.groups)}"
        self.states[chosen] = [self.random.choice(self.groups[chosen])]
        began = time.monotonic()
        await self._run()
        self.times.append(1e3 * (time.monotonic() - began))

    async def _run(self) -> None:
        """Asks for a run of the page and reads until it has ended."""
        from streamlit.proto.BackMsg_pb2 import BackMsg
        from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

        message = BackMsg()
        message.rerun_script.page_name = self.page if not self.page_hash else ""
        message.rerun_script.page_script_hash = self.page_hash
        for key, options in self.states.items():
            state = message.rerun_script.widget_states.widgets.add(id=key)
            state.string_array_value.data.extend(options)
        await self.socket.send(message.SerializeToString())
        until = time.monotonic() + MOST_WAIT_S
        while time.monotonic() < until:
            found = ForwardMsg.FromString(await self.socket.recv())
            if found.HasField("navigation"):  # of the page that was asked for, where the new session knows the entry's
                self.page_hash = found.navigation.page_script_hash
            if found.HasField("delta") and found.delta.new_element.HasField("button_group"):
                group = found.delta.new_element.button_group
                self.groups[group.id] = [option.content for option in group.options]
                self.states.setdefault(group.id, list(group.raw_values))
            if found.HasField("script_finished"):
                return
        raise TimeoutError(f"{self.page} does not end its run")


def sessions(chromium: Any, dashboard: Dashboard, many: int, seconds: float) -> dict[str, Any]:
    """All sessions but one by the protocol while a browser changes a control of Explore, too."""
    kinds = [("explore", "batch"), ("techniques", "batch"), ("stack", "batch"), ("explore", "ctx")]
    visitors = [Visitor(dashboard.url, *kinds[at % len(kinds)], seed=at) for at in range(many - 1)]
    context, tab = new_tab(chromium, dashboard)
    opened(tab, "explore")
    seen: list[float] = []

    async def all_of_them() -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(visitor.visit(until) for visitor in visitors))

    failures: list[BaseException] = []

    def in_the_background() -> None:
        try:
            asyncio.run(all_of_them())
        except BaseException as error:
            failures.append(error)

    before_s = _cpu_s(dashboard.process.pid)
    thread = threading.Thread(target=in_the_background)
    thread.start()
    began = time.monotonic()
    while thread.is_alive():
        buttons = tab.page.locator("[data-testid=stButtonGroup]").filter(has_text="Batch").locator("button")
        option = _other_option(buttons)
        assert option is not None
        tab.page.evaluate(f"window.changed = ({CHANGE})(); 0")
        buttons.nth(random.choice([option, 0, 1, 2])).click(timeout=TIMEOUT_MS)
        seen.append(tab.page.evaluate("window.changed")["answered"])
        tab.page.wait_for_timeout(3000)
    thread.join()
    used = (_cpu_s(dashboard.process.pid) - before_s) / (time.monotonic() - began)
    rss = _rss_mib(dashboard.process.pid)
    context.close()
    if failures:
        raise failures[0]
    by_page: dict[str, list[float]] = {}
    for visitor in visitors:
        by_page.setdefault(visitor.page, []).extend(visitor.times)
    return {
        "sessions": many,
        "script_by_page": {page: spread(times) for page, times in by_page.items()},
        "all_scripts": spread([one for times in by_page.values() for one in times]),
        "browser_on_explore": spread(seen),
        "server_cores": round(used, 2),
        "server_rss_mib": round(rss),
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _all_cpu_s() -> float:
    """Processor time of all that this process started and that still runs: browser, server, worker processes."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family, grown = {os.getpid()}, True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in family} - family
        family, grown = family | children, bool(children)
    total = 0.0
    for pid in family - {os.getpid()}:
        with contextlib.suppress(OSError):
            total += _cpu_s(pid) + _ended_cpu_s(pid)
    return total


def _ended_cpu_s(pid: int) -> float:
    """Processor time of the children that a process has waited for: what ends does not take it away."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("paint", "frames", "controls", "sessions", "live")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all but live where none is named")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--watched", choices=("simulate", "measure"), default="simulate")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    home = options.home or Path(tempfile.mkdtemp(prefix="membound-speed-"))
    if not (calibration := home / "calibration" / "local.json").is_file():
        calibration.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CALIBRATION, calibration)
    dashboard = Dashboard(home, MEMBOUND_SLOT=str(home / "slot.lock"))
    ways: dict[str, Callable[[Any], dict[str, Any]]] = {
        "paint": lambda chromium: paint(chromium, dashboard, options.pages, options.repeats),
        "frames": lambda chromium: frames(chromium, dashboard, options.repeats),
        "controls": lambda chromium: controls(chromium, dashboard, options.pages, options.repeats),
        "sessions": lambda chromium: sessions(chromium, dashboard, options.sessions, options.seconds),
        "live": lambda chromium: live(chromium, dashboard, options.minutes, options.watched),
    }
    found: dict[str, Any] = {"cores": os.cpu_count(), "load_average_before": os.getloadavg()[0]}
    try:
        with opened_chromium() as chromium:
            for part in options.parts or parts[:-1]:
                found[part] = ways[part](chromium)
                print(json.dumps({part: found[part]}, indent=1), flush=True)
    finally:
        if options.home is None:
            dashboard.end()
            shutil.rmtree(home, ignore_errors=True)
        else:
            dashboard.kill()
    found["load_average_after"] = os.getloadavg()[0]
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
