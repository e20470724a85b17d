"""Which server is asked, for which model, with which key, and how long is it waited for?"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from membound.roofline.errors import MemboundError
from membound.runtime.endpoint.stream import shown

Api = Literal["completions", "chat"]

_PATHS: dict[str, Api] = {"/chat/completions": "chat", "/completions": "completions"}


@dataclass(frozen=True)
class Patience:
    """Seconds that a server may take to accept a connection, to give its first token, and from one to the next."""

    connect_s: float = 10.0
    first_token_s: float = 300.0
    next_token_s: float = 60.0


@dataclass(frozen=True)
class Endpoint:
    """A server's address with what is sent to it. The key is in no record and no message.

    `base_url` ends with the protocol's version; `api` is None where the server is to be asked which it has.
    """

    base_url: str
    api: Api | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    patience: Patience = Patience()

    @classmethod
    def of(
        cls, url: str, model: str | None = None, api_key_env: str | None = None, patience_s: float | None = None
    ) -> Endpoint:
        """The endpoint at `url`: a server, its `/v1`, or one of its two paths, which then is the one that is asked.

        The key is the value of the environment variable `api_key_env`. Raises MemboundError where something is wrong.
        """
        base_url, api = _parts(url)
        patience = Patience()
        if patience_s is not None:
            if not 0 < patience_s <= 1e6:
                raise MemboundError(f"option --endpoint-timeout is {patience_s:g}; give seconds above 0")
            patience = Patience(min(patience.connect_s, patience_s), patience_s, patience_s)
        return cls(base_url, api, model, _key(api_key_env), patience)

    @property
    def metrics_url(self) -> str:
        """Where servers that have Prometheus metrics keep them: beside the versioned paths."""
        return re.sub(r"/v\d+$", "", self.base_url) + "/metrics"

    def url(self, api: Api) -> str:
        return self.base_url + ("/chat/completions" if api == "chat" else "/completions")

    def hidden(self, said: str) -> str:
        """What a server said, without the key, should it have repeated it."""
        return said.replace(self.api_key, "(key)") if self.api_key else said


def _parts(url: str) -> tuple[str, Api | None]:
    """The base URL, and the API where the URL names one."""
    advice = "give the address of a server, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise MemboundError(f"option --endpoint is not a URL ({error}); {advice}") from None
    if parts.username is not None or parts.password is not None:
        raise MemboundError(
            "option --endpoint has a name or a password in its URL, which records would keep; "
            "put a key into an environment variable and name that with --api-key-env"
        )
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise MemboundError(f"option --endpoint is '{shown(url)}'; {advice}")
    if parts.query or parts.fragment or not re.fullmatch(r"[!-~]*", parts.netloc + parts.path):
        raise MemboundError(f"option --endpoint is '{shown(url)}', with more than a server and a path; {advice}")
    path, api = parts.path.rstrip("/"), None
    for suffix, named in _PATHS.items():
        if path.endswith(suffix):
            path, api = path.removesuffix(suffix), named
            break
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}", api


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise MemboundError(
            f"option --api-key-env is '{shown(variable)}', which is not set in the environment; export it with the key"
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise MemboundError(
            f"the key in the environment variable '{shown(variable)}' has spaces or characters no key has"
        )
    return key
