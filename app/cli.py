"""The `membound` command: the product without a browser.

Nothing is imported before Ctrl-C has an answer, as what the commands need takes a second.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

INTERRUPTED = 130


def main() -> None:
    """The console script; Ctrl-C is one word and exit code 130 at any time."""
    # Not where it is ignored, as in the background of a shell, nor where a thread calls this, which may not.
    answered = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    )
    if answered:
        signal.signal(signal.SIGINT, _leave_at_once)
    from membound.app.commands.root import run

    if answered:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(run())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _leave_at_once(*_: object) -> None:
    # Not as an exception, which modules that are half imported take for a reason to do without what they lack.
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
