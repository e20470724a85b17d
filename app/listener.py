"""Who is told how far a long run is, and may end it?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from membound.roofline.progress import Progress


class Listener(Protocol):
    """Is told how far a long run is, and says whether to stop. A worker's JobContext is one."""

    def progress(self, fraction: float, message: str = "") -> None: ...

    def event(self, kind: str, payload: Mapping[str, Any]) -> None: ...

    def check_cancelled(self) -> None: ...


class ProgressListener:
    """Shows how far the run is, and never asks to stop: Ctrl-C does."""

    def __init__(self, show: Progress) -> None:
        self.show = show

    def progress(self, fraction: float, message: str = "") -> None:
        self.show(fraction, message)

    def event(self, kind: str, payload: Mapping[str, Any]) -> None:
        pass

    def check_cancelled(self) -> None:
        pass
