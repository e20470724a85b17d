"""Which KV store does a set-up ask for, and what of it does not run?"""

from __future__ import annotations

import torch

from membound.kernels.base import Kernels
from membound.roofline.models import GroupedQueryAttention, ModelSpec
from membound.roofline.precision import Precision
from membound.roofline.techniques import EngineSetup
from membound.runtime.blocks.attention import NewStore
from membound.runtime.blocks.build import plain_store
from membound.runtime.kv.kivi import KiviKv
from membound.runtime.kv.quantized import KERNEL_FORMATS, KernelQuantizedKv
from membound.runtime.kv_store import KvStore


def store_for(setup: EngineSetup, kernels: Kernels, device: torch.device) -> NewStore:
    """Makes the KV stores of a set-up that `store_problem` has nothing against."""
    format = setup.kv
    if format.width >= 16:
        return plain_store(kernels, device)

    def new_store(attention: GroupedQueryAttention, num_blocks: int, block_size: int, seats: int) -> KvStore:
        if format.name in KERNEL_FORMATS:
            name = KERNEL_FORMATS[format.name]
            return KernelQuantizedKv.zeroed(kernels, name, attention, num_blocks, block_size, device)
        return KiviKv(kernels, attention, format, num_blocks, block_size, seats, device)

    return new_store


def runs_in(format: Precision) -> bool:
    """Whether there is a store that keeps K and V in `format`."""
    return format.width >= 16 or format.name in KERNEL_FORMATS or _is_kivi(format)


def store_problem(setup: EngineSetup, model: ModelSpec, block_size: int) -> str | None:
    """Why a model's cache cannot be kept as the set-up says in blocks of `block_size`; None if it can."""
    format = setup.kv
    if not _is_kivi(format):
        return None
    group = format.scales[0].columns
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
    return None


def _is_kivi(format: Precision) -> bool:
    return format.window > 0 and len(format.scales) == 1 and format.width in (2, 4)
