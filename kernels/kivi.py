"""How do KIVI's keys and values lie in 2 or 4 bits, and what do they mean?

A channel of the keys has outliers in every token, so keys share a scale along tokens; values have none, so that each
token keeps its own scales. Source: Liu et al., KIVI, ICML 2024, sections 3.2 and 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.grouped import META, decode, encode, pack, unpack
from membound.kernels.recurrent import seats_of


@dataclass(frozen=True, eq=False)
class KiviBlocks:
    """One layer's K and V: keys in groups of `group` tokens a channel, values in groups of `group` channels a token.

    The newest tokens of a sequence are in bf16 at its seat, token t at t % window of `recent_keys` and `recent_values`
    [seats, window, kv_heads, head_dim]. Those before `rounded` [seats, kv_heads] (int32), whole groups, are codes in
    their blocks: of each token's vector, byte i of head_dim * bits / 8 holds channels i, i + head_dim * bits / 8, and
    so on, from the lowest bits up. A scale and a minimum (fp16) lie side by side in `value_meta` [blocks, block_size,
    kv_heads, head_dim / group, 2] and in `key_meta` [blocks, groups of a block, kv_heads, channels, 2]; where a group
    spans several blocks, each of them has its share of the channels.
    """

    bits: int
    group: int
    key_codes: Tensor
    key_meta: Tensor
    value_codes: Tensor
    value_meta: Tensor
    recent_keys: Tensor
    recent_values: Tensor
    rounded: Tensor

    @classmethod
    def zeros(
        cls,
        bits: int,
        group: int,
        window: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        seats: int,
        device: torch.device | str,
    ) -> KiviBlocks:
        """Blocks and seats that nobody has written."""
        if max(block_size, group) % min(block_size, group) or head_dim % group:
            raise ValueError(f"group: is {group}, should divide head_dim {head_dim}, and block_size {block_size} or it")
        unit = min(block_size, group)

        def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        stored = head_dim * bits // 8
        return cls(
            bits,
            group,
            empty(blocks, block_size, kv_heads, stored),
            empty(blocks, block_size // unit, kv_heads, head_dim * unit // group, 2, dtype=META),
            empty(blocks, block_size, kv_heads, stored),
            empty(blocks, block_size, kv_heads, head_dim // group, 2, dtype=META),
            empty(seats, window, kv_heads, head_dim, dtype=torch.bfloat16),
            empty(seats, window, kv_heads, head_dim, dtype=torch.bfloat16),
            empty(seats, kv_heads, dtype=torch.int32),
        )

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What lies in blocks."""
        return self.key_codes, self.key_meta, self.value_codes, self.value_meta

    def clone(self) -> KiviBlocks:
        """A copy that is written apart."""
        tensors = *self.parts, self.recent_keys, self.recent_values, self.rounded
        return KiviBlocks(self.bits, self.group, *(tensor.clone() for tensor in tensors))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.parts, self.recent_keys, self.recent_values))

    @property
    def window(self) -> int:
        return self.recent_keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.key_codes.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key_codes.shape[2]

    @property
    def head_dim(self) -> int:
        return self.recent_keys.shape[3]

    @property
    def most_new(self) -> int:
        """So many tokens a sequence may bring to be attended to where they are kept, at most a group.

        What is rounded to make room for them was there before them.
        """
        return min(self.group, self.window - self.group + 1)

    def groups_before(self, end: int) -> int:
        """How many tokens of a sequence of `end` are rounded at least, so that the others fit into the window."""
        return max(0, -(-(end - self.window) // self.group) * self.group)

    def slots(self, batch: RaggedBatch) -> Tensor:
        """Where the new tokens lie among the recent: [tokens]."""
        rows = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.positions.device)
        sequence = torch.searchsorted(batch.query_start, rows, right=True) - 1
        # A token that is not stored has a negative slot, and no sequence where it is padding behind the last.
        seat = seats_of(batch)[sequence.clamp(max=batch.num_sequences - 1)]
        return torch.where(batch.slots < 0, -1, seat * self.window + batch.positions % self.window)

    def round(self, table: Tensor, keys: Tensor, values: Tensor, start: int, end: int) -> None:
        """Puts K and V [tokens, kv_heads, head_dim] of the tokens from `start` to `end`, whole groups, into blocks."""
        unit, parts = min(self.block_size, self.group), self.group // min(self.block_size, self.group)
        position = torch.arange(start, end, device=keys.device)
        ids, place = table[position // self.block_size].long(), position % self.block_size
        codes, meta = encode(keys.unflatten(0, (-1, self.group)).permute(0, 2, 3, 1), self.bits)
        self.key_codes[ids, place] = pack(codes.permute(0, 3, 1, 2).flatten(0, 1), self.bits)
        first = position[::unit]
        units = meta.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)  # [units, kv_heads, channels, 2]
        self.key_meta[table[first // self.block_size].long(), first % self.block_size // unit] = units
        codes, meta = encode(values.unflatten(-1, (-1, self.group)), self.bits)
        self.value_codes[ids, place], self.value_meta[ids, place] = pack(codes.flatten(-2), self.bits), meta

    def unpacked(self, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """K and V [tokens, kv_heads, head_dim] in fp32 of a sequence's first `tokens` tokens, whole groups of them."""
        ids, unit = table[: -(-tokens // self.block_size)].long(), min(self.block_size, self.group)
        groups = tokens // self.group
        codes = unpack(self.key_codes[ids].flatten(0, 1)[:tokens], self.bits).unflatten(0, (groups, self.group))
        meta = self.key_meta[ids].flatten(0, 1)[: tokens // unit].unflatten(0, (groups, self.group // unit))
        keys = decode(codes.permute(0, 2, 3, 1), meta.transpose(1, 2).flatten(2, 3)).permute(0, 3, 1, 2).flatten(0, 1)
        codes = unpack(self.value_codes[ids].flatten(0, 1)[:tokens], self.bits).unflatten(-1, (-1, self.group))
        return keys, decode(codes, self.value_meta[ids].flatten(0, 1)[:tokens]).flatten(-2)

    def tokens(self, table: Tensor, seat: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V [end, kv_heads, head_dim] of a sequence's first `end` tokens, in bf16."""
        rounded = min(int(self.rounded[seat, 0]), end)
        newest = torch.arange(rounded, end, device=table.device) % self.window
        old = self.unpacked(table, rounded) if rounded else (self.recent_keys[0, :0], self.recent_values[0, :0])
        recent = self.recent_keys[seat, newest], self.recent_values[seat, newest]
        keys, values = (torch.cat([a.to(b.dtype), b]) for a, b in zip(old, recent, strict=True))
        return keys, values

    def keep(self, table: Tensor, seat: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Rounds what the window has no room for of a sequence's K and V [end, kv_heads, head_dim].

        The others from `start` on are put into the window.
        """
        before, end = int(self.rounded[seat, 0]) if start else 0, len(keys)
        beyond = max(before, self.groups_before(end))
        if beyond > before:
            self.round(table, keys[before:beyond], values[before:beyond], before, beyond)
        self.rounded[seat] = beyond
        newest = torch.arange(max(start, beyond), end, device=keys.device)
        self.recent_keys[seat, newest % self.window] = keys[newest].to(self.recent_keys.dtype)
        self.recent_values[seat, newest % self.window] = values[newest].to(self.recent_values.dtype)


def make_room(kv: KiviBlocks, batch: RaggedBatch) -> None:
    """Rounds each sequence's oldest recent tokens, until the new ones of a batch fit beside the others."""
    edges, seats = batch.query_start.tolist(), seats_of(batch).tolist()
    for i, (seat, end) in enumerate(zip(seats, batch.context_len.tolist(), strict=True)):
        start = end - (edges[i + 1] - edges[i])
        before = int(kv.rounded[seat, 0]) if start else 0
        beyond = max(before, kv.groups_before(end))
        if beyond > before:
            old = torch.arange(before, beyond, device=kv.rounded.device) % kv.window
            keys, values = kv.recent_keys[seat, old], kv.recent_values[seat, old]
            kv.round(batch.block_table[i], keys, values, before, beyond)
        kv.rounded[seat] = beyond
