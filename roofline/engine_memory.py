"""What does an engine take of a device's memory beside weights and caches?

vLLM runs a step of its limits before it sizes the cache, and reserves what that took: the widest intermediates of
`max_num_batched_tokens`, or the sampler's copies of `max_num_seqs` rows of logits, whichever is more. SGLang reserves
by a rule of its limits and the device's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from membound.roofline.memory import MEMORY_SHARE
from membound.roofline.models import ModelSpec
from membound.roofline.models.ffn import MoeFfn
from membound.roofline.planned import planned_groups
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.engines import get_profile

# What engines that capture graphs need beside weights and caches where no rule of theirs is known: the graphs,
# activations, the libraries' own; of a small device a smaller part (assumed), as its batches and graphs are smaller
# too. Without graphs what is not used of the device is enough: the vLLM of 2023 gave 12 of 40 GiB to the cache beside
# OPT-13B, which with the weights are nine tenths (Kwon et al., SOSP 2023, table 1, from memory).
RESERVED_BYTES = 2e9
RESERVED_SHARE = 1 / 16

# CUDA reports less than the data sheet's memory: 79.2 of 80 GiB, 139.8 of 141, 178.4 of 180, 44.4 of 45, 23.5 of 24.
VISIBLE_SHARE = 0.99
# Bytes of the sampler for each logit of its rows, whole rows on each device of tensor parallelism: logits in 16 and 32
# bits, and sorted with their 64-bit indices, probabilities, sums and buffers for top-k and top-p. From three logs of
# vLLM: 1.26 GiB of 256 rows of 128,256 (vllm pull request 10511), 9.96 GiB of 1,024 of 262,208 (21489), 5.58 GiB of
# 1,024 of 151,936 (Qwen3-Next-80B, version 0.10.2, where FlashInfer is not installed); they are 41.2, 39.8 and 38.5.
SAMPLED_LOGIT_BYTES = 39.0
# Contexts and libraries, and with more than one device buffers of collectives: 0.06 to 0.12 and 0.6 to 1.4 GiB in the
# logs of vLLM 0.6 to 0.20 that the table `tests/roofline/published/kv-room.csv` names.
CONTEXT_BYTES = 0.1 * 2**30
COLLECTIVES_BYTES = 1.0 * 2**30
_ACTIVATION_BYTES = 2.0

# Marlin, which vLLM takes for MXFP4 before Blackwell, wants n % 256 == 0 and k % 128 == 0 of each expert's matrices
# (vllm/model_executor/layers/quantization/mxfp4.py, create_weights).
_PADDED_HIDDEN, _PADDED_INTERMEDIATE = 256, 128
_VLLM = frozenset({"vllm", "vllm-0.13", "vllm-0.6", "vllm-eager"})
_MIB = float(2**20)


@dataclass(frozen=True)
class EngineLimits:
    """The largest step that an engine prepares for, on one data-parallel rank.

    Without an end to its `sequences` it prepares for as many as memory holds.
    """

    sequences: float
    step_tokens: float


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one device that are neither weights nor caches, by the rule of the engine's profile.

    `token_bytes` live at the peak of a forward pass for each of its tokens, `carried_bytes` while logits are sampled.
    """

    profile: str
    limits: EngineLimits | None
    token_bytes: float
    carried_bytes: float
    vocab: int
    devices: int

    @classmethod
    def of(cls, model: ModelSpec, setup: EngineSetup, limits: EngineLimits | None = None) -> EngineMemory:
        """Without limits the general rule holds, since nobody says how large a step may be."""
        token_bytes = _forward_bytes_per_token(model, setup)
        carried = _ACTIVATION_BYTES * model.hidden
        return cls(setup.profile, limits, token_bytes, carried, model.vocab, setup.parallel.tp * setup.parallel.pp)

    def usable_bytes(self, memory_bytes: float, activation_bytes: float = 0.0) -> float:
        """Bytes of a device of `memory_bytes` that weights and caches may take together.

        Activations are among what an engine reserves, as far as that goes.
        """
        if self.limits is not None and self.profile in _VLLM:
            visible = VISIBLE_SHARE * memory_bytes
            return visible * MEMORY_SHARE - self.libraries_bytes - max(self.peak_bytes(self.limits), activation_bytes)
        if self.limits is not None and self.profile == "sglang":
            visible = VISIBLE_SHARE * memory_bytes
            return visible - max(_sglang_reserve(memory_bytes, self.limits, self.devices), activation_bytes)
        reserved = min(RESERVED_BYTES, RESERVED_SHARE * memory_bytes) if get_profile(self.profile).graphs else 0.0
        return memory_bytes * MEMORY_SHARE - max(reserved, activation_bytes)

    @property
    def libraries_bytes(self) -> float:
        """Bytes that PyTorch does not allocate: the context, and buffers of collectives between devices."""
        return CONTEXT_BYTES + (COLLECTIVES_BYTES if self.devices > 1 else 0.0)

    def peak_bytes(self, limits: EngineLimits) -> float:
        """The most that a step of the limits allocates: in its forward pass, or when its rows are sampled."""
        rows = limits.sequences if math.isfinite(limits.sequences) else 0.0
        sampled = SAMPLED_LOGIT_BYTES * rows * self.vocab + self.carried_bytes * limits.step_tokens
        return max(self.token_bytes * limits.step_tokens, sampled)

    @property
    def seat_bytes(self) -> float:
        """What each sequence adds to the sampler's peak where memory alone limits them; else 0."""
        unlimited = self.limits is not None and not math.isfinite(self.limits.sequences)
        return SAMPLED_LOGIT_BYTES * self.vocab if unlimited and self.profile in _VLLM else 0.0

    @property
    def spared_bytes(self) -> float:
        """What a forward pass reserves that sampling does not need."""
        if self.limits is None:
            return 0.0
        return max(0.0, (self.token_bytes - self.carried_bytes) * self.limits.step_tokens)


def _forward_bytes_per_token(model: ModelSpec, setup: EngineSetup) -> float:
    """Bytes of the residual and normed hidden states and the widest intermediate, of each token of a prompt.

    A mixture's tokens are copied to each expert that they take: gates and ups and then outputs of the hidden width in
    one buffer, activations in another (vllm/model_executor/layers/fused_moe/fused_moe.py, intermediate caches 1 to 3).
    """
    tp, widest = setup.parallel.tp, 0
    for group in model.groups():
        mixer, ffn = group.attention, group.ffn
        widest = max([widest, *(2 * n for _, n, _ in mixer.linears(model.hidden, tp))])
        widest = max([widest, *(3 * n // 2 for _, n, _ in ffn.linears(model.hidden, tp))])
        if isinstance(ffn, MoeFfn):
            inner = -(-ffn.intermediate // setup.parallel.moe_tp)
            widest = max(widest, ffn.top_k * (max(2 * inner, model.hidden) + inner))
    return _ACTIVATION_BYTES * (2 * model.hidden + widest) / setup.parallel.cp


def _sglang_reserve(memory_bytes: float, limits: EngineLimits, devices: int) -> float:
    """What SGLang leaves of a device to all that is neither weights nor cache, where nobody sets mem_fraction_static.

    python/sglang/srt/server_args.py of 2025-12: 512 MiB, 1.5 MiB for each token of a chunk, 2 MiB for each sequence of
    the largest captured step, 128 MiB for each device of the replica, and 10 GiB at least above 60 GiB.
    """
    graph = min(limits.sequences, sglang_graph_sequences(memory_bytes, devices))
    reserved = (512 + 1.5 * max(limits.step_tokens, 2048) + 2 * graph + 128 * devices) * _MIB
    return max(reserved, 10 * 1024 * _MIB) if memory_bytes > 60 * 1024 * _MIB else reserved


def sglang_graph_sequences(memory_bytes: float, devices: int) -> int:
    """Sequences of the largest step that SGLang captures by default (server_args.py, cuda_graph_max_bs)."""
    few, many = (256, 512) if memory_bytes > 60 * 1024 * _MIB else (32, 160)
    if memory_bytes < 35 * 1024 * _MIB:
        few, many = (24, 80) if memory_bytes > 20 * 1024 * _MIB else (8, 80)
    if memory_bytes >= 160 * 1024 * _MIB:
        few = 512
    return few if devices < 4 else many


def padding_bytes(model: ModelSpec, setup: EngineSetup) -> float:
    """Bytes on one device by which an engine on a GPU pads the experts of MXFP4; 0 for other formats and engines."""
    if setup.profile not in _VLLM or setup.expert_storage is not None:
        return 0.0
    padding = 0.0
    for group, formats in planned_groups(model, setup.precision):
        ffn, format = group.ffn, formats.weights_of("experts")
        if not isinstance(ffn, MoeFfn) or ffn.latent or format.name != "mxfp4":
            continue
        widened = _up(model.hidden, _PADDED_HIDDEN)
        inner = _up(-(-ffn.intermediate // setup.parallel.moe_tp), _PADDED_INTERMEDIATE)
        each = format.matrix_bytes((1 + ffn.gated) * inner, widened) + format.matrix_bytes(widened, inner)
        each -= sum(format.matrix_bytes(n, k) for _, n, k in ffn.expert_linears(model.hidden, setup.parallel.moe_tp))
        held = ffn.experts + (setup.redundant_experts or 0)
        padding += each * group.count / setup.parallel.pp * held / setup.parallel.ep
    return padding


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
