"""X1: does quantizing the model, its cache or both change how many drafted tokens are kept?"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from membound.app.experiments.acceptance import AcceptanceCount
from membound.app.experiments.finding import Ask, Axis, Chart, Finding, Row
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import load_scenario
from membound.roofline.techniques import (
    DraftModelSpeculation,
    Eagle,
    KvQuantization,
    Medusa,
    NgramSpeculation,
    SelfSpeculation,
    Technique,
    WeightQuantization,
)
from membound.runtime.kv.build import store_problem
from membound.runtime.quality import english_kl

QUESTION = "Does quantizing the target, its KV cache or the drafter change how many drafted tokens are kept?"
WEIGHTS = ("bf16", "int8", "int4", "int3")
CACHES = ("bf16", "int8", "int4", "kivi2")
REQUESTS, QUICK_REQUESTS = 6, 3
ENGLISH_TOKENS = 1024


def drafters() -> dict[str, Technique]:
    """Every drafter that needs no second model from elsewhere."""
    return {
        "n-gram": NgramSpeculation(gamma=4),
        "first layers": SelfSpeculation(gamma=4),
        "int8 copy": _copy("int8"),
        "int4 copy": _copy("int4"),
        "Medusa": Medusa(heads=4, tree_size=8),
        "EAGLE": Eagle(depth=4, tree_size=8),
    }


def _copy(format: str) -> Technique:
    """The model itself in fewer bits."""
    return DraftModelSpeculation(draft="SmolLM2-135M", weights="pretrained", format=format, gamma=4)


def run(ask: Ask) -> Finding:
    """Measures each drafter on each format of weights, and of the cache with bf16 weights, beside no drafter at all."""
    runtime = ask.needed()
    base = load_scenario("live-cpu").with_techniques(()).model_copy(update={"sweep": ()})
    requests = QUICK_REQUESTS if ask.quick else REQUESTS
    base = base.with_value("workload.arrivals.concurrency", 1).with_value("workload.requests", requests)
    cells = [(weights, "bf16") for weights in WEIGHTS] + [("bf16", cache) for cache in CACHES[1:]]
    if not ask.quick:
        cells.append(("int4", "int4"))
    chosen = dict(itertools.islice(drafters().items(), 2)) if ask.quick else drafters()
    rows: list[Row] = []
    total = len(cells) * (1 + len(chosen))
    for number, (weights, cache) in enumerate(cells):
        target: tuple[Technique, ...] = ()
        target += (WeightQuantization(format=weights),) if weights != "bf16" else ()
        target += (KvQuantization(format=cache),) if cache != "bf16" else ()
        plain = base.with_techniques(target)
        ask.listener.progress(number / len(cells), f"{weights} weights, {cache} cache")
        price = english_kl(base, plain, runtime, ENGLISH_TOKENS) if target else 0.0
        before = runtime.run(plain, ask.hardware)
        for index, (name, technique) in enumerate(chosen.items()):
            done = number * (1 + len(chosen)) + index + 1
            ask.listener.progress(done / total, f"{weights} weights, {cache} cache, {name}")
            ask.listener.check_cancelled()
            drafting, found = plain.with_techniques((*target, technique)), AcceptanceCount()
            if store_problem(drafting.setup, drafting.engine, runtime.model(base).spec):
                continue
            run = runtime.run(drafting, ask.hardware, observer=found)
            places, gains = found.places(), _decode_s(before) / _decode_s(run)
            gain = None if before.provenance.emulated or run.provenance.emulated else float(np.median(gains))
            rows.append(
                {
                    "weights": weights,
                    "cache": cache,
                    "drafter": name,
                    "acceptance": places[0] if places else math.nan,
                    "acceptance_by_place": places,
                    "tokens_per_step": found.tokens_per_step(),
                    "gain": gain,
                    "gain_spread": None if gain is None else float(np.subtract(*np.percentile(gains, (75, 25)))) / 2,
                    "step_cost": None if gain is None else found.tokens_per_step() / gain,
                    "kl_nats": price,
                    "target": f"{weights} / {cache}",
                }
            )
    return Finding(
        "x1",
        QUESTION,
        rows,
        Chart(Axis("target", "weights / KV cache"), Axis("tokens_per_step", "tokens a step"), ("drafter",)),
        list(_says(rows)),
        [
            f"SmolLM2-135M-Instruct (its weights were 4-bit once), one sequence, greedy, {requests} recorded prompts; "
            "the gain is the median of the prompts' decode times without drafts and with, for the same target, its "
            "spread half of the middle half, and there is none where target or drafter is emulated; a step with drafts "
            f"costs step_cost steps without; KL divergence on {ENGLISH_TOKENS} tokens of English. "
            "A cache in kivi2 takes chains only, of drafters that do not write into it",
        ],
    )


def _decode_s(run: RunResult) -> NDArray[Any]:
    """Seconds of each request behind its first token, by its number."""
    order = np.argsort(run.requests["id"])
    seconds: NDArray[Any] = (run.requests["finished_s"] - run.requests["first_token_s"])[order]
    return seconds


def _says(rows: list[Row]) -> list[str]:
    said = []
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        own = [row for row in rows if row["drafter"] == drafter]
        plain = next(row for row in own if row["target"] == "bf16 / bf16")
        worst = min(own, key=lambda row: row["tokens_per_step"])
        said.append(
            f"{drafter}: {plain['tokens_per_step']:.2f} tokens a step on bf16, at least {worst['tokens_per_step']:.2f} "
            f"({worst['target']}, KL {worst['kl_nats']:.3f} nats)"
        )
    return said
