"""A calibration that measures nothing and ends when a test says so, for tests of the page around it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from membound.app.worker import JobContext
from membound.roofline.home import local_calibration_path

HOLD = "hold"
RECORDED = Path(__file__).parents[1] / "app" / "calibration.json"


def calibrate(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Keeps a recorded calibration in the place of a measured one, as soon as nobody holds it up with a file."""
    context.progress(0.1, "the bandwidth of memory, pass 1 of 2")
    while (context.store.home / HOLD).exists():
        context.check_cancelled()
        time.sleep(0.1)
    local_calibration_path().parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(RECORDED, local_calibration_path())
    return {}
