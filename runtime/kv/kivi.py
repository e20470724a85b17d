"""How does KIVI keep keys and values in 2 or 4 bits?

A channel of the keys has outliers in every token, so keys share a scale along tokens; values have none, so that each
token keeps its own scales. Source: Liu et al., KIVI, ICML 2024, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import GroupedQueryAttention
from membound.roofline.precision import Precision
from membound.runtime.kv.content import content_of, put_content
from membound.runtime.kv.grouped import META, decode, encode, pack, unpack
from membound.runtime.kv.scratch import Scratch, seats_of
from membound.runtime.rope import RopeTables


class KiviKv:
    """Keys in groups of `group` tokens a channel, values in groups of `group` channels a token, the newest in bf16.

    Of a sequence at most `window` tokens are in bf16, at its seat; whenever they would be more, the oldest `group` of
    them are rounded into their blocks. A step unpacks what it reads into bf16 and attends to that, so its time means
    nothing.

    A `unit` is as many tokens as lie in one group and in one block. Where a group spans several blocks, each of them
    has its part of the group's scales and minima.
    """

    emulated = True
    on_host = True

    def __init__(
        self,
        kernels: Kernels,
        attention: GroupedQueryAttention,
        format: Precision,
        num_blocks: int,
        block_size: int,
        seats: int,
        device: torch.device,
    ) -> None:
        (scale,) = format.scales
        self.kernels = kernels
        self.seen = attention.window
        self.bits, self.group, self.window = format.width, scale.columns, format.window
        self.block_size, self.unit = block_size, min(block_size, self.group)
        heads, width = attention.kv_heads, attention.head_dim
        assert max(block_size, self.group) % self.unit == 0 == width % self.group, "checked when the scenario was"
        places = (num_blocks, block_size // self.unit, heads)

        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.key_codes = zeros(*places, width, self.unit * self.bits // 8)
        self.key_meta = zeros(*places, 2 * width * self.unit // self.group, dtype=META)
        self.value_codes = zeros(num_blocks, block_size, heads, width * self.bits // 8)
        self.value_meta = zeros(num_blocks, block_size, heads, width // self.group, 2, dtype=META)
        self.recent_keys, self.recent_values = (
            zeros(seats, self.window, heads, width, dtype=kernels.kv_dtype) for _ in range(2)
        )
        self.rounded = [0] * seats  # tokens of each seat that lie in blocks

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self._parts(), self.recent_keys, self.recent_values))

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        scratch = Scratch(batch, self.block_size, self.recent_keys)
        seats = seats_of(batch)
        for i, (seat, start) in enumerate(zip(seats, scratch.starts, strict=True)):
            if start == 0:
                self.rounded[seat] = 0
            rounded = self.rounded[seat]
            keys, values = scratch.tokens(i)
            if rounded:
                keys[:rounded], values[:rounded] = self._unpacked(batch.block_table[i], rounded)
            newest = torch.arange(rounded, start, device=keys.device)
            keys[newest] = self.recent_keys[seat, newest % self.window]
            values[newest] = self.recent_values[seat, newest % self.window]
        q = self.kernels.rope_and_store(qkv, rope.cos, rope.sin, scratch.batch, scratch.k_blocks, scratch.v_blocks)
        attended = self.kernels.attention(
            q, scratch.k_blocks, scratch.v_blocks, scratch.batch, scale, window=self.seen, softcap=softcap
        )
        for i, (seat, start, end) in enumerate(zip(seats, scratch.starts, scratch.ends, strict=True)):
            self._keep(seat, batch.block_table[i], *scratch.tokens(i), start, end)
        return attended

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return content_of(self._parts(), blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        put_content(self._parts(), blocks, content)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        raise AssertionError("drafts that must move are refused: tokens in codes share scales with their neighbours")

    def _parts(self) -> tuple[Tensor, ...]:
        return self.key_codes, self.key_meta, self.value_codes, self.value_meta

    def _unpacked(self, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """K and V [tokens, kv_heads, head_dim] of the first `tokens` tokens, whole groups of them."""
        ids = table[: -(-tokens // self.block_size)].long()
        units, groups = tokens // self.unit, tokens // self.group
        codes = unpack(self.key_codes[ids].flatten(0, 1)[:units], self.bits)  # [units, heads, D, unit]
        codes = codes.unflatten(0, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(-2)  # [groups, heads, D, group]
        meta = self.key_meta[ids].flatten(0, 1)[:units].unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
        keys = decode(codes, meta.unflatten(-1, (-1, 2))).permute(0, 3, 1, 2).flatten(0, 1)
        codes = unpack(self.value_codes[ids].flatten(0, 1)[:tokens], self.bits).unflatten(-1, (-1, self.group))
        values = decode(codes, self.value_meta[ids].flatten(0, 1)[:tokens]).flatten(-2)
        return keys.to(self.recent_keys.dtype), values.to(self.recent_keys.dtype)

    def _keep(self, seat: int, table: Tensor, keys: Tensor, values: Tensor, start: int, end: int) -> None:
        """Rounds what the window has no room for, and puts the other new tokens there."""
        before, group = self.rounded[seat], self.group
        beyond = max(before, -(-(end - self.window) // group) * group)
        if beyond > before:
            self._round(table, keys[before:beyond], values[before:beyond], before, beyond)
            self.rounded[seat] = beyond
        newest = torch.arange(max(start, beyond), end, device=keys.device)
        self.recent_keys[seat, newest % self.window] = keys[newest]
        self.recent_values[seat, newest % self.window] = values[newest]

    def _round(self, table: Tensor, keys: Tensor, values: Tensor, start: int, end: int) -> None:
        """Puts K and V [tokens, kv_heads, head_dim] of the tokens from `start` to `end` into their blocks."""
        parts = self.group // self.unit
        by_channel = keys.unflatten(0, (-1, self.group)).permute(0, 2, 3, 1)  # [groups, heads, D, group]
        codes, meta = encode(by_channel, self.bits)
        codes = codes.unflatten(-1, (parts, self.unit)).permute(0, 3, 1, 2, 4).flatten(0, 1)  # [units, heads, D, unit]
        meta = meta.flatten(2).unflatten(-1, (parts, -1)).transpose(1, 2).flatten(0, 1)  # [units, heads, 2 D / parts]
        first = torch.arange(start, end, self.unit, device=keys.device)
        ids, place = table[first // self.block_size].long(), first % self.block_size // self.unit
        self.key_codes[ids, place], self.key_meta[ids, place] = pack(codes, self.bits), meta

        codes, meta = encode(values.unflatten(-1, (-1, self.group)), self.bits)
        position = torch.arange(start, end, device=keys.device)
        ids, place = table[position // self.block_size].long(), position % self.block_size
        self.value_codes[ids, place], self.value_meta[ids, place] = pack(codes.flatten(-2), self.bits), meta
