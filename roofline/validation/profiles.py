"""What does each engine add to its kernels? Fits the profiles of `data/engines/published.yaml` from a table.

    python -m membound.roofline.validation.profiles TABLE.csv > data/engines/published.yaml
    python -m membound.roofline.validation.profiles TABLE.csv --unknown
    python -m membound.roofline.validation.profiles TABLE.csv --new-models

Few parameters an engine, each with a prior, robust in logarithms; the kernels' fits stay as they are. Rows that their
table flags, trust C, queueing and energy take no part. The second form shows what an engine gets that nobody knows, the
third what a model gets that an engine's profile was not fitted on.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError
from membound.roofline.times import engines
from membound.roofline.times.engines import EngineProfile
from membound.roofline.times.fitting import SOURCE_SCATTER
from membound.roofline.validation.report import NOT_JUDGED
from membound.roofline.validation.step_cases import StepCase, case_of
from membound.roofline.validation.tables import Row, read_table

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prior:
    """Where a parameter is expected, how far it may be off, and what it cannot pass."""

    centre: float
    width: float
    low: float
    high: float


PRIORS = {
    "gap_s": Prior(0.5e-6, 1.5e-6, -3e-6, 2e-5),
    "step_s": Prior(3e-4, 1e-3, 0.0, 5e-2),
    "sequence_s": Prior(1e-5, 3e-5, 0.0, 1e-3),
    "launch_s": Prior(1e-5, 1.5e-5, 1e-6, 2e-4),
    "weight_only_s": Prior(3e-6, 6e-6, 0.0, 5e-5),
    "extra_kernels": Prior(10.0, 20.0, 0.0, 200.0),
    "rate_share": Prior(0.9, 0.3, 0.02, 1.5),
    "quantized_rate_share": Prior(0.8, 0.3, 0.02, 1.5),
    "unit_bytes_per_cycle": Prior(8.0, 8.0, 1.0, 64.0),
    "interleaved": Prior(0.75, 0.2, 0.0, 1.0),
}
# Rows further off than this (in ln) count less and less.
ROBUST_AT = 0.12
# The 80 % quantile of what two teams differ by with one kernel (a scatter of 0.1 in ln, see `fitting.SOURCE_SCATTER`).
BETWEEN_SOURCES = 1.28 * SOURCE_SCATTER
CAPTURED = ("gap_s", "step_s", "sequence_s")
SERVED = (*CAPTURED, "interleaved")
EAGER = ("launch_s", "extra_kernels", "step_s", "sequence_s")
# Which parameters each engine's rows can tell, beside what is fixed.
ENGINES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "vllm": (SERVED, {"library": "vllm"}),
    "vllm-0.13": (SERVED, {"library": "vllm"}),
    # Its rows are of one sequence, and say nothing of what each one more costs: no less than in its successor.
    "vllm-0.6": (("gap_s", "step_s", "weight_only_s"), {"library": "vllm", "sequence_s": 6.191e-05}),
    "vllm-2023": (EAGER, {"graphs": False}),
    "sglang": (SERVED, {"library": "sglang"}),
    "tensorrt-llm": (SERVED, {"library": "trtllm", "most_sequences": 2048}),
    "tensorrt-llm-0": ((*CAPTURED, "rate_share"), {"library": "trtllm"}),
    "fastertransformer": (("gap_s", "step_s", "sequence_s"), {"library": "nccl", "graphs": False, "launch_s": 5e-6}),
    "megatron": (("launch_s", "extra_kernels", "step_s"), {"library": "nccl", "graphs": False}),
    "turbomind": (CAPTURED, {"library": "nccl"}),
    "torch-compile": (("gap_s", "step_s", "weight_only_s"), {}),
    "exllama": (
        ("gap_s", "step_s", "quantized_rate_share"),
        {"graphs": False, "launch_s": 3e-6, "fp16_accumulate": True},
    ),
    "autoawq": (("launch_s", "extra_kernels", "step_s", "quantized_rate_share"), {"graphs": False}),
    "autoawq-gemv": (("launch_s", "extra_kernels", "step_s", "quantized_rate_share"), {"graphs": False}),
    "llama.cpp": (
        ("gap_s", "step_s", "rate_share", "quantized_rate_share", "unit_bytes_per_cycle"),
        {"fp16_accumulate": True, "experts_as_linears": True},
    ),
    "mlc": (("gap_s", "step_s"), {}),
    "transformers": (("launch_s", "extra_kernels", "step_s"), {"graphs": False}),
}
_MOST_ROWS, _MOST_ROWS_LEFT = 150, 40
# Of fewer models or rows what is left tells nothing.
_FEWEST_MODELS, _FEWEST_ROWS = 3, 20
# What an engine gets that no profile is of.
UNKNOWN_ENGINE = "graphs"


def usable(row: Row) -> bool:
    """Whether a row says something of its engine."""
    flags = row.text("flags").split(";")
    aside = set(NOT_JUDGED) - {"host_bound", "hf_baseline", "eager"}
    if aside & set(flags) or row.text("metric") in ("joules_per_token", "speedup_x"):
        return False
    return row.text("trust") != "C" and "dtype_inferred" not in flags


def fit_profile(
    name: str, cases: Sequence[StepCase], free: Sequence[str], fixed: Mapping[str, object], source: str
) -> EngineProfile:
    """The profile that explains the cases best, with its spread (`_spread`) of |ln(predicted / measured)|."""
    from scipy.optimize import least_squares

    priors = [PRIORS[parameter] for parameter in free]
    centre, width = np.array([p.centre for p in priors]), np.array([p.width for p in priors])
    bounds = ([p.low for p in priors], [p.high for p in priors])

    def profile(values: Floats) -> EngineProfile:
        chosen = {parameter: float(f"{value:.4g}") for parameter, value in zip(free, values, strict=True)}
        return EngineProfile.model_validate({"name": name, "source": source, **fixed, **chosen})

    def residuals(values: Floats) -> Floats:
        off = _errors(cases, profile(values)) / ROBUST_AT
        robust = np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + off**2) - 1.0))
        return np.concatenate([robust, (values - centre) / width])

    # An engine that waits for its host shows nothing of its launches from a start at which it does not wait.
    starts = [centre]
    if "launch_s" in free:
        starts.append(np.where(np.array(free) == "launch_s", 4e-5, centre))
    tries = [
        least_squares(residuals, start, bounds=bounds, x_scale=width, diff_step=1e-2, max_nfev=25) for start in starts
    ]
    best = profile(min(tries, key=lambda found: found.cost).x)
    sources = len({case.row.text("source") for case in cases})
    spread = _spread(float(np.quantile(np.abs(_errors(cases, best)), 0.8)), sources)
    return best.model_copy(update={"spread": float(f"{spread:.3g}")})


def _spread(seen: float, sources: int) -> float:
    """The spread of another team's rows: what is `seen` of several sources holds that between them, of one it lacks."""
    return seen if sources > 1 else math.hypot(seen, BETWEEN_SOURCES)


def _errors(cases: Sequence[StepCase], profile: EngineProfile) -> Floats:
    engines.profiles()[profile.name] = profile
    off = []
    for case in cases:
        setup = dataclasses.replace(case.deployment.setup, profile=profile.name)
        again = dataclasses.replace(case, deployment=dataclasses.replace(case.deployment, setup=setup))
        off.append(np.log(again.predict() / case.row.measured))
    return np.array(off)


def cases_by_profile(path: Path) -> dict[str, list[StepCase]]:
    """The usable rows of a table by the profile of the engine that they name."""
    cases: dict[str, list[StepCase]] = {}
    for row in read_table(path).rows:
        if not usable(row):
            continue
        try:
            case = case_of(row)
            case.predict()
        except MemboundError:
            continue
        cases.setdefault(case.deployment.setup.profile, []).append(case)
    return cases


@dataclass(frozen=True)
class LeftOut:
    """Median errors of an engine's rows under its own profile, and under the one that an unknown engine gets."""

    profile: str
    rows: int
    own: float
    unknown: float


def leave_engines_out(path: Path) -> list[LeftOut]:
    """Every engine of a table as if nobody knew it; the general profile was fitted to none of them."""
    found = []
    for name, mine in sorted(cases_by_profile(path).items(), key=lambda item: -len(item[1])):
        medians = [
            float(np.median(np.abs(np.expm1(_errors(mine, engines.get_profile(profile))))))
            for profile in (name, UNKNOWN_ENGINE)
        ]
        found.append(LeftOut(name, len(mine), *medians))
    return found


def leave_models_out(path: Path) -> list[LeftOut]:
    """Every model of an engine as if its profile had been fitted on the others' rows alone (minutes).

    `own` are the errors under the shipped profile, `unknown` those under the profiles that did not see the model. Few
    rows are fitted and predicted, as every model takes a fit; engines with two models or with few rows take no part.
    """
    found, cases = [], cases_by_profile(path)
    for name, (free, fixed) in ENGINES.items():
        mine = _thinned(cases.get(name, []), _MOST_ROWS)
        models = sorted({case.deployment.model.name for case in mine})
        if len(models) < _FEWEST_MODELS or len(mine) < _FEWEST_ROWS:
            continue
        shipped = engines.get_profile(name)
        own, unseen = _errors(mine, shipped), []
        for model in models:
            others = [case for case in mine if case.deployment.model.name != model]
            profile = fit_profile(name, _thinned(others, _MOST_ROWS_LEFT), free, fixed, f"fitted without {model}")
            unseen.append(_errors([case for case in mine if case.deployment.model.name == model], profile))
        engines.profiles()[name] = shipped
        medians = [float(np.median(np.abs(np.expm1(off)))) for off in (own, np.concatenate(unseen))]
        found.append(LeftOut(name, len(mine), *medians))
    return found


def _thinned(cases: Sequence[StepCase], most: int) -> Sequence[StepCase]:
    """Evenly chosen cases, `most` of them at most."""
    return cases[:: -(-len(cases) // most)] if cases else cases


def fit_table(path: Path, report: Callable[[str], None]) -> list[EngineProfile]:
    """Profiles of all engines that a table has rows of."""
    cases = cases_by_profile(path)
    made = []
    for name, (free, fixed) in ENGINES.items():
        mine = cases.get(name, [])
        if len(mine) < 3:
            continue
        sources = ", ".join(sorted({case.row.text("source") for case in mine}))
        chosen = _thinned(mine, _MOST_ROWS)
        profile = fit_profile(name, chosen, free, fixed, f"fitted on {len(chosen)} of {len(mine)} rows of {sources}")
        off = np.abs(np.expm1(_errors(mine, profile)))
        report(f"{name}: {len(mine)} rows, median error {np.median(off):.1%}, 90 % within {np.quantile(off, 0.9):.1%}")
        made.append(profile)
    return made


def as_yaml(profiles: Sequence[EngineProfile]) -> str:
    """The profiles as the text of a file in `data/engines/`."""
    text = yaml.safe_dump({"profiles": [p.model_dump(exclude_defaults=True) for p in profiles]}, sort_keys=False)
    return re.sub(r"\n- ", "\n\n- ", text)


def main(arguments: list[str]) -> None:
    """Prints the fitted profiles of a table, or what engines would be without theirs, or models without their rows."""
    ways = {
        "--unknown": ("as an unknown engine", leave_engines_out),
        "--new-models": ("each model left out", leave_models_out),
    }
    if arguments[1:] and arguments[1] in ways:
        heading, leave_out = ways[arguments[1]]
        print(f"| engine | rows | with its profile | {heading} |\n|---|--:|--:|--:|")
        for left in leave_out(Path(arguments[0])):
            print(f"| {left.profile} | {left.rows} | {left.own:.1%} | {left.unknown:.1%} |")
    else:
        print(as_yaml(fit_table(Path(arguments[0]), lambda line: print(line, file=sys.stderr))), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
