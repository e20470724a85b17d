"""How is the dashboard served: to this machine alone, and without loading anything from other hosts?"""

import asyncio
import contextlib
import errno
import gc
import importlib
import ipaddress
import json
import logging
import os
import pkgutil
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import streamlit as st
import uvicorn
from rich.console import Console
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from streamlit import config
from streamlit.auth_util import get_cookie_with_chunks
from streamlit.runtime.secrets import secrets_singleton
from streamlit.web.server.server_util import get_cookie_secret
from streamlit.web.server.starlette.starlette_app_utils import decode_signed_value

from membound.app import jobs, named_files
from membound.app.feed import PLOTLY_URL_VARIABLE
from membound.app.home import StoreError, membound_home
from membound.app.i18n import LANGUAGES, Translate
from membound.app.news import news_of
from membound.app.store import Store
from membound.app.text import plain
from membound.roofline import hardware, models
from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASSETS = Path(__file__).parent / "assets"
MAIN_SCRIPT = Path(__file__).parent / "main.py"
VIEWS = Path(__file__).parent / "views"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
LOG_NAME = "dashboard.log"
PORTS_TRIED = 100
SUPERVISION_INTERVAL_S = 2.0
# What a page may load: a text that somebody else wrote must not make the reader's browser ask another host.
CONTENT_POLICY = "; ".join(
    (
        *("img-src 'self' data: blob:", "media-src 'self' data: blob:", "font-src 'self' data:"),
        *("connect-src 'self' ws: wss:", "frame-src 'self'", "frame-ancestors 'self'", "object-src 'none'"),
        "base-uri 'self'",
    )
)
USER_COOKIE = "_streamlit_user"  # in which Streamlit keeps who logged in, signed
OPTIONS: dict[str, Any] = {
    "browser.gatherUsageStats": False,
    "client.toolbarMode": "viewer",
    "global.developmentMode": False,
    "logger.enableRich": False,
    "runner.magicEnabled": False,
    "server.baseUrlPath": "",
    "server.enableCORS": True,
    "server.enableXsrfProtection": True,
    "server.fileWatcherType": "none",
    "server.headless": True,
    "server.maxUploadSize": 20,
}
_LOGGER = logging.getLogger(__name__)


def serve(
    host: str = "127.0.0.1",
    port: int = 8501,
    open_browser: bool = True,
    script: Path = MAIN_SCRIPT,
    allowed_hosts: Sequence[str] = (),
    allowed_folders: Sequence[Path] = (),
) -> None:
    """Serve the dashboard until Ctrl-C; jobs go on after it.

    The next free port is taken if `port` is in use. `allowed_hosts` are further names by which browsers may call this
    server, such as that of a reverse proxy, and `allowed_folders` further folders whose files a scenario may name.

    Raises:
        MemboundError: the store cannot be written to, or the address cannot be served from.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    named_files.allow(allowed_folders)
    home = membound_home()
    store = Store(home)
    listener = bind(host, port)
    address = url(host, listener.getsockname()[1])
    os.environ[PLOTLY_URL_VARIABLE] = f"/assets/plotly.min.js?v={version('plotly')}"
    logging.basicConfig(filename=home / LOG_NAME, level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("streamlit.error_util").disabled = True  # show_error logs what went wrong
    app = build_app(store, script, host, allowed_hosts, opened_at=address if open_browser else None)
    if not is_loopback(host):
        console.print(
            f"[bold red]Anyone who reaches {host} can use this dashboard: it has no login and can start processes on "
            "this machine.[/]"
        )
    moved = "" if listener.getsockname()[1] == port or port == 0 else f" (port {port} is taken)"
    print(f"membound dashboard: {address}{moved}  Ctrl-C ends it, running jobs go on.", flush=True)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            ws="websockets-sansio",
            ws_max_size=config.get_option("server.maxMessageSize") * 2**20,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
    )
    with contextlib.suppress(KeyboardInterrupt), listener:
        server.run(sockets=[listener])
    running = ", ".join(job.id for job in jobs.poll_active(store) if job.active)
    print("\nmembound dashboard ended.", f"Still running: {running}." if running else "No job is running.", flush=True)


def build_app(
    store: Store, script: Path, host: str, allowed_hosts: Sequence[str] = (), opened_at: str | None = None
) -> "ASGIApp":
    """Make the ASGI application: Streamlit's pages and ours, for browsers that call it by a name of this machine."""
    if not script.is_file():
        raise MemboundError(f"The page {script} does not exist: install membound again.")

    @contextlib.asynccontextmanager
    async def lifespan(app: st.App) -> AsyncIterator[None]:
        supervision = asyncio.create_task(_supervise(store))
        if script == MAIN_SCRIPT:
            threading.Thread(target=_prepare, name="prepare", daemon=True).start()
        if opened_at is not None and _has_display():
            threading.Thread(target=webbrowser.open, args=(opened_at,), daemon=True).start()
        yield
        supervision.cancel()

    app = st.App(
        script,
        lifespan=lifespan,
        routes=_routes(store),
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=trusted_names(host, allowed_hosts), www_redirect=False),
            Middleware(SameOriginMiddleware),
            Middleware(ContentPolicyMiddleware),
        ],
        on_script_error=show_error,
    )
    for name, value in {**OPTIONS, **json.loads((ASSETS / "theme.json").read_text(encoding="utf-8"))}.items():
        config.set_option(name, value)
    return app


class SameOriginMiddleware:
    """Refuse sockets and changes that a page of another origin asks for.

    Streamlit lets pages of any port of localhost in, and asks an outside server for this machine's address before it
    refuses the others.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass a request on, or answer it with 403."""
        if scope["type"] not in ("http", "websocket") or scope.get("method") in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is None or urlsplit(origin.decode("latin-1")).netloc == headers.get(b"host", b"").decode("latin-1"):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await PlainTextResponse("This page may not ask for that.", status_code=403)(scope, receive, send)


class ContentPolicyMiddleware:
    """Tell browsers to load images and data of this server only, and to show its pages in no other's frame."""

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass a request on, and its answer with the policy."""

        async def with_policy(message: "Message") -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", CONTENT_POLICY.encode())
                message["headers"] = [*message.get("headers", ()), policy]
            await send(message)

        await self.app(scope, receive, with_policy if scope["type"] == "http" else send)


def may_read(cookies: Mapping[str, str], host: str) -> bool:
    """Whether who sends these cookies to `host` sees the pages: everybody, or who has logged in where that is asked."""
    if not secrets_singleton.load_if_toml_exists() or "auth" not in secrets_singleton:
        return True

    def signed(name: str) -> bytes | None:
        return decode_signed_value(get_cookie_secret(), name, cookies.get(name, "").encode("latin-1", "replace"))

    user = get_cookie_with_chunks(signed, USER_COOKIE)
    try:
        found = json.loads(user or b"{}")
    except ValueError:
        return False
    return bool(found.get("is_logged_in")) and urlsplit(found.get("origin", "")).netloc == host


def show_error(error: Exception) -> bool:
    """Show an error of a page as one sentence, and keep what led to it in the log under an id."""
    if isinstance(error, MemboundError):
        st.error(plain(str(error)))
        return True
    error_id = secrets.token_hex(3)
    _LOGGER.error("error %s on a page", error_id, exc_info=error)
    what = plain(f"{type(error).__name__}: {error}")
    st.error(f"This page failed ({what}). The log has the details under this id:")
    st.code(f"{membound_home() / LOG_NAME}  {error_id}", language=None)
    return True


def bind(host: str, port: int) -> socket.socket:
    """Listen on the first free port from `port` on, any free one for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, candidate))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise MemboundError(
                    f"Cannot serve on {host}:{candidate} ({error.strerror}): give another --host or --port."
                ) from error
    raise MemboundError(f"No port from {port} to {port + PORTS_TRIED - 1} is free on {host}: give another --port.")


def url(host: str, port: int) -> str:
    """Return the address to type into a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def trusted_names(host: str, allowed_hosts: Sequence[str] = ()) -> list[str]:
    """Return the names in a Host header that are this machine's own, so that no foreign name can be bound to it."""
    names = {*LOOPBACK_NAMES, *allowed_hosts, f"[{host}]" if ":" in host else host}
    if not is_loopback(host):
        names |= {socket.gethostname(), socket.getfqdn(), *_own_addresses()}
    return sorted(names - {"0.0.0.0", "[::]"})


def _own_addresses() -> set[str]:
    addresses = set()
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Connecting a datagram socket sends nothing: it asks the system which address it would send from.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))
            address = probe.getsockname()[0]
            addresses.add(f"[{address}]" if ":" in address else address)
    return addresses


async def _supervise(store: Store) -> None:
    """See to it that cancelled jobs end and lost ones are told so, also when no page is looking."""
    while True:
        try:
            await asyncio.to_thread(jobs.poll_active, store)
        except StoreError as error:
            _LOGGER.warning("%s", error)
        await asyncio.sleep(SUPERVISION_INTERVAL_S)


def _prepare() -> None:
    """Load what the pages need before somebody waits for it, and take it out of the garbage collector's sight.

    Streamlit collects garbage after each run of a page, and of a part that runs by itself: looking through all modules
    took 80 ms each time.
    """
    for module in pkgutil.iter_modules([str(VIEWS)]):
        importlib.import_module(f"membound.app.views.{module.name}")
    hardware.catalog()
    models.catalog()
    gc.collect()
    gc.freeze()


def _has_display() -> bool:
    on_linux = sys.platform.startswith("linux")
    return not on_linux or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _routes(store: Store) -> list[Route]:
    import plotly

    plotly_path = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    for_a_year = {"Cache-Control": "public, max-age=31536000, immutable"}

    def plotly_js(request: Request) -> Response:
        return FileResponse(plotly_path, media_type="text/javascript", headers=for_a_year)

    def favicon(request: Request) -> Response:
        return FileResponse(ASSETS / "favicon.png")

    def news(request: Request) -> Response:
        if not may_read(request.cookies, request.headers.get("host", "")):
            return _not_logged_in()
        after, spoken = request.query_params.get("after", ""), request.query_params.get("lang", "")
        t = Translate(spoken if spoken in LANGUAGES else next(iter(LANGUAGES)))
        try:
            told = news_of(store, request.path_params["job_id"], int(after) if _is_count(after) else 0, t)
        except StoreError as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        return JSONResponse(told, headers={"Cache-Control": "no-store"})

    def run(request: Request) -> Response:
        if not may_read(request.cookies, request.headers.get("host", "")):
            return _not_logged_in()
        try:
            found = store.run(request.path_params["run_id"])
            return JSONResponse(
                {
                    "id": found.id,
                    "kind": found.kind,
                    "label": found.label,
                    "digest": found.digest,
                    "created": found.created,
                    "job_id": found.job_id,
                    "scenario_yaml": found.scenario_yaml(),
                    "summary": found.summary,
                    "comparison": found.comparison(),
                    "tables": found.table_names(),
                }
            )
        except StoreError as error:
            return JSONResponse({"error": str(error)}, status_code=404)

    return [
        Route("/assets/plotly.min.js", plotly_js),
        Route("/favicon.png", favicon),
        Route("/api/jobs/{job_id}/news", news),
        Route("/api/runs/{run_id}", run),
    ]


def _not_logged_in() -> Response:
    return JSONResponse({"error": "Log in on a page of this dashboard first."}, status_code=401)


def _is_count(words: str) -> bool:
    """Whether words are a number of an event: SQLite's have at most 19 digits."""
    return words.isascii() and words.isdecimal() and len(words) < 19
