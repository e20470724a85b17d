"""A calibration that takes a few seconds and measures nothing, for tests of the page around it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from membound.app.worker import JobContext
from membound.roofline.home import local_calibration_path

RECORDED = Path(__file__).parents[1] / "app" / "calibration.json"


def calibrate(spec: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Keeps a recorded calibration in the place of a measured one."""
    for tenth in range(10):
        context.check_cancelled()
        context.progress(tenth / 10, "bandwidth of memory, pass 1 of 2")
        time.sleep(0.5)
    local_calibration_path().parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(RECORDED, local_calibration_path())
    return {}
