"""What must kernels promise for K and V in blocks that all heads of a sequence read alike?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from membound.kernels.kv_formats import QuantizedKv

if TYPE_CHECKING:
    from membound.kernels.base import RaggedBatch


class PagedKernels(Protocol):
    """The part of `Kernels` that fills such blocks and attends over them; `reference.py` has its plain meaning."""

    def rope_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, k_blocks: Tensor, v_blocks: Tensor
    ) -> Tensor:
        """Rotates q and k (rotate-half), stores k and v at `batch.slots`, returns q.

        qkv is [tokens, (heads + 2 * kv_heads) * head_dim]; cos and sin are fp32 tables
        [max_position, head_dim / 2] indexed by `batch.positions`. Returns [tokens, heads, head_dim].
        """

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
        """Grouped-query attention of q [tokens, heads, head_dim] over the paged K and V: [tokens, heads * head_dim].

        Causal, or as `batch.tree` says. With `window` a token sees itself and the window - 1 before it (in a tree,
        of its ancestors and the context); memory of tokens that nobody sees is not read. With `softcap`, scores
        become softcap * tanh(score / softcap), as in Gemma 2.
        """

    def attention_with_sinks(
        self,
        q: Tensor,
        k_blocks: Tensor,
        v_blocks: Tensor,
        batch: RaggedBatch,
        scale: float,
        sinks: Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`attention` in which each head's logit of `sinks` [heads] (fp32) joins the softmax, with a value of zero."""

    def rope_and_store_quantized(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, kv: QuantizedKv
    ) -> Tensor:
        """`rope_and_store` into quantized blocks."""

    def attention_quantized(
        self,
        q: Tensor,
        kv: QuantizedKv,
        batch: RaggedBatch,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`attention` over quantized blocks, read as they are stored."""

    def attention_scores(
        self,
        q: Tensor,
        keys: Tensor | QuantizedKv,
        batch: RaggedBatch,
        scale: float,
        *,
        queries: int,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """What H2O and SnapKV evict by: the attention that the last new tokens pay to each token of their sequence.

        Returns fp32 [sequences, kv_heads, longest context or more]: the attention probabilities, summed over the last
        `queries` new tokens of a sequence (all, where it brings fewer) and over the heads of the group; 0 behind its
        context.
        """
