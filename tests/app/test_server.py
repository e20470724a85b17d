"""Does the dashboard serve this machine, only this machine, and end without ending the work?"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import plotly.graph_objects as go
import pytest
from streamlit.testing.v1 import AppTest
from streamlit.web.server.starlette.starlette_app_utils import create_signed_value

from membound.app import jobs, plot, server
from membound.app.figures.live import MOST_POINTS
from membound.app.i18n import LANGUAGES, Translate
from membound.app.news import news_of
from membound.app.store import Store
from membound.roofline.errors import MemboundError

PAGE = """
import plotly.graph_objects as go
import streamlit as st
from membound.app.plot import draw
from membound.roofline.errors import MemboundError
st.title("A page")
@st.fragment(run_every=0.5)
def chart():
    points = st.session_state["points"] = st.session_state.get("points", 2) + 1
    line = go.Scatter(y=list(range(points)), name="measured")
    figure = go.Figure(line, layout={"title": "tok/s", "template": "none"})
    draw(figure, "rate", keeps_zoom=True)
chart()
if st.button("refuse"):
    raise MemboundError("batch is 0: at least 1.")
if st.button("crash"):
    raise RuntimeError("shapes differ")
"""
SERVE = """
import sys
from pathlib import Path
from membound.app.server import serve
serve(port=int(sys.argv[1]), script=Path(sys.argv[2]))
"""

PRINT_OPTIONS = """
import sys
from pathlib import Path
from membound.app.server import build_app
from membound.app.store import Store
from streamlit.config import get_option
build_app(Store(Path(".")), Path(sys.argv[1]), "127.0.0.1")
names = "theme.light.primaryColor", "theme.dark.primaryColor", "theme.base", "browser.gatherUsageStats"
print([get_option(name) for name in (*names, "server.maxUploadSize")])
"""


@contextlib.contextmanager
def dashboard(folder: Path, port: int):
    script = folder / "page.py"
    script.write_text(PAGE)
    environment = {**os.environ, "MEMBOUND_HOME": str(folder / "home"), "DISPLAY": ""}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVE, str(port), str(script)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, process.communicate()[1]
        address = line.split("dashboard: ")[1].split()[0]
        deadline = time.monotonic() + 60
        while get(f"{address}/_stcore/health")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield process, line, address
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("served")
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    with dashboard(folder, taken.getsockname()[1]) as (process, line, address):
        yield folder, process, line, address, taken.getsockname()[1]
    taken.close()


def socket_status(address: str, **headers: str) -> str:
    """Ask for Streamlit's WebSocket and return the status line of the answer."""
    host, port = address.removeprefix("http://").split(":")
    lines = {
        "Host": f"{host}:{port}",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Protocol": "streamlit",
        **headers,
    }
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        text = "GET /_stcore/stream HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
        connection.sendall(text.encode())
        return connection.recv(200).split(b"\r\n")[0].decode()


def test_a_taken_port_gives_the_next_free_one_and_says_so(served):
    *_, line, address, taken_port = served
    assert f"(port {taken_port} is taken)" in line and int(address.rsplit(":", 1)[1]) > taken_port


def test_the_page_is_served_to_names_of_this_machine_only(served):
    *_, address, _ = served
    port = address.rsplit(":", 1)[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert get(address, Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example"):
        assert get(address, Host=host)[0] == 400
        assert " 400 " in socket_status(address, Host=host, Origin=f"http://{host}")


def test_sockets_open_for_pages_of_this_origin_only(served):
    *_, address, _ = served
    assert " 101 " in socket_status(address, Origin=address)
    assert " 101 " in socket_status(address)
    for origin in ("http://evil.example", "http://localhost:9999", "null"):
        assert " 403 " in socket_status(address, Origin=origin)


def test_plotly_comes_from_the_installed_package_and_is_cached(served):
    *_, address, _ = served
    status, body, headers = get(f"{address}/assets/plotly.min.js?v=1")
    assert status == 200 and b"plotly.js v" in body[:200] and "immutable" in headers["cache-control"]


@pytest.mark.parametrize("path", ["/", "/assets/plotly.min.js", "/favicon.png", "/api/runs/nothing", "/_stcore/health"])
def test_no_page_may_load_a_picture_or_data_of_another_host_or_be_framed_by_one(served, path):
    *_, address, _ = served
    policy = dict(rule.split(" ", 1) for rule in get(address + path)[2]["content-security-policy"].split("; "))
    assert policy["img-src"] == "'self' data: blob:" and policy["frame-ancestors"] == "'self'"
    assert not any(host in rule for rule in policy.values() for host in ("http", "*", "unsafe"))


def test_a_run_is_served_as_json_and_an_unknown_one_is_a_sentence(served):
    folder, _, _, address, _ = served
    run_id = Store(folder / "home").save_run(
        kind="compare", label="x", digest="d", scenario_yaml="a: 1\n", summary={"tpot_s": 0.1}, comparison={"rows": []}
    )
    status, body, _ = get(f"{address}/api/runs/{run_id}")
    run = json.loads(body)
    assert status == 200 and (run["summary"], run["comparison"], run["tables"]) == ({"tpot_s": 0.1}, {"rows": []}, [])
    status, body, _ = get(f"{address}/api/runs/nothing")
    assert status == 404 and "There is no run 'nothing'" in json.loads(body)["error"]


COOKIE_SECRET = "of a test, and long enough"
SECRETS = f"""[auth]
redirect_uri = "https://roofs.example.org/oauth2callback"
cookie_secret = "{COOKIE_SECRET}"
client_id = "test"
client_secret = "of a test"
server_metadata_url = "http://127.0.0.1:1/"
"""


def cookie(user: dict[str, object], secret: str = COOKIE_SECRET) -> str:
    """A login as Streamlit keeps it."""
    value = create_signed_value(secret, server.USER_COOKIE, json.dumps(user)).decode()
    return f"{server.USER_COOKIE}={value}"


@pytest.fixture(scope="module")
def behind_a_login(tmp_path_factory: pytest.TempPathFactory):
    """The command with --allow-host and an OIDC provider, the address and a run that is kept."""
    folder = tmp_path_factory.mktemp("login")
    (folder / ".streamlit").mkdir()
    (folder / ".streamlit" / "secrets.toml").write_text(SECRETS)
    store = Store(folder / "home")
    (folder / "home").mkdir()
    run_id = store.save_run(kind="compare", label="x", digest="d", scenario_yaml="a: 1\n", summary={})
    options = ["--no-browser", "--port", "0", "--allow-host", "roofs.example.org", "--allow-host", "roofs"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "membound.app.cli", "dashboard", *options],
        cwd=folder,
        env={**os.environ, "MEMBOUND_HOME": str(folder / "home"), "DISPLAY": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().split("dashboard: ")[1].split()[0]
    deadline = time.monotonic() + 60
    with contextlib.suppress(OSError):
        while get(f"{address}/_stcore/health")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.1)
    yield address, run_id
    process.kill()
    process.wait()


def test_a_name_that_is_allowed_is_served_and_no_other(behind_a_login):
    address, _ = behind_a_login
    for host in ("roofs.example.org", "roofs.example.org:443", "roofs", "127.0.0.1"):
        assert get(address, Host=host)[0] == 200
        assert " 101 " in socket_status(address, Host=host, Origin=f"https://{host}")
    for host in ("evil.example", "roofs.example.org.evil.example", "x.roofs.example.org", "roofs2"):
        assert get(address, Host=host)[0] == 400
    assert " 101 " not in socket_status(address, Host="roofs", Origin="https://evil.example")


def test_kept_runs_are_for_who_has_logged_in(behind_a_login):
    address, run_id = behind_a_login
    ours = {"is_logged_in": True, "origin": "https://roofs.example.org"}

    def asked(host: str = "roofs.example.org", **headers: str) -> int:
        return get(f"{address}/api/runs/{run_id}", Host=host, **headers)[0]

    assert asked(Cookie=cookie(ours)) == 200
    assert asked() == 401
    for refused in (
        cookie(ours, secret="of somebody else"),
        cookie({**ours, "is_logged_in": False}),
        cookie({**ours, "origin": "https://evil.example"}),
        cookie({}),
        f"{server.USER_COOKIE}=nonsense",
        f"{server.USER_COOKIE}=",
    ):
        assert asked(Cookie=refused) == 401
    assert asked(host="roofs", Cookie=cookie(ours)) == 401, "a login holds for the name that it was made at"
    status, body, _ = get(f"{address}/api/runs/nothing", Host="roofs.example.org")
    assert status == 401 and "nothing" not in json.loads(body)["error"], "nor is it said which runs there are"


def test_what_pages_need_is_loaded_and_nothing_that_the_collector_looks_through():
    """Streamlit collects garbage after each run of a page, in the thread that answers."""
    loaded = "import gc, sys; from membound.app import server; server._prepare(); "
    check = (
        "print(gc.get_freeze_count() > 50_000 > len(gc.get_objects()), 'membound.app.views.validate' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", loaded + check], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_lost_jobs_are_found_without_a_page(served):
    folder, *_ = served
    store = Store(folder / "home")
    job_id = store.submit_job("simulate", {})
    store.attach_worker(job_id, 2**22, "1")
    deadline = time.monotonic() + 60
    while store.job(job_id).active:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert store.job(job_id).state == "lost"


def test_ctrl_c_ends_the_server_and_leaves_jobs_running(tmp_path, monkeypatch):
    (tmp_path / "tasks_of_the_server_tests.py").write_text(
        "import time\ndef nap(spec, context):\n    for _ in range(6000):\n"
        "        context.check_cancelled()\n        time.sleep(0.1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MEMBOUND_TASKS", "nap=tasks_of_the_server_tests:nap")
    with dashboard(tmp_path, 0) as (process, _, _):
        store = Store(tmp_path / "home")
        job_id = jobs.submit(store, "nap", {})
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert f"Still running: {job_id}." in output, errors
        assert errors == ""
        assert jobs.poll(store, job_id).active
        jobs.cancel(store, job_id)
        assert jobs.wait(store, job_id, timeout_s=60).state == "cancelled"


def test_the_theme_and_the_options_apply_from_any_folder(tmp_path):
    (tmp_path / "page.py").write_text("")
    (tmp_path / ".streamlit").mkdir()
    (tmp_path / ".streamlit" / "config.toml").write_text("[browser]\ngatherUsageStats = true\n")
    command = [sys.executable, "-P", "-c", PRINT_OPTIONS, str(tmp_path / "page.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['#0072B2', '#2779B5', None, False, 20]"


def test_every_colour_of_text_and_buttons_can_be_read():
    theme = json.loads((server.ASSETS / "theme.json").read_text())

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for mode in ("light", "dark"):
        colour = {name: theme[f"theme.{mode}.{name}Color"] for name in ("text", "link", "background", "primary")}
        behind = (colour["background"], theme[f"theme.{mode}.secondaryBackgroundColor"])
        assert all(contrast(colour[front], back) >= 4.5 for front in ("text", "link") for back in behind), mode
        assert contrast("#FFFFFF", colour["primary"]) >= 4.5, mode
        assert contrast(colour["primary"], colour["background"]) >= 3.0, mode


def test_names_of_this_machine_are_trusted_and_no_others():
    assert server.trusted_names("127.0.0.1") == ["127.0.0.1", "[::1]", "localhost"]
    everywhere = server.trusted_names("0.0.0.0", ["bench.example.org"])
    assert {"127.0.0.1", "localhost", socket.gethostname(), "bench.example.org"} <= set(everywhere)
    assert "0.0.0.0" not in everywhere and "*" not in everywhere


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_addresses_are_known(host):
    assert server.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::", "box.local"])
def test_other_addresses_are_not_loopback(host):
    assert not server.is_loopback(host)


def test_an_address_that_is_not_ours_is_refused_in_a_sentence():
    with pytest.raises(MemboundError, match=r"Cannot serve on 192\.0\.2\.1:8501 .*--host"):
        server.bind("192.0.2.1", 8501)


def test_serving_others_is_warned_about(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda self, sockets: None)
    monkeypatch.setattr(server, "build_app", lambda *arguments, **options: None)
    monkeypatch.setattr(server.logging, "basicConfig", lambda **options: None)
    monkeypatch.setenv(plot.PLOTLY_URL_VARIABLE, "")
    server.serve("0.0.0.0", 0, open_browser=False)
    printed = capsys.readouterr()
    assert "no login" in printed.err and "http://127.0.0.1:" in printed.out


def test_a_page_of_another_origin_may_not_change_anything():
    sent: list[dict] = []

    async def app(scope, receive, send):
        sent.append({"status": 200})

    async def send(message):
        sent.append(message)

    async def ask(method: str, origin: bytes | None) -> int:
        sent.clear()
        headers = [(b"host", b"127.0.0.1:8501"), *([(b"origin", origin)] if origin else [])]
        scope = {"type": "http", "method": method, "headers": headers}
        await server.SameOriginMiddleware(app)(scope, None, send)
        return sent[0]["status"]

    assert asyncio.run(ask("PUT", b"http://evil.example")) == 403
    assert asyncio.run(ask("POST", b"http://127.0.0.1:9999")) == 403
    assert asyncio.run(ask("PUT", b"http://127.0.0.1:8501")) == 200
    assert asyncio.run(ask("GET", b"http://evil.example")) == 200


def test_a_chart_is_streamlits_own_where_nobody_serves_plotly(tmp_path, monkeypatch):
    monkeypatch.delenv(plot.PLOTLY_URL_VARIABLE, raising=False)
    page = AppTest.from_string(PAGE).run()
    assert not page.exception and len(page.get("plotly_chart")) == 1


def test_a_chart_is_the_component_where_plotly_is_served(monkeypatch):
    monkeypatch.setenv(plot.PLOTLY_URL_VARIABLE, "/assets/plotly.min.js")
    page = AppTest.from_string(PAGE).run()
    assert not page.exception and len(page.get("bidi_component")) == 1


@pytest.mark.browser
def test_a_growing_chart_keeps_its_zoom_and_follows_the_theme_and_asks_nothing_of_others(served):
    from playwright.sync_api import sync_playwright

    from membound.app.commands.doctor import find_browser

    *_, address, _ = served
    chart = "document.querySelector('.membound-chart')"
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=find_browser(), args=options)
        page = browser.new_page(color_scheme="light")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.wait_for_selector(".membound-chart .nsewdrag", timeout=60_000)
        page.evaluate(f"{chart}.mark = 'same node'")
        box = page.locator(".membound-chart .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 150, steps=5)
        page.mouse.up()
        page.wait_for_function(f"{chart}._fullLayout.xaxis.autorange === false")
        zoomed, points = page.evaluate(f"[{chart}._fullLayout.xaxis.range, {chart}._fullData[0].y.length]")
        page.wait_for_function(f"{chart}._fullData[0].y.length > {points + 1}")
        assert page.evaluate(f"[{chart}._fullLayout.xaxis.range, {chart}.mark]") == [zoomed, "same node"]
        assert page.locator(".membound-chart").get_attribute("aria-label") == "tok/s: measured"
        text_colour = "getComputedStyle(document.querySelector('.membound-chart .xtick text')).fill"
        assert page.evaluate(text_colour) == "rgb(15, 19, 23)"
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"{text_colour} === 'rgb(233, 236, 239)'")
        browser.close()
    assert [url for url in asked if not url.startswith((address, "blob:", "data:"))] == []


def test_a_chart_is_described_by_its_title_and_series():
    figure = go.Figure([go.Scatter(y=[1], name="measured"), go.Scatter(y=[1])], layout={"title": "tok/s"})
    assert plot.describe(figure) == "tok/s: measured"
    assert plot.describe(go.Figure()) == "Chart"


def test_errors_of_a_page_are_shown_as_a_sentence_and_logged_under_an_id(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))

    def page() -> None:
        from membound.app import server
        from membound.roofline.errors import MemboundError

        server.show_error(MemboundError("batch is 0: at least 1."))
        server.show_error(RuntimeError("shapes differ"))

    shown = AppTest.from_function(page).run()
    refusal, crash = (error.value for error in shown.error)
    assert refusal == "batch is 0: at least 1."
    assert "RuntimeError: shapes differ" in crash and str(tmp_path) in shown.code[0].value
    assert shown.code[0].value.split()[-1] in caplog.text


def _told(store: Store) -> str:
    """A job that runs and has told of a point, a row and two texts."""
    job_id = store.submit_job("compare", {"scenario": "name: told\n"})
    store.attach_worker(job_id, os.getpid(), jobs.process_born(os.getpid()))
    store.start_job(job_id)
    began = store.job(job_id).started or 0.0
    told = [
        (began + 1, "live", {"t": 1.0, "tokens_per_s": 40.0, "running": 4}),
        (began + 1, "text", {"request": 1, "prompt": "p", "text": "first"}),
        (began + 2, "row", {"technique": "int8_weights"}),
        (began + 2, "text", {"request": 1, "prompt": "p", "text": "second"}),
    ]
    store.report(job_id, told, (0.5, "done"))
    return job_id


def test_news_of_a_job_are_what_it_told_since_they_were_asked_for(tmp_path):
    store = Store(tmp_path)
    job_id = _told(store)
    news = news_of(store, job_id, 0, Translate("zh"))
    assert news["active"] and news["progress"] == 0.5 and Translate("zh")("says.done") in news["words"]
    ((seq, at_s, *values),) = news["points"]
    assert at_s == pytest.approx(1.0, abs=0.01) and values == [40.0, 4, None]
    assert news["text"]["text"] == "second" and seq < news["told_rows"] < news["seq"]
    later = news_of(store, job_id, news["seq"], Translate("en"))
    assert (later["points"], later["text"], later["told_rows"]) == ([], None, 0) and later["seq"] == news["seq"]


@pytest.mark.parametrize("end", ["done", "cancelled", "failed", "lost"])
def test_news_of_a_job_that_has_ended_say_so(tmp_path, end):
    store = Store(tmp_path)
    job_id = _told(store)
    store.finish_job(job_id, end)
    for language in LANGUAGES:
        news = news_of(store, job_id, 0, Translate(language))
        assert not news["active"] and news["words"] == Translate(language)(f"state.{end}")


def test_a_page_hears_of_a_job_by_the_server_whatever_it_asks_for(served):
    folder, _, _, address, _ = served
    job_id = _told(Store(folder / "home"))
    for asked, points in (("lang=zh", 1), ("after=abc&lang=xx", 1), ("after=99999999", 0), (f"after={'9' * 40}", 1)):
        status, body, headers = get(f"{address}/api/jobs/{job_id}/news?{asked}")
        assert status == 200 and len(json.loads(body)["points"]) == points and headers["cache-control"] == "no-store"
    status, body, _ = get(f"{address}/api/jobs/no-such-job/news")
    assert status == 404 and "no-such-job" in json.loads(body)["error"]


def test_what_a_page_hears_of_a_running_job_is_small(tmp_path):
    store = Store(tmp_path)
    job_id = _told(store)
    seen = news_of(store, job_id, 0, Translate("en"))["seq"]
    point = {"t": 1.0, "tokens_per_s": 123.456789, "running": 4, "kv_utilization": 0.5, "steps": 9}
    store.report(job_id, [(time.time(), "live", point)] * 2)
    assert len(json.dumps(news_of(store, job_id, seen, Translate("en")))) < 500
    store.report(job_id, [(time.time(), "live", point)] * 5000)
    assert len(news_of(store, job_id, seen, Translate("en"))["points"]) <= MOST_POINTS
