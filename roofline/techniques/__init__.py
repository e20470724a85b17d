"""Which techniques are there, what is each compared with, and what does it change?

A technique is declared here once. `apply` says what it changes in the engine's set-up; the simulator costs that
set-up, the runtime builds it, and the dashboard and the comparison iterate over `TECHNIQUES`. How a model is divided
over devices is no technique: it is the scenario's `parallel`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Union, get_args

from pydantic import Field

from membound.roofline.errors import MemboundError
from membound.roofline.precision.plan import PrecisionPlan, compute_dtype
from membound.roofline.techniques.base import Family, GainMetric, Layer, Technique
from membound.roofline.techniques.drafts import (
    DrafterKind,
    Drafts,
    EagleDrafts,
    HeadDrafts,
    MedusaDrafts,
    ModelDrafts,
    MtpDrafts,
    NgramDrafts,
    SelfDrafts,
)
from membound.roofline.techniques.experts import ExpertBalancing, ExpertOffload
from membound.roofline.techniques.kernels import FlashAttention, MlaAbsorption
from membound.roofline.techniques.kv import KvEviction, KvQuantization
from membound.roofline.techniques.schedule import ContinuousBatching, DualBatchOverlap
from membound.roofline.techniques.setup import PLAIN, BatchOverlap, EngineSetup, ExpertStorage, KvBudget, PolicyName
from membound.roofline.techniques.steps import (
    DraftModelSpeculation,
    Eagle,
    Medusa,
    Mtp,
    NgramSpeculation,
    SelfSpeculation,
    Size,
    Speculative,
)
from membound.roofline.techniques.weights import W8A8, Int8Weights, Sparsity24, WeightQuantization, engines_activations

if TYPE_CHECKING:
    from membound.roofline.hardware import HardwareSpec

__all__ = [
    "TECHNIQUES",
    "W8A8",
    "AnyTechnique",
    "BatchOverlap",
    "ContinuousBatching",
    "DraftModelSpeculation",
    "DrafterKind",
    "Drafts",
    "DualBatchOverlap",
    "Eagle",
    "EagleDrafts",
    "EngineSetup",
    "ExpertBalancing",
    "ExpertOffload",
    "ExpertStorage",
    "Family",
    "FlashAttention",
    "GainMetric",
    "HeadDrafts",
    "Int8Weights",
    "KvBudget",
    "KvEviction",
    "KvQuantization",
    "Layer",
    "Medusa",
    "MedusaDrafts",
    "MlaAbsorption",
    "ModelDrafts",
    "Mtp",
    "MtpDrafts",
    "NgramDrafts",
    "NgramSpeculation",
    "PolicyName",
    "SelfDrafts",
    "SelfSpeculation",
    "Size",
    "Sparsity24",
    "Speculative",
    "Technique",
    "WeightQuantization",
    "engine_setup",
    "remarks",
]

AnyTechnique = Annotated[
    Union[  # noqa: UP007 (pydantic reads the union at run time)
        Int8Weights,
        WeightQuantization,
        W8A8,
        Sparsity24,
        ExpertOffload,
        ExpertBalancing,
        KvQuantization,
        FlashAttention,
        MlaAbsorption,
        ContinuousBatching,
        DualBatchOverlap,
        NgramSpeculation,
        DraftModelSpeculation,
        SelfSpeculation,
        Medusa,
        Eagle,
        Mtp,
        KvEviction,
    ],
    Field(discriminator="name"),
]

# In the order of the union, in which they apply: sparsity makes sparse what is quantized, eviction excludes drafts.
TECHNIQUES: dict[str, type[Technique]] = {
    cls.model_fields["name"].default: cls for cls in get_args(get_args(AnyTechnique)[0])
}


def engine_setup(
    techniques: Iterable[Technique], without: Iterable[str] = (), published: PrecisionPlan = PLAIN
) -> EngineSetup:
    """The set-up that techniques make of the plain engine, whatever their order.

    The plain engine has the `published` formats of the model's weights unless a technique sets others, static batching,
    no speculation, and the usual techniques less those named in `without`. Raises MemboundError where two techniques
    exclude each other.
    """
    techniques = tuple(techniques)
    setting = [technique for technique in techniques if technique.sets_weights]
    if len(setting) > 1:
        formats = " and ".join(
            getattr(technique, "format", None) or technique.apply(EngineSetup()).weights.name for technique in setting
        )
        raise MemboundError(f"weights cannot be {formats} at once; give one technique that quantizes them")
    setup = EngineSetup(precision=PLAIN if setting else published)
    for name in without:
        if name not in TECHNIQUES or not TECHNIQUES[name].usual:
            usual = ", ".join(name for name, technique in TECHNIQUES.items() if technique.usual)
            raise MemboundError(f"without names '{name}', which the plain engine does not have; it has {usual}")
        setup = TECHNIQUES[name].remove(setup)
    order = list(TECHNIQUES)
    for technique in sorted(techniques, key=lambda technique: order.index(technique.name)):
        setup = technique.apply(setup)
    return setup


def remarks(setup: EngineSetup, hardware: HardwareSpec) -> tuple[str, ...]:
    """What a device does otherwise than the set-up's formats suggest, or engines on it, a sentence each."""
    plan = setup.precision
    compute = compute_dtype(plan.weights, plan.activations, hardware)
    said = []
    rounded = engines_activations(plan.weights)
    if rounded and plan.activations.width >= 16 and not compute_dtype(plan.weights, rounded, hardware).emulated:
        said.append(
            f"{plan.weights.name} weights are unpacked here and multiplied in 16 bits, as nothing is said of "
            f"activations; engines on {hardware.name} round those too: "
            f"{{name: weight_quantization, format: {plan.weights.name}, activations: {rounded.name}}}"
        )
    if compute.emulated:
        said.append(
            f"{hardware.name} has no matrix unit for {plan.weights.name} weights with {plan.activations.name} "
            f"activations: it unpacks both and multiplies in {compute.dtype}, at that rate"
        )
    if plan.weights.sparse and not compute.sparse:
        said.append(
            f"{hardware.name} has no rate for 2:4 sparsity in {compute.dtype}: it reads fewer bytes, "
            "but multiplies no faster"
        )
    return tuple(said)
