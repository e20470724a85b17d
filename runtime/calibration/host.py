"""What does a step cost besides its operators: planning, building the batch, sampling, keeping the record?"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from membound.kernels.base import Kernels, PackedWeight, RaggedBatch, WeightFormat
from membound.kernels.reference import TorchKernels
from membound.roofline.models import GatedFfn, GroupedQueryAttention, ModelSpec
from membound.roofline.scenario.workload import ClosedLoop
from membound.runtime.calibration.pool import Pool
from membound.runtime.clock import WallClock
from membound.runtime.decoder import Decoder
from membound.runtime.executor import TorchExecutor
from membound.runtime.loading.weights import random_weights
from membound.runtime.sampling import GreedySampler
from membound.simulator.scheduling.blocks import BlockPool, BlockTables
from membound.simulator.scheduling.client import client_for
from membound.simulator.scheduling.drafter import Room
from membound.simulator.scheduling.loop import serve
from membound.simulator.scheduling.policies import ContinuousBatching
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.request import Draft, Request, Sequence
from membound.simulator.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
EVICTED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class HostGrid:
    """How many sequences, how large a vocabulary, how many drafts a sequence, and steps for each."""

    sequences: tuple[int, ...] = (1, 4, 16, 32)
    vocab: tuple[int, ...] = (8192, 65536)
    drafts: tuple[int, ...] = (0, 4)
    steps: int = 16


class HostProbe:
    """Serves requests with the real loop and a decoder whose kernels compute nothing: what is left is the host's."""

    def __init__(self, kernels: Kernels, pool: Pool, grid: HostGrid) -> None:
        self.kernels = kernels
        self.pool = pool
        self.grid = grid

    def amounts(self) -> list[dict[str, float]]:
        """What each measured step comes to, in the terms of the cost of `host`."""
        return [
            {
                "sequences": float(sequences),
                "tokens": float(sequences * tokens),
                "logits": float(sequences * rows * vocab),
            }
            for vocab, sequences, drafts in self._cases()
            for tokens, rows in ((PROMPT_TOKENS, 1), (1 + drafts, 1 + drafts))
        ]

    def measure(self) -> Iterator[float]:
        """Seconds of the host in each step, in the order of `amounts`."""
        for vocab, cases in itertools.groupby(self._cases(), key=lambda case: case[0]):
            stand_in = _StandInKernels(self.kernels, self.pool)
            spec = _tiny_model(vocab)
            decoder = Decoder(spec, random_weights(spec, seed=0).to(self.pool.bytes.device), stand_in)
            for _, sequences, drafts in cases:
                yield from self._serve(decoder, stand_in, sequences, drafts)

    def _cases(self) -> list[tuple[int, int, int]]:
        return list(itertools.product(self.grid.vocab, self.grid.sequences, self.grid.drafts))

    def _serve(self, decoder: Decoder, stand_in: _StandInKernels, sequences: int, drafts: int) -> tuple[float, float]:
        """Seconds of the host in the step that computes all prompts, and in one of those after it."""
        tokens = 1 + self.grid.steps * (1 + drafts)
        requests = [Request(i, 0.0, PROMPT_TOKENS, tokens, (0,) * PROMPT_TOKENS) for i in range(sequences)]
        blocks = sequences * -(-(PROMPT_TOKENS + tokens) // BLOCK_SIZE)
        scheduler = Scheduler(
            ContinuousBatching(),
            BlockPool(blocks, BLOCK_SIZE),
            max_num_seqs=sequences,
            max_batched_tokens=sequences * (PROMPT_TOKENS + tokens),
            drafter=_SureDrafter(drafts) if drafts else None,
            tables=BlockTables(blocks, BLOCK_SIZE),
        )
        clock = WallClock()
        executor = TorchExecutor(decoder, decoder.new_cache(blocks, BLOCK_SIZE), BLOCK_SIZE, GreedySampler(), clock)
        recorder = Recorder()
        stand_in.away_s = []
        for _ in serve(scheduler, client_for(ClosedLoop(concurrency=sequences), requests), executor, clock, recorder):
            pass
        steps = recorder.steps()
        host_s = np.diff(np.append(steps["start_s"], clock.now_s())) - np.array(stand_in.away_s)
        later = [i for i in range(1, len(host_s)) if steps["tokens"][i] == sequences * (1 + drafts)]
        return float(host_s[0]), float(np.median(host_s[later]))


class _SureDrafter:
    """Drafts the token that the stand-in's logits lead to."""

    computed_guesses = 0

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts

    def draft(self, sequences: list[Sequence], rooms: list[Room]) -> list[Draft]:
        return [Draft((0,) * min(self.drafts, room.chain)) for room in rooms]


class _StandInKernels(TorchKernels):
    """Kernels that compute nothing, but once a step read as much memory as makes the host's code and data cold.

    `away_s` has the seconds of that for each step.
    """

    name = "stand-in"
    emulates_quantized_kv = True

    def __init__(self, kernels: Kernels, pool: Pool) -> None:
        super().__init__(str(pool.bytes.device))
        self.activation_dtype = kernels.activation_dtype
        self.kv_dtype = kernels.kv_dtype
        self.away_s: list[float] = []
        self._pool = pool
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def describe(self) -> str:
        return "kernels that compute nothing"

    def stalls(self) -> int:
        return 0

    def pack(self, weight: Tensor, format: WeightFormat, group_size: int | None = None) -> PackedWeight:
        return PackedWeight("bf16", weight)

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        shape = (x.shape[0], weight.data.shape[0])
        if shape not in self._buffers:
            self._buffers[shape] = torch.zeros(shape, dtype=self.activation_dtype, device=x.device)
        return self._buffers[shape]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    def rope_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, k_blocks: Tensor, v_blocks: Tensor
    ) -> Tensor:
        head_dim = k_blocks.shape[-1]
        return qkv[:, : qkv.shape[1] - 2 * k_blocks.shape[2] * head_dim].view(qkv.shape[0], -1, head_dim)

    def attention(
        self,
        q: Tensor,
        k_blocks: Tensor,
        v_blocks: Tensor,
        batch: RaggedBatch,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        start_s = time.perf_counter()
        self._pool.parts(min(EVICTED_BYTES, self._pool.size_bytes), 1)[0].view(torch.float32).sum().item()
        self.away_s.append(time.perf_counter() - start_s)
        return q.reshape(q.shape[0], -1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gate_up[:, : gate_up.shape[1] // 2]


def _tiny_model(vocab: int) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        layers=1,
        hidden=128,
        vocab=vocab,
        attention=GroupedQueryAttention(heads=2, kv_heads=1, head_dim=64),
        ffn=GatedFfn(intermediate=128),
        tie_embeddings=True,
        max_context=1024,
        rope_theta=10000.0,
        norm_eps=1e-5,
        source="made for calibration",
    )
