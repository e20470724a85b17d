"""Which KV store does a set-up ask for, and what of it does not run?"""

from __future__ import annotations

import torch

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import GroupedQueryAttention, LatentAttention, ModelSpec
from membound.roofline.precision import Precision
from membound.roofline.scenario.engine import Engine
from membound.roofline.techniques import EngineSetup
from membound.runtime.blocks.attention import NewStore
from membound.runtime.kv.evicting import EvictingKv, EvictingStep
from membound.runtime.kv.kivi import KiviKv
from membound.runtime.kv.quantized import KERNEL_FORMATS, KernelQuantizedKv
from membound.runtime.kv.quest import QuestKv
from membound.runtime.kv.steps import LastStep
from membound.runtime.kv.store import KvStore, PagedKv, PlainKv
from membound.runtime.kv.streaming import StreamingKv, StreamingStep


def is_plain(setup: EngineSetup) -> bool:
    """Whether K and V of all tokens are kept as the kernels do."""
    return setup.kv.width >= 16 and setup.kv_budget is None


def store_for(setup: EngineSetup, kernels: Kernels, device: torch.device) -> NewStore:
    """Makes the KV stores of a set-up that is not plain and that `store_problem` has nothing against."""
    format, budget = setup.kv, setup.kv_budget
    streaming: LastStep[StreamingStep] = LastStep()
    evicting: LastStep[EvictingStep] = LastStep()
    quest: LastStep[RaggedBatch] = LastStep()

    def new_pages(attention: GroupedQueryAttention, num_blocks: int, block_size: int) -> PagedKv:
        if format.width >= 16:
            return PlainKv.zeroed(kernels, attention, num_blocks, block_size, device)
        name = KERNEL_FORMATS[format.name]
        return KernelQuantizedKv.zeroed(kernels, name, attention, num_blocks, block_size, device)

    def new_store(attention: GroupedQueryAttention, num_blocks: int, block_size: int, seats: int) -> KvStore:
        if budget is not None and budget.policy == "streaming":
            return StreamingKv(new_pages, attention, budget, seats, streaming)
        if budget is not None and budget.evicts:
            return EvictingKv(new_pages, attention, budget, seats, evicting)
        if budget is not None:
            return QuestKv(new_pages, attention, budget, num_blocks, block_size, quest)
        if format.name in KERNEL_FORMATS:
            return new_pages(attention, num_blocks, block_size)
        return KiviKv(kernels, attention, format, num_blocks, block_size, seats, device)

    return new_store


def runs_in(format: Precision) -> bool:
    """Whether there is a store that keeps K and V in `format`."""
    return format.width >= 16 or format.name in KERNEL_FORMATS or _is_kivi(format)


def store_problem(setup: EngineSetup, engine: Engine, model: ModelSpec) -> str | None:
    """Why a model's cache cannot be kept as set-up and engine say, in one sentence; None if it can."""
    return (
        _kind_problem(setup, model)
        or _budget_problem(setup, engine, model)
        or _kivi_problem(setup, engine, model)
        or move_problem(setup, engine, model)
    )


def _kind_problem(setup: EngineSetup, model: ModelSpec) -> str | None:
    if is_plain(setup):
        return None
    for part in model.groups():
        a = part.attention
        if isinstance(a, LatentAttention):
            kept = "latents"
        elif isinstance(a, GroupedQueryAttention) and (a.sinks or a.value_dim != a.head_dim):
            kept = "learned sinks" if a.sinks else "values of another width than its keys"
        else:
            continue
        return f"the cache of '{model.name}' has {kept}, which the runtime keeps as they are; leave the technique out"
    return None


def _budget_problem(setup: EngineSetup, engine: Engine, model: ModelSpec) -> str | None:
    budget = setup.kv_budget
    if budget is None:
        return None
    if not any(isinstance(part.attention, GroupedQueryAttention) for part in model.groups()):
        return f"kv_eviction needs a cache of keys and values, which '{model.name}' does not have; leave it out"
    if _is_kivi(setup.kv):
        return (
            f"kv_eviction chooses single tokens, but {setup.kv.name} keeps tokens in groups that share a scale; take "
            "int8, int4 or fp8 for kv_quantization, or leave one of the two out"
        )
    if any(part.attention.window is not None for part in model.groups()):
        return (
            f"kv_eviction of '{model.name}', whose layers have windows, is predicted, not measured yet: the runtime "
            "evicts from layers that see all tokens"
        )
    if not budget.evicts and budget.page != engine.block_size:
        return (
            f"kv_eviction by quest has pages of {budget.page} tokens, but engine.block_size is {engine.block_size}; "
            "make them equal"
        )
    if budget.evicts and setup.parallel.devices > 1:
        return f"kv_eviction with parallel.tp {setup.parallel.tp} is predicted, not measured yet: give it one device"
    return None


def _kivi_problem(setup: EngineSetup, engine: Engine, model: ModelSpec) -> str | None:
    format = setup.kv
    if not _is_kivi(format):
        return None
    group, block_size = format.scales[0].columns, engine.block_size
    if max(group, block_size) % min(group, block_size):
        return (
            f"kv_quantization is {format.name}, whose keys share a scale along {group} tokens, but engine.block_size "
            f"is {block_size}; make it divide {group} or a multiple of it"
        )
    for part in model.groups():
        width = getattr(part.attention, "head_dim", group)
        if width % group:
            return (
                f"kv_quantization is {format.name}, whose values share a scale along {group} channels, but a head of "
                f"'{model.name}' has {width}; take int8, int4 or fp8"
            )
    if setup.drafts is not None and not setup.drafts.apart:
        return (
            f"kv_quantization is {format.name}, which rounds tokens when they are old enough and cannot move them, as "
            f"{setup.drafts.kind} drafts ask; take int8, int4 or fp8, or ngram_speculation"
        )
    return None


def move_problem(setup: EngineSetup, engine: Engine, model: ModelSpec) -> str | None:
    """What keeps something of a sequence outside of blocks, which are shared, wait on the host or go elsewhere."""
    asked = {
        "engine.prefix_caching": engine.prefix_caching,
        "engine.preemption 'swap'": engine.preemption == "swap",
        "engine.disaggregation": engine.disaggregation is not None,
    }
    wanted = next((field for field, there in asked.items() if there), None)
    if wanted is None:
        return None
    if setup.kv_budget is not None and setup.kv_budget.evicts:
        return f"{wanted} moves blocks, which a cache that evicts does not have; leave one of them out"
    if _is_kivi(setup.kv):
        return (
            f"{wanted} moves blocks, but {setup.kv.name} keeps the newest {setup.kv.window} tokens of a sequence "
            "outside of them; take int8, int4 or fp8 for kv_quantization"
        )
    if any(part.attention.state_elements for part in model.groups()):
        return f"{wanted} moves blocks, but '{model.name}' has recurrent states, which no block holds; leave it out"
    if setup.parallel.devices > 1:
        return (
            f"{wanted} on {setup.parallel.devices} devices is predicted, not measured yet: the runtime has one device"
        )
    if setup.drafts is not None and setup.drafts.kind != "ngram":
        return (
            f"{wanted} with {setup.drafts.kind} drafts is predicted, not measured yet: the runtime moves the model's "
            "blocks, not those of a drafter; take ngram_speculation"
        )
    return None


def _is_kivi(format: Precision) -> bool:
    return format.window > 0 and len(format.scales) == 1 and format.width in (2, 4)
