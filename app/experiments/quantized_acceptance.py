"""X1: does quantizing the model, its cache or both change how many drafted tokens are kept?"""

from __future__ import annotations

import itertools
import math
from statistics import median

from membound.app.experiments.acceptance import Acceptance
from membound.app.experiments.finding import Ask, Axis, Chart, Finding, Row
from membound.roofline.results.comparison import spread
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
from membound.runtime.quality import divergence

QUESTION = "Does quantizing the target, its KV cache or the drafter change how many drafted tokens are kept?"
WEIGHTS = ("bf16", "int8", "int4", "int3")
CACHES = ("bf16", "int8", "int4", "kivi2")
REPEATS = 3


def drafters() -> dict[str, Technique]:
    """Every drafter that needs no second model from elsewhere."""
    return {
        "n-gram": NgramSpeculation(gamma=4),
        "first layers": SelfSpeculation(gamma=4),
        "int4 copy": DraftModelSpeculation(format="int4", gamma=4),
        "Medusa": Medusa(heads=4, tree_size=8),
        "EAGLE": Eagle(depth=4, tree_size=8),
    }


def run(ask: Ask) -> Finding:
    """Measures each drafter on each format of weights, and of the cache with bf16 weights, beside no drafter at all."""
    runtime = ask.needed()
    base = load_scenario("live-cpu").with_techniques(()).model_copy(update={"sweep": ()})
    base = base.with_value("workload.arrivals.concurrency", 1).with_value("workload.requests", 6 if ask.quick else 16)
    cells = [(weights, "bf16") for weights in WEIGHTS] + [("bf16", cache) for cache in CACHES[1:]]
    if not ask.quick:
        cells.append(("int4", "int4"))
    chosen = dict(itertools.islice(drafters().items(), 2)) if ask.quick else drafters()
    rows: list[Row] = []
    total, repeats = len(cells) * (1 + len(chosen)), 1 if ask.quick else REPEATS
    for number, (weights, cache) in enumerate(cells):
        target: tuple[Technique, ...] = ()
        target += (WeightQuantization(format=weights),) if weights != "bf16" else ()
        target += (KvQuantization(format=cache),) if cache != "bf16" else ()
        plain = base.with_techniques(target)
        price = divergence(base, plain, runtime) if target else None
        counted = {name: Acceptance() for name in chosen}
        ratios: dict[str, list[float]] = {name: [] for name in chosen}
        emulated = False
        for repeat in range(repeats):
            before = runtime.run(plain, ask.hardware)
            emulated = before.provenance.emulated
            for index, (name, technique) in enumerate(chosen.items()):
                done = number * (1 + len(chosen)) + index + 1
                ask.listener.progress(done / total, f"{weights} weights, {cache} cache, {name}, repeat {repeat + 1}")
                ask.listener.check_cancelled()
                run = runtime.run(plain.with_techniques((*target, technique)), ask.hardware, observer=counted[name])
                assert before.summary.tpot_s.mean and run.summary.tpot_s.mean, "requests have several tokens"
                ratios[name].append(before.summary.tpot_s.mean / run.summary.tpot_s.mean)
        for name, found in counted.items():
            places = found.places()
            rows.append(
                {
                    "weights": weights,
                    "cache": cache,
                    "drafter": name,
                    "acceptance": places[0] if places else math.nan,
                    "acceptance_by_place": places,
                    "tokens_per_step": found.tokens_per_step(),
                    "gain": None if emulated else median(ratios[name]),
                    "gain_spread": None if emulated else spread(ratios[name]),
                    "kl_nats": 0.0 if price is None else price.kl_nats,
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
            "SmolLM2-135M-Instruct (its weights were 4-bit once), one sequence, greedy, recorded prompts, "
            f"{repeats} repeats; the gain is to the same target without drafts, and none where the target is emulated",
        ],
    )


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
