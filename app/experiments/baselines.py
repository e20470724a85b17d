"""X4: is a baseline worth comparing with? Every engine on one workload, each beside its own bandwidth bound."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from membound.app.experiments.finding import Ask, Axis, Chart, Finding, Row
from membound.kernels.dispatch import kernels_for
from membound.roofline.models.files import resolve_model
from membound.roofline.results.comparison import spread
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, load_scenario
from membound.roofline.step import step_weight_bytes
from membound.runtime.engine import Runtime

QUESTION = "Which baselines reach half of their own bandwidth bound, and so may be compared with?"
HONEST = 0.5
USERS = (1, 4, 16)
REQUESTS = {1: 3, 4: 8, 16: 16}
ALONE = ("continuous batching", "int8 weights")  # with one user all ways of batching are one
ENGINES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "static batching": ((), {}),
    "continuous batching": (("continuous_batching",), {}),
    "chunked prefill": (("continuous_batching",), {"engine.batching": "chunked_prefill"}),
    "int8 weights": (("continuous_batching", "int8_weights"), {}),
}


def run(ask: Ask) -> Finding:
    """Runs each engine with the C++ kernels and with plain PyTorch on the same requests, interleaved."""
    fast = ask.needed()
    kernels = {fast.kernels.name: fast}
    if fast.kernels.name != "torch":
        kernels["torch"] = Runtime(fast.device, kernels=kernels_for(fast.device, "torch"))
    base = load_scenario("live-cpu").model_copy(update={"sweep": ()}).with_techniques(())
    users = USERS[:: 2 if ask.quick else 1]
    repeats = 1 if ask.quick else 3
    samples: dict[tuple[int, str, str], list[RunResult]] = {}
    cells = [
        (concurrency, repeat, engine, name)
        for concurrency in users
        for repeat in range(repeats)
        for engine in (ALONE if concurrency == 1 else ENGINES)
        for name in kernels
    ]
    for number, (concurrency, repeat, engine, name) in enumerate(cells):
        ask.listener.check_cancelled()
        said = f"{concurrency} users, {engine}, {name} kernels, repeat {repeat + 1}"
        ask.listener.progress(number / len(cells), said)
        found = kernels[name].run(_scenario(base, concurrency, *ENGINES[engine]), ask.hardware)
        samples.setdefault((concurrency, engine, name), []).append(found)
    rows = [_row(key, runs, ask) for key, runs in samples.items()]
    low = [row for row in rows if row["share_of_bound"] < HONEST]
    listed = ", ".join(f"{row['engine']} by {row['kernels']} at {row['users']}" for row in low) or "none"
    return Finding(
        "x4",
        QUESTION,
        rows,
        Chart(
            Axis("users", "users", log=True),
            Axis("share_of_bound", "share of the bandwidth bound"),
            ("engine", "kernels"),
            "share_spread",
        ),
        [f"below half of their bound, and so no baseline to compare with: {listed}"],
        [
            f"SmolLM2-135M-Instruct in bf16 on {ask.hardware.name}, closed loop of {_listed(users)} users, "
            f"{_listed(REQUESTS[count] for count in users)} recorded prompts, 16 to 96 tokens each, {repeats} "
            "interleaved repeats; with one user all ways of batching are one; the bound "
            "is the time to read the weights and the KV cache of every step at the calibrated rate for so many bytes"
        ],
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _scenario(base: Scenario, users: int, techniques: tuple[str, ...], settings: dict[str, object]) -> Scenario:
    asked = {"workload.arrivals.concurrency": users, "workload.requests": REQUESTS[users]}
    return base.with_values(asked | {"techniques": list(techniques)} | settings)


def _row(key: tuple[int, str, str], runs: list[RunResult], ask: Ask) -> Row:
    users, engine, kernels = key
    rates = [run.summary.output_tokens_per_s for run in runs]
    shares = [_bound_s(run, ask) / run.summary.duration_s for run in runs]
    return {
        "users": users,
        "engine": engine,
        "kernels": kernels,
        "output_tokens_per_s": median(rates),
        "spread": spread(rates),
        "tpot_s": median(run.summary.tpot_s.mean or 0.0 for run in runs),
        "share_of_bound": median(shares),
        "share_spread": spread(shares),
        "honest": median(shares) >= HONEST,
    }


def _bound_s(run: RunResult, ask: Ask) -> float:
    """Seconds that reading alone would take: the weights once a step, and the KV cache of what each attends to."""
    spec, setup = resolve_model(run.scenario.model), run.scenario.setup
    steps = float(run.steps["steps"].sum())
    weight_bytes = step_weight_bytes(spec, setup)
    kv_bytes = float((run.steps["kv_tokens"] * run.steps["steps"]).sum()) * spec.kv_bytes_per_token(setup.kv.bits)
    calibration = ask.hardware.calibration
    rate = calibration.bandwidth_at(weight_bytes) if calibration else ask.hardware.bandwidth_bytes_per_s
    return (steps * weight_bytes + kv_bytes) / rate
