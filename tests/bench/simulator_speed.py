"""How many requests a second does the simulator simulate, and does its cost grow with them alone?

    .venv/bin/python tests/bench/simulator_speed.py [--requests 10000 100000] [--json FILE]

Two loads, on one core: the job that the peers in `shared/facts/simulator-notes.md` were measured on (prompts of 512 and
outputs of 256 tokens, 4 arrivals a second), and the load of the scenario `million-requests`. Seconds are processor time
of this process, imports and tables of step times apart. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from pathlib import Path

from membound.roofline.scenario import Scenario, load_scenario
from membound.simulator.run import run

PEERS_LOAD = {
    "workload.arrivals": {"kind": "poisson", "rate_rps": 4.0},
    "workload.prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 512}},
    "workload.output_tokens": {"kind": "fixed", "tokens": 256},
}


def peers_load() -> Scenario:
    scenario = load_scenario("million-requests")
    for path, value in PEERS_LOAD.items():
        scenario = scenario.with_value(path, value)
    return scenario


def measured(name: str, scenario: Scenario, requests: int) -> dict[str, float | str]:
    """Seconds and sizes of one simulation."""
    chosen = scenario.with_value("workload.requests", requests)
    begun_s = os.times().user
    result = run(chosen)
    seconds = os.times().user - begun_s
    steps = float(result.steps["steps"].sum())
    return {
        "load": name,
        "requests": requests,
        "seconds": seconds,
        "requests_per_s": requests / seconds,
        "steps": steps,
        "rows_per_request": len(result.steps["steps"]) / requests,
        "steps_per_s": steps / seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loads = {"peers": peers_load(), "million-requests": load_scenario("million-requests")}
    rows = []
    for name, scenario in loads.items():
        measured(name, scenario, 300)  # imports and first calls
        for requests in options.requests:
            rows.append(measured(name, scenario, requests))
            print("  ".join(f"{key} {value:.4g}" if key != "load" else str(value) for key, value in rows[-1].items()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    sys.exit(main())
