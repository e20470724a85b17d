"""X5: where do gains multiply, and where does one take from another?"""

from __future__ import annotations

import math
from typing import Any

from membound.app.experiments.finding import Ask, Axis, Chart, Finding, Row
from membound.roofline.scenario import parse_scenario
from membound.simulator.stacking.stacking import Stack, stack

QUESTION = "Of five families of techniques, what is the real gain of all against the product of their gains, and where?"
MODEL, DEVICE = "Llama-3.1-8B", "H100-SXM5"
BATCHES, CONTEXTS = (1, 8, 32, 128), (1024, 8192, 65536)
TECHNIQUES: list[dict[str, Any]] = [
    {"name": "weight_quantization", "format": "fp8"},
    {"name": "kv_quantization", "format": "fp8"},
    {"name": "sparsity_2_4"},
    {"name": "eagle"},
    {"name": "kv_eviction", "policy": "quest", "budget": 1024},
]


def run(ask: Ask) -> Finding:
    """All 2^5 stacks at each batch and context, by closed forms on one device of the catalog."""
    scenario = parse_scenario(
        {
            "name": "x5",
            "model": MODEL,
            "hardware": DEVICE,
            "engine": {"profile": "vllm", "max_num_seqs": max(BATCHES)},
            "techniques": ["continuous_batching", *TECHNIQUES],
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": 1},
                "requests": max(BATCHES),
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 1024}},
                "output_tokens": {"kind": "fixed", "tokens": 256},
            },
        }
    )
    names = [str(technique["name"]) for technique in TECHNIQUES]
    batches, contexts = (BATCHES[::3], CONTEXTS[::2]) if ask.quick else (BATCHES, CONTEXTS)
    # Where memory bounds the batch, what frees memory serves more at once, each a little slower: throughput counts.
    found = stack(
        scenario,
        techniques=names,
        batches=batches,
        contexts=contexts,
        metric="output_tokens_per_s",
        progress=ask.listener.progress,
    )
    rows = [_row(point) for point in found]
    known = [row for row in rows if row.get("ratio", math.nan) == row.get("ratio", math.nan) and "together" in row]
    least, most = (pick(known, key=lambda row: row["ratio"]) for pick in (min, max))
    return Finding(
        "x5",
        QUESTION,
        rows,
        Chart(Axis("batch", "batch", log=True), Axis("ratio", "real gain / product of gains"), ("context",)),
        [
            f"together the techniques gain {least['ratio']:.0%} of the product of their gains, where it is least: "
            f"batch {least['batch']}, context {least['context']} "
            f"({least['bottleneck_before']} before, {least['bottleneck_after']} after)",
            f"where it is most: {most['ratio']:.0%}, at batch {most['batch']}, context {most['context']}",
        ],
        [
            f"predicted by closed forms: {MODEL} on one {DEVICE}, engine profile vllm, output tokens a second, "
            f"against the same engine without {', '.join(names)}"
        ],
    )


def _row(point: Stack) -> Row:
    if point.plain is None:
        return {**point.point, "reason": point.reason}
    together, product = point.together, point.product
    return {
        **point.point,
        "members": list(point.members),
        "alone": {step.technique: step.gain for step in point.alone},
        "together": together,
        "product": product,
        "ratio": together / product if together and product else math.nan,
        "bottleneck_before": point.plain.bottleneck,
        "bottleneck_after": point.given_order[-1].bottleneck_after if point.given_order else None,
        "best_subset": list(point.best_subset),
        "best_subset_gain": point.best_subset_gain,
    }
