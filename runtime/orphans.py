"""How does a worker process end when its parent is gone, and how does the parent learn that a worker has ended?"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

POLL_S = 0.5


def ended(code: int) -> str:
    """How a process ended that a parent had started, by its exit code."""
    if code >= 0:
        return f"ended with code {code}"
    return f"ended by {signal.Signals(-code).name}" + (", as where memory runs out" if code == -signal.SIGKILL else "")


def end_with(parent: int, folder: Path) -> None:
    """Ends this process soon after `parent`, which started it, and removes the folder that they shared.

    Whoever was killed can tell nobody, and this process may be reading weights or waiting for a sum. Ctrl-C in a
    terminal reaches both, and is answered by the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
