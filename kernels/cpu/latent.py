"""What does attention over latents (MLA) cost on a CPU?"""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.cpu.calls import LibraryCalls, Rows, dense


class LatentCalls(LibraryCalls):
    """latent.cpp"""

    def __init__(self) -> None:
        super().__init__()
        self._latent_rope_and_store = self._declare("membound_latent_rope_and_store", _LatentArguments)
        self._heads_linear = self._declare("membound_heads_linear", _HeadsArguments)

    def latent_rope_and_store(
        self,
        q: Tensor,
        latents: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        batch: RaggedBatch,
        blocks: Tensor,
    ) -> Tensor:
        q, norm, cos, sin = dense(q), dense(norm), dense(cos), dense(sin)
        rank, rope = norm.shape[0], 2 * cos.shape[1]
        if blocks.dtype is not torch.bfloat16 or not blocks.is_contiguous() or blocks.shape[-1] != rank + rope:
            raise TypeError(f"latents lie in contiguous bf16 blocks of {rank + rope}, not {blocks.dtype}")
        if latents.stride(1) != 1 or latents.dtype is not torch.float32:
            raise TypeError("a token's latent is dense and fp32")
        fields = self._fields(batch)
        addresses = (part.data_ptr() for part in (q, latents, norm, cos, sin))
        sizes = q.shape[1], q.shape[2], rank, rope, latents.stride(0)
        arguments = _LatentArguments(*addresses, addressof(fields), blocks.data_ptr(), *sizes, eps)
        self._run(self._latent_rope_and_store, arguments, norm, cos, sin, fields)
        return q

    def heads_linear(self, x: Tensor, weight: Tensor, tail: int = 0) -> Tensor:
        heads, n, k = weight.shape
        if weight.dtype is not torch.bfloat16 or not weight.is_contiguous():
            raise TypeError(f"the matrices of heads are contiguous bf16, not {weight.dtype}")
        if x.dtype is not torch.float32 or x.stride(2) != 1 or x.shape[2] < k + tail:
            raise ValueError(f"x is {tuple(x.shape)}, and each head takes {k} of its elements and keeps {tail}")
        out = self._empty(x.shape[0], heads, n + tail)
        where = x.data_ptr(), weight.data_ptr(), out.data_ptr(), self._rows(x.shape[0])
        self._run(self._heads_linear, _HeadsArguments(*where, heads, n, k, tail, x.stride(0), x.stride(1)), weight)
        return out


class _LatentArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("q", "latents", "norm", "cos", "sin", "batch", "blocks")]
    _fields_ += [(name, c_int64) for name in ("heads", "head_dim", "rank", "rope", "latent_stride")]
    _fields_ += [("eps", c_float)]


class _HeadsArguments(Structure):
    _fields_ = [("x", c_void_p), ("weight", c_void_p), ("out", c_void_p), ("tokens", Rows)]
    _fields_ += [(name, c_int64) for name in ("heads", "n", "k", "tail", "token_stride", "head_stride")]
