"""Do other programs keep this machine busy?"""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_of_others() -> float | None:
    """The load average where it is above the number of cores by more than a thread, None else.

    A measurement uses every core, and its page or its terminal a little beside it.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load if load > usable_cores() + 1 else None
