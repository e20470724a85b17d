"""Which server does a page's job measure, and which API key may be sent to it?

Who uses a page chooses the address, so a page sends no variable of the server's environment that was not set for this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from membound.runtime.endpoint.address import Endpoint

# Environment variables whose names begin so were set to be sent to servers; no other one leaves this machine.
KEY_PREFIX = "MEMBOUND_KEY"
MOST_CHARACTERS = 300
_KEY_NAME = re.compile(rf"{KEY_PREFIX}[A-Z0-9_]*")


def endpoint_of(asked: Mapping[str, Any]) -> Endpoint:
    """The server of a job's spec: its `url`, the `model` it is asked for, and the name of its key's variable `key_env`.

    Raises MemboundError with a sentence for who filled in the page's fields.
    """
    from membound.runtime.endpoint.address import Endpoint

    url, model, key_env = (_words(asked, field) for field in ("url", "model", "key_env"))
    if url is None:
        raise MemboundError("the server has no address; give one such as http://127.0.0.1:8000")
    if key_env is not None and not _KEY_NAME.fullmatch(key_env):
        raise MemboundError(
            f"the key's variable is '{key_env[:60]}', which a page does not send; name one that begins with "
            f"{KEY_PREFIX}, such as {KEY_PREFIX}_VLLM, and set it where the dashboard is started"
        )
    try:
        return Endpoint.of(url, model, key_env)
    except MemboundError as error:
        raise MemboundError(_without_options(str(error))) from None


def _words(asked: Mapping[str, Any], field: str) -> str | None:
    """What a field holds, None where it is empty."""
    words = str(asked.get(field) or "").strip()
    if len(words) > MOST_CHARACTERS or not words.isprintable():
        raise MemboundError(f"field '{field}' of the server has {len(words)} characters or some that cannot be read")
    return words or None


def _without_options(said: str) -> str:
    """A sentence about the command's options as one about the page's fields."""
    said = said.replace("and name that with --api-key-env", "and name that")
    return said.replace("option --endpoint ", "the server's address ").replace("option --api-key-env ", "the variable ")
