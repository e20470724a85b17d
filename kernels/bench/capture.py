"""What must have happened before calls can be captured as a CUDA graph?"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


def warmed_up(run: Callable[[], object], stream: torch.cuda.Stream, again: Callable[[], object] | None = None) -> None:
    """Runs on a stream beside the current one what is about to be captured, twice.

    The first time compiles and makes workspaces, which cannot be captured. The second time raises RuntimeError where
    the host waits for the GPU: in the midst of a capture that would leave the allocator waiting for its end. Of calls
    that are alike one is enough `again`.
    """
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it does not find all; it finds what ends a capture
            torch.cuda.set_sync_debug_mode("error")
        try:
            (again or run)()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    current.wait_stream(stream)
