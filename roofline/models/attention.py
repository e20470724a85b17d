"""What does attention over a KV cache cost: which matrices, and what does a token leave in the cache?"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from membound.roofline.models.base import Frozen, LinearShape, WithoutKv, WithoutState, split, split_or_copy


class SparseIndexer(Frozen):
    """Sparse attention: light heads score all earlier tokens, and attention reads the `top_k` best.

    Its keys, one of `head_dim` a token, are cached in fp8 with one fp32 scale (DeepSeek-V3.2, whose heads have
    `head_weights`) or in 16 bits. A layer that takes its choice from an earlier layer has no indexer but still reads
    `top_k` tokens: `shared` (GLM-5.2). Where whole blocks of tokens are chosen (MiniMax-M3), `top_k` are theirs.
    """

    heads: PositiveInt
    head_dim: PositiveInt
    top_k: PositiveInt
    shared: bool = False
    head_weights: bool = True
    key_format: Literal["fp8", "bf16"] = "fp8"

    @property
    def key_bytes_per_token(self) -> int:
        """Bytes of index keys that one token leaves: fp8 elements and an fp32 scale, or 16 bits each."""
        if self.shared:
            return 0
        return self.head_dim + 4 if self.key_format == "fp8" else 2 * self.head_dim

    def linears(self, hidden: int, queries_from: int) -> tuple[LinearShape, ...]:
        """Its queries come from the compressed q or the hidden state, its key and weights from the hidden state."""
        if self.shared:
            return ()
        return (
            LinearShape("index_q", self.heads * self.head_dim, queries_from),
            LinearShape("index_k", self.head_dim + self.head_weights * self.heads, hidden),
        )

    @property
    def vector_params(self) -> int:
        """The key's layer norm, or the norms of both."""
        return 0 if self.shared else 2 * self.head_dim


class GroupedQueryAttention(WithoutState, Frozen):
    """Attention in which `heads / kv_heads` query heads share a K and V head (equal: MHA; one KV head: MQA).

    `window` tokens are seen, or all. `output_gate` scales each element of the output by a gate that comes out of
    a wider q projection (Qwen3-Next). `sinks` are learned logits, one a head (gpt-oss). `v_is_k` takes V from the
    K projection (Gemma 4). `qk_norm` is over each head, or over all of them (`qk_norm_over`: OLMo 2, MiniMax-M2).
    With `q_lora_rank` q comes from a narrower, normed projection of the hidden state (Step-3's MFA, arXiv 2412.19255).
    With an `indexer` it reads those tokens that light heads choose, of all that are cached (MiniMax-M3).
    With `shares_kv` a layer reads the K and V that an earlier one has cached, and leaves none (Gemma 3n).
    """

    kind: Literal["gqa"] = "gqa"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    v_head_dim: PositiveInt | None = None
    window: PositiveInt | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "heads"] = "head"
    qk_norm_bias: bool = False
    output_gate: bool = False
    sinks: bool = False
    v_is_k: bool = False
    shares_kv: bool = False
    q_lora_rank: PositiveInt | None = None
    indexer: SparseIndexer | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.q_lora_rank and (self.output_gate or self.qkv_bias):
            raise ValueError("q_lora_rank is given with qkv_bias or output_gate, which no such attention has")
        if self.indexer is not None and self.window is not None:
            raise ValueError(f"indexer is given beside window {self.window}, within which all tokens are read")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even, because rotary embedding turns pairs")
        return self

    @property
    def reads(self) -> int | None:
        """Tokens that a query reads at most; None: all of them."""
        return self.window if self.indexer is None else self.indexer.top_k

    @property
    def value_dim(self) -> int:
        """Elements of one V head."""
        return self.v_head_dim or self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused q, k and v projection."""
        return self._qkv_rows(self.heads, self.kv_heads)

    @property
    def kv_elements_per_token(self) -> int:
        return 0 if self.shares_kv else self.kv_heads * (self.head_dim + self.value_dim)

    def heads_on_gpu(self, tp: int) -> tuple[int, int]:
        """Query heads and KV heads of one GPU of `tp`; a KV head is copied where GPUs outnumber them."""
        return split(self.heads, tp, "heads"), split_or_copy(self.kv_heads, tp, "kv_heads")

    def kv_elements_on_gpu(self, tp: int) -> int:
        return 0 if self.shares_kv else self.heads_on_gpu(tp)[1] * (self.head_dim + self.value_dim)

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        heads, kv_heads = self.heads_on_gpu(tp)
        if self.q_lora_rank:
            rows = self.q_lora_rank + self._qkv_rows(0, kv_heads)
            q_b = LinearShape("q_b", heads * self.head_dim, self.q_lora_rank)
            return LinearShape("qkv", rows, hidden), q_b, LinearShape("o", hidden, heads * self.value_dim)
        qkv = LinearShape("qkv", self._qkv_rows(heads, kv_heads), hidden)
        index = self.indexer.linears(hidden, hidden) if self.indexer else ()
        return qkv, *index, LinearShape("o", hidden, heads * self.value_dim)

    def vectors(self, hidden: int) -> int:
        return self.vector_params + self.o_bias * hidden

    @property
    def vector_params(self) -> int:
        """Parameters of one layer outside its linears, but for a bias of the output."""
        keys, index = 0 if self.shares_kv else 1, self.indexer.vector_params if self.indexer else 0
        normed = (self.heads + keys * self.kv_heads if self.qk_norm_over == "heads" else 1 + keys) * self.head_dim
        norms = self.qk_norm * normed * (2 if self.qk_norm_bias else 1)
        return self.qkv_bias * self.qkv_rows + norms + self.sinks * self.heads + (self.q_lora_rank or 0) + index

    def _qkv_rows(self, heads: int, kv_heads: int) -> int:
        queries = heads * self.head_dim + (heads * self.value_dim if self.output_gate else 0)
        if self.shares_kv:
            return queries
        return queries + kv_heads * (self.head_dim + (0 if self.v_is_k else self.value_dim))


class LatentAttention(WithoutState, Frozen):
    """Multi-head latent attention (MLA): a token caches one latent vector and one rotated key for all heads.

    Not absorbed, `kv_b` turns the latents of all attended tokens into K and V of every head. Absorbed, its two
    halves are applied to q and to the output instead (`absorbed_linears`), and attention runs on the latents. With an
    `output_gate` each element of the output is scaled by a gate of the hidden state (Kimi K3).
    """

    kind: Literal["mla"] = "mla"
    heads: PositiveInt
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: NonNegativeInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    output_gate: bool = False
    indexer: SparseIndexer | None = None

    @model_validator(mode="after")
    def _indexer_has_its_input(self) -> Self:
        if self.indexer is not None and self.q_lora_rank is None:
            raise ValueError("indexer is given without q_lora_rank, from which its queries come")
        return self

    @property
    def window(self) -> None:
        return None

    @property
    def qk_head_dim(self) -> int:
        """Elements of one head's q and k where MLA is not absorbed."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_elements_per_token(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def kv_elements_on_gpu(self, tp: int) -> int:
        """All of them: every head reads the whole latent."""
        return self.kv_elements_per_token

    def heads_on_gpu(self, tp: int) -> int:
        return split(self.heads, tp, "heads")

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        heads = self.heads_on_gpu(tp)
        if self.q_lora_rank is None:
            inputs = (
                LinearShape("q", heads * self.qk_head_dim, hidden),
                LinearShape("kv_a", self.kv_elements_per_token, hidden),
            )
        else:
            inputs = (
                LinearShape("q_a_kv_a", self.q_lora_rank + self.kv_elements_per_token, hidden),
                LinearShape("q_b", heads * self.qk_head_dim, self.q_lora_rank),
            )
        index = self.indexer.linears(hidden, self.q_lora_rank) if self.indexer and self.q_lora_rank else ()
        return (
            *inputs,
            LinearShape("kv_b", heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            LinearShape("o", hidden, heads * self.v_head_dim),
            *index,
            *((LinearShape("output_gate", heads * self.v_head_dim, hidden),) if self.output_gate else ()),
        )

    def absorbed_linears(self) -> tuple[LinearShape, ...]:
        """What replaces `kv_b` in each head when absorbed, applied to new tokens only: one matrix a head."""
        return (
            LinearShape("q_absorb", self.kv_lora_rank, self.qk_nope_head_dim),
            LinearShape("v_absorb", self.v_head_dim, self.kv_lora_rank),
        )

    def vectors(self, hidden: int) -> int:
        """The norms of the compressed q and of the latent, and the indexer's."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank + (self.indexer.vector_params if self.indexer else 0)


class NoMixer(WithoutState, WithoutKv, Frozen):
    """A layer without attention: only its feed-forward network (Nemotron-H)."""

    kind: Literal["none"] = "none"

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        return ()

    def vectors(self, hidden: int) -> int:
        return 0
