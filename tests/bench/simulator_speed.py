"""How many requests a second does the simulator simulate, and does its cost grow with them alone?

    .venv/bin/python tests/bench/simulator_speed.py [--requests 10000 100000 1000000] [--rounds 3] [--json FILE]
        [--figure FILE.html]

Three loads, on one core: the job that the peers in `shared/facts/simulator-notes.md` were measured on (prompts of 512
and outputs of 256 tokens, 4 arrivals a second), the load of the scenario `million-requests`, and that load on a model
whose layers have a window, so that what each sequence has of it counts. Each run has a process of its own. Seconds are
its processor time in user code, the fewest of all rounds; imports are apart, tables of step times are not. Run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from membound.roofline.scenario import Scenario, load_scenario
from membound.simulator.run import run

PEERS_LOAD = {
    "workload.arrivals": {"kind": "poisson", "rate_rps": 4.0},
    "workload.prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 512}},
    "workload.output_tokens": {"kind": "fixed", "tokens": 256},
    "engine.prefix_caching": True,
}
# Requests a second of the fastest peer on the peers' load, inside its loop: NVIDIA's DynoSim, in Rust (the notes).
FASTEST_PEER_RPS = 8600


def peers_load() -> Scenario:
    scenario = load_scenario("million-requests")
    for path, value in PEERS_LOAD.items():
        scenario = scenario.with_value(path, value)
    return scenario


def measured(name: str, scenario: Scenario, requests: int) -> dict[str, Any]:
    """Seconds and sizes of one simulation."""
    run(scenario.with_value("workload.requests", 300))  # imports and first calls
    chosen = scenario.with_value("workload.requests", requests)
    begun_s = os.times().user
    result = run(chosen)
    seconds = os.times().user - begun_s
    return {
        "load": name,
        "requests": requests,
        "seconds": seconds,
        "requests_per_s": requests / seconds,
        "steps": float(result.steps["steps"].sum()),
        "virtual_s": result.summary.duration_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def exponent(rows: list[dict[str, Any]]) -> float | None:
    """Seconds grow with requests to this power, from the smallest to the largest run; 1 is linear."""
    small, large = (pick(rows, key=lambda row: row["requests"]) for pick in (min, max))
    if small is large:
        return None
    return math.log(large["seconds"] / small["seconds"]) / math.log(large["requests"] / small["requests"])


def figure(rows: list[dict[str, Any]]) -> go.Figure:
    """Seconds over requests, both logarithmic: a line of slope 1 is linear."""
    chart = go.Figure(layout={"xaxis_title": "requests", "yaxis_title": "processor seconds"})
    for load in dict.fromkeys(row["load"] for row in rows):
        own = [row for row in rows if row["load"] == load]
        sizes, seconds = [row["requests"] for row in own], [row["seconds"] for row in own]
        chart.add_scatter(x=sizes, y=seconds, name=load, mode="lines+markers")
    sizes = sorted({row["requests"] for row in rows})
    peer_s = [size / FASTEST_PEER_RPS for size in sizes]
    chart.add_scatter(x=sizes, y=peer_s, name="DynoSim (Rust), peers' load", line_dash="dot")
    chart.update_xaxes(type="log")
    chart.update_yaxes(type="log")
    return chart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    million = load_scenario("million-requests")
    loads = {"peers": peers_load(), "million-requests": million, "windows": million.with_value("model", "gpt-oss-20b")}
    conditions = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processors": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "rounds": options.rounds,
    }
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:
        for name, scenario in loads.items():
            for requests in options.requests:
                rounds = [fresh.submit(measured, name, scenario, requests).result() for _ in range(options.rounds)]
                rows.append(min(rounds, key=lambda row: row["seconds"]))
                shown = (f"{key} {value:.4g}" for key, value in rows[-1].items() if key != "load")
                print(name, *shown, sep="  ")
            power = exponent([row for row in rows if row["load"] == name])
            if power is not None:
                print(f"{name}: seconds grow as requests ^ {power:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")
    if options.figure:
        figure(rows).write_html(options.figure, include_plotlyjs=True)


if __name__ == "__main__":
    sys.exit(main())
