"""X2: how does acceptance depend on temperature and on the task?"""

from __future__ import annotations

import itertools
import math

from membound.app.experiments.acceptance import AcceptanceCount, tasks_of
from membound.app.experiments.finding import Ask, Axis, Chart, Finding, Row
from membound.app.experiments.quantized_acceptance import drafters
from membound.roofline.scenario import load_scenario

QUESTION = "How does acceptance depend on temperature, on the task and on the place in the draft?"
TEMPERATURES = (0.0, 0.3, 0.6, 1.0, 1.5)
KINDS = ("n-gram", "first layers", "Medusa", "EAGLE")


def run(ask: Ask) -> Finding:
    """Counts what is kept of each drafter's guesses, task by task, at each temperature."""
    runtime = ask.needed()
    base = load_scenario("live-cpu").with_techniques(()).model_copy(update={"sweep": ()})
    base = base.with_value("workload.arrivals.concurrency", 4).with_value("workload.requests", 8 if ask.quick else 20)
    tasks = tasks_of(base)
    known = drafters()
    kinds = KINDS[:2] if ask.quick else KINDS
    cells = list(itertools.product(TEMPERATURES[:: 2 if ask.quick else 1], kinds))
    rows: list[Row] = []
    for number, (temperature, kind) in enumerate(cells):
        ask.listener.progress(number / len(cells), f"temperature {temperature:g}, {kind}")
        ask.listener.check_cancelled()
        found = AcceptanceCount(tasks)
        scenario = base.model_copy(update={"temperature": temperature}).with_techniques((known[kind],))
        runtime.run(scenario, ask.hardware, observer=found)
        for task in sorted(set(tasks.values())):
            places = found.places(task)
            rows.append(
                {
                    "temperature": temperature,
                    "drafter": kind,
                    "task": task,
                    "acceptance": places[0] if places else math.nan,
                    "acceptance_by_place": places,
                    "tokens_per_step": found.tokens_per_step(task),
                    "guesses": sum(count for (of, _), count in found.reached.items() if of == task),
                }
            )
    said = []
    for kind in kinds:
        own = [row for row in rows if row["drafter"] == kind and row["temperature"] == 0.0]
        order = sorted(own, key=lambda row: -row["tokens_per_step"])
        listed = ", ".join(f"{row['task']} {row['tokens_per_step']:.2f}" for row in order)
        said.append(f"{kind}, greedy, tokens a step: {listed}")
    return Finding(
        "x2",
        QUESTION,
        rows,
        Chart(Axis("temperature", "temperature"), Axis("tokens_per_step", "tokens a step"), ("drafter", "task")),
        said,
        [
            "SmolLM2-135M-Instruct, four sequences, recorded prompts of each task; acceptance is that of the first "
            "place, given that there was a guess",
        ],
    )
