"""How is whoever waits for long work told how far it is?"""

from __future__ import annotations

from collections.abc import Callable

# Is told the share that is done, from 0 to 1, and what is being done; may raise to end the work.
Progress = Callable[[float, str], None]


def silent(fraction: float, message: str) -> None:
    """Tells nobody."""
