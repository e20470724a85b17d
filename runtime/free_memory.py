"""How much memory of this machine is free to take without swapping out other programs?"""

from __future__ import annotations

from pathlib import Path


def free_bytes() -> float:
    """Bytes that are free or freed on demand; without end where the system does not say."""
    told = Path("/proc/meminfo")
    lines = told.read_text().splitlines() if told.exists() else []
    kibibytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024.0 * float(next(kibibytes, "inf"))
