"""Which server do `measure` and `compare` take instead of this machine?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from membound.runtime.endpoint.address import Endpoint

EndpointOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="measure a server that speaks OpenAI's protocol: http://HOST:PORT or .../v1"),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--endpoint-model", metavar="NAME", help="the server's name of the model, where it has several"),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="VARIABLE", help="environment variable that holds the server's key"),
]
PatienceOption = Annotated[
    float | None,
    typer.Option("--endpoint-timeout", metavar="S", help="seconds to wait for a token: 300 for the first, then 60"),
]


def endpoint_of(url: str | None, model: str | None, key_env: str | None, patience_s: float | None) -> Endpoint | None:
    """The endpoint that the options name, None without one; raises MemboundError where they do not go together."""
    from membound.runtime.endpoint.address import Endpoint

    if url is not None:
        return Endpoint.of(url, model, key_env, patience_s)
    given = {"--endpoint-model": model, "--api-key-env": key_env, "--endpoint-timeout": patience_s}
    for option, value in given.items():
        if value is not None:
            raise MemboundError(f"option {option} is for a server; give its address with --endpoint too")
    return None
