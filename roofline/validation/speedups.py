"""What does membound predict for rows that give a speed-up and not a speed?

A ratio needs both sides: the accelerated deployment and its baseline on the same device. Speculative methods are costed
from the mean accepted tokens that the row states: E / (v + drafting), with drafting as passes through layers of the
target's width and v the verification step of as many rows as the method's tree has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.precision.names import parse_plan
from membound.roofline.serving import Deployment, StaticBatch, with_parallel
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.engines import profile_of_engine
from membound.roofline.validation import statements
from membound.roofline.validation.tables import Row


@dataclass(frozen=True)
class DraftMethod:
    """How a method drafts: sequential passes, layers in each, and the rows that the target then verifies.

    `layers` counts the glue of a pass (its head, tree building, sampling) as one and a half layers, which in an eager
    engine is launches like those of a layer.
    """

    passes: float
    layers: float
    rows: float


# Configurations of Spec-Bench's runs: draft length, layers of the drafter, nodes of the tree (the papers' defaults,
# from memory: EAGLE 5 levels and 26 nodes, EAGLE-2 6 levels and 60, Medusa 4 heads and 64 nodes, Hydra 4 heads in
# sequence and 64, Vicuna-68M with 2 layers and 5 drafts, prompt lookup 10, Lookahead windows of 7 x 7, REST 64).
_METHODS: dict[str, DraftMethod] = {
    "samd": DraftMethod(5.0, 2.5, 60.0),
    "eagle2": DraftMethod(6.0, 2.5, 60.0),
    "eagle3": DraftMethod(7.0, 2.5, 60.0),
    "eagle": DraftMethod(5.0, 2.5, 26.0),
    "hydra": DraftMethod(4.0, 3.0, 64.0),
    "medusa": DraftMethod(1.0, 6.0, 64.0),
    "sps": DraftMethod(5.0, 2.5, 6.0),
    "pld": DraftMethod(1.0, 0.5, 11.0),
    "lookahead": DraftMethod(1.0, 4.0, 98.0),
    "rest": DraftMethod(1.0, 8.0, 64.0),
    "recycling": DraftMethod(1.0, 3.0, 80.0),
    "swift": DraftMethod(5.0, 16.0, 6.0),
    "kangaroo": DraftMethod(5.0, 4.0, 6.0),
}
_OTHER_NAMES = {
    **dict.fromkeys(("tokenrecycling",), "recycling"),
    **dict.fromkeys(("promptlookup", "ngram"), "pld"),
    "lade": "lookahead",
    **dict.fromkeys(("draft", "speculativesampling", "speculativedecoding"), "sps"),
}
SPECULATION_SPREAD, QUANTIZATION_SPREAD = 0.20, 0.20


def speedup_of(row: Row) -> tuple[float, float, str, str]:
    """(predicted ratio, spread in ln, device, model) of a speed-up row; raises MemboundError where it has no rule."""
    technique = row.text("technique").lower()
    rule = next((rule for word, rule in _RULES if word in technique), None)
    if rule is None:
        raise MemboundError(f"technique '{technique}' has no rule for its speed-up")
    hardware, model = get_hardware(row.text("gpu")), get_model(row.text("model"))
    spread = SPECULATION_SPREAD if "specul" in technique else QUANTIZATION_SPREAD
    return rule(row), spread, hardware.name, model.name


def _deployment(row: Row, weights: str, activations: str, kv: str = "", *, eager: bool = False) -> Deployment:
    profile = profile_of_engine(row.text("engine"), row.text("engine_version"), row.number("year"), eager=eager)
    setup = EngineSetup(precision=parse_plan(weights, activations, kv), profile=profile.name)
    return Deployment(get_model(row.text("model")), get_hardware(row.text("gpu")), setup)


def _speculation(row: Row) -> float:
    """Tokens a round over its time in plain steps: verification, and passes through a share of the layers."""
    accepted = statements.noted(row, "accepted tokens")
    if accepted is None:
        raise MemboundError("the row does not state the mean accepted tokens, on which the speed-up depends")
    name = re.sub(r"[^a-z0-9]", "", row.text("technique").lower().split(":")[-1])
    name = next((known for other, known in _OTHER_NAMES.items() if name.startswith(other)), name)
    method = next((method for key, method in _METHODS.items() if name.startswith(key)), None)
    if method is None:
        raise MemboundError(f"drafting method '{name}' is unknown; known are {', '.join(_METHODS)}")
    target = _deployment(row, row.text("weight_dtype"), row.text("act_dtype"), row.text("kv_dtype"), eager=True)
    plain_s = target.step_s(StepShape.decode(1.0, 300.0))
    verify_s = target.step_s(StepShape.verify(1.0, 300.0 + method.rows, method.rows - 1.0))
    drafting = method.passes * method.layers / target.model.layers
    return accepted / (verify_s / plain_s + drafting)


def _quantization(row: Row) -> float:
    """Decode throughput in the row's formats over that in 16 bits."""
    batch, model = statements.batch(row) or 1.0, get_model(row.text("model"))
    prompt, output = (statements.tokens(row, column, 128.0, model) for column in ("input_len", "output_len"))
    fast = _deployment(row, row.text("weight_dtype"), row.text("act_dtype"), row.text("kv_dtype"))
    plain = _deployment(row, "fp16", "fp16", "fp16")
    if "gener" in row.text("notes"):
        return StaticBatch(plain, batch, prompt, output).tpot_s / StaticBatch(fast, batch, prompt, output).tpot_s
    return StaticBatch(plain, batch, prompt, output).latency_s / StaticBatch(fast, batch, prompt, output).latency_s


def _sparsity(row: Row) -> float:
    """A 2:4 model on one device over the dense one on two, for each device."""
    batch, weights = statements.batch(row) or 1.0, row.text("weight_dtype").split()
    if not weights:
        raise MemboundError(f"{row.at('weight_dtype')} is ''; it must name the format of the sparse weights")
    sparse = _deployment(row, row.text("weight_dtype"), row.text("act_dtype"), row.text("kv_dtype"))
    dense = with_parallel(_deployment(row, weights[0], row.text("act_dtype"), row.text("kv_dtype")), tp=2)
    return 2.0 * StaticBatch(dense, batch, 300.0, 300.0).latency_s / StaticBatch(sparse, batch, 300.0, 300.0).latency_s


_RULES: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("specul", _speculation),
    ("sparsity", _sparsity),
    ("2:4", _sparsity),
    *((word, _quantization) for word in ("w8a", "w4a", "awq", "gptq", "fp4", "4-bit", "8-bit")),
    ("weight-only", _quantization),
    ("quant", _quantization),
    ("int4", _quantization),
    ("int8", _quantization),
    ("fp8", _quantization),
)
