"""What does a browser that watches a run cost it? The same run with and without one, in pairs.

    .venv/bin/python tests/bench/observer.py [--pairs 6] [--home FOLDER] [--json FILE]

A run of SmolLM2-135M's shape with random weights on this machine is started through the dashboard's job store, as the
page Live does. Of each pair one is watched in Chromium from its start to its end, the other one is not while the
server runs all the same; which comes first changes from pair to pair. Ratio: tokens a second watched over unwatched.
Chromium draws in software here and shares the cores with the run: both make the observer dearer than on a desk.

Other programs must be quiet: the load average before each run is in the result. `--home` is a store with this
machine's calibration (a new one, given the calibration of the tests).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))

from driving import Dashboard, Tab, opened_chromium

from membound.app import jobs

CALIBRATION = Path(__file__).parents[1] / "app" / "calibration.json"
SCENARIO = """
name: observed
model: SmolLM2-135M
weights: random
hardware: local
engine: {max_num_seqs: 4, max_batched_tokens: 512, block_size: 16}
techniques: [{name: continuous_batching}]
workload:
  arrivals: {kind: closed_loop, concurrency: 4}
  requests: REQUESTS
  prompts: {kind: synthetic, tokens: {kind: fixed, tokens: 64}}
  output_tokens: {kind: fixed, tokens: 128}
  seed: 1
repeats: 1
"""
RUN_LIMIT_S = 600.0


def measured(dashboard: Dashboard, requests: int, chromium: Any | None) -> dict[str, float]:
    """Tokens a second of one run; `chromium` watches it if given."""
    load = os.getloadavg()[0]
    spec = {"scenario": SCENARIO.replace("REQUESTS", str(requests))}
    job_id = jobs.submit(dashboard.store, "measure", spec)
    context = None
    if chromium is not None:
        context = chromium.new_context(locale="en-US", viewport={"width": 1440, "height": 1000})
        tab = Tab(context, dashboard).open(f"/live?job={job_id}")
        tab.drawn(RUN_LIMIT_S * 1e3)
    job = jobs.wait(dashboard.store, job_id, RUN_LIMIT_S, interval_s=1.0)
    if context is not None:
        tab.check()
        context.close()
    if job.state != "done" or job.result is None:
        raise SystemExit(f"run {job_id} is {job.state}: {job.error}")
    summary = job.result["summary"]
    return {"tokens_per_s": summary["output_tokens_per_s"], "seconds": summary["duration_s"], "load_before": load}


def pairs(dashboard: Dashboard, chromium: Any, many: int, requests: int) -> list[dict[str, Any]]:
    measured(dashboard, requests, None)  # the first run builds and warms what all others find
    found: list[dict[str, Any]] = []
    for at in range(many):
        pair: dict[str, Any] = {}
        for watched in (at % 2 == 0, at % 2 == 1):
            pair["watched" if watched else "alone"] = measured(dashboard, requests, chromium if watched else None)
        pair["ratio"] = pair["watched"]["tokens_per_s"] / pair["alone"]["tokens_per_s"]
        print(json.dumps(pair), flush=True)
        found.append(pair)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--requests", type=int, default=48, help="of 128 tokens each; 48 are about 25 s on two cores")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    home = options.home or Path(tempfile.mkdtemp(prefix="membound-observer-"))
    if not (calibration := home / "calibration" / "local.json").is_file():
        calibration.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CALIBRATION, calibration)
    os.environ["MEMBOUND_SLOT"] = str(home / "slot.lock")
    dashboard = Dashboard(home)
    try:
        with opened_chromium() as chromium:
            found = pairs(dashboard, chromium, options.pairs, options.requests)
    finally:
        dashboard.end()
        if options.home is None:
            shutil.rmtree(home, ignore_errors=True)
    ratios = sorted(pair["ratio"] for pair in found)
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processors": os.cpu_count(),
        "ratio": {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1], "pairs": len(ratios)},
        "cost": 1 - statistics.median(ratios),
        "pairs": found,
    }
    print(json.dumps({name: value for name, value in document.items() if name != "pairs"}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
