"""Which part of a day, or of another period, did a run see?"""

from __future__ import annotations

import numpy as np

from membound.roofline.scenario.workload import Arrivals, HourlyArrivals, SineArrivals
from membound.simulator.scheduling.workload.arrivals import mean_rate_rps, period_s, rate_rps_at

DAY_S = 86_400.0
# Moments of the part at which its rate is looked up.
_MOMENTS = 1000


def covered_said(arrivals: Arrivals, last_s: float) -> str | None:
    """What a run says whose last request came after `last_s`; None where arrivals have no period, or it saw a whole."""
    if not isinstance(arrivals, SineArrivals | HourlyArrivals) or not 0 < last_s < (whole_s := period_s(arrivals)):
        return None
    rate = float(np.mean(rate_rps_at(arrivals, (np.arange(_MOMENTS) + 0.5) / _MOMENTS * last_s)))
    begin_s = arrivals.start_s % whole_s
    if whole_s == DAY_S:
        part = f"{clock(begin_s)} to {clock(begin_s + last_s)} of the day"
    else:
        part = f"{begin_s:.4g} to {(begin_s + last_s) % whole_s:.4g} s of each {whole_s:g} s"
    return (
        f"the requests cover {part}: {rate:.3g} arrivals/s, of a mean of {mean_rate_rps(arrivals):.3g}; "
        "workload.arrivals.start_s says where the run begins, workload.requests how far it gets"
    )


def clock(time_s: float) -> str:
    """A time of the day as `14:00`."""
    minutes = round(time_s / 60.0)
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"
