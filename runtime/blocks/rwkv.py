"""How does an RWKV layer mix tokens and channels?

RWKV-6: Peng et al. 2024, arXiv 2404.05892, section 4. RWKV-7: Peng et al. 2025, arXiv 2503.14456, section 4. A head's
state S is [key, value]; what a part reads of a token is mixed with what it read of the token before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.base import Kernels, RaggedBatch
from membound.kernels.recurrent import fresh_of, seats_of
from membound.roofline.models.recurrent import Rwkv6, Rwkv7
from membound.runtime.blocks.base import LayerCache, ShiftedFeedForward
from membound.runtime.blocks.states import SeatStates
from membound.runtime.linear import Linear

GROUP_NORM_EPS = 64e-5  # 1e-5 times the square of the divisor 8, `ln_x` in BlinkDL/RWKV-LM
_SLOWEST = math.exp(-0.5)  # RWKV-7's decay is exp(-exp(-0.5) * sigmoid(...)), arXiv 2503.14456, equation 12


class ValueOfFirstLayer:
    """What RWKV-7's first layer computed as v in this step, with which the others mix theirs: [tokens, width]."""

    value: Tensor


class Rwkv6Mixer:
    """Time mixing of RWKV-6: r (diag(u) k v^T + S), then S = diag(w) S + k v^T."""

    def __init__(
        self,
        spec: Rwkv6,
        kernels: Kernels,
        rkvg: Mapping[str, Linear],
        o: Linear,
        weights: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.rkvg = rkvg
        self.o = o
        self.weights = weights
        self.device = device
        self._shift_a, self._decay_a, self._decay_b = (weights[n].float() for n in ("shift_a", "decay_a", "decay_b"))
        self._shift_b = weights["shift_b"].float().unflatten(0, (5, -1))  # [5, hidden, rank]

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        assert isinstance(cache, SeatStates)
        spec, weights = self.spec, self.weights
        x = x.float()
        back = _token_before(x, batch, cache, "mix_shift") - x
        mixed = torch.tanh((x + back * weights["shift"][0]) @ self._shift_a.T).unflatten(1, (5, -1))
        moved = torch.einsum("tpr,phr->pth", mixed, self._shift_b)
        w, k, v, r, g = (x + back * (weights["shift"][i + 1] + moved[i]) for i in range(5))
        decay = weights["decay"] + torch.tanh(w @ self._decay_a.T) @ self._decay_b.T
        kind = self.kernels.activation_dtype
        parts = {"r": r, "k": k, "v": v, "g": g}
        r, k, v, g = (self.rkvg[name](parts[name].to(kind)).float() for name in "rkvg")
        r, decay, k, v = (part.unflatten(1, (spec.heads, -1)) for part in (r, torch.exp(-decay.exp()), k, v))
        kernels, bonus, scanned = self.kernels, weights["bonus"], (r, decay, k, v)
        out = cache.advance("state", batch, scanned, lambda s, x, at: kernels.rwkv6_scan(s, *x, bonus, at))
        y = _group_norm(out, weights) * functional.silu(g)
        return self.o(y.to(kind))

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> SeatStates:
        return _states(self.spec, seats, self.device)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield from self.rkvg.items()
        yield "o", self.o


class Rwkv7Mixer:
    """Time mixing of RWKV-7: S = diag(w) S - (kk a) (kk S)^T + k v^T, then r S."""

    def __init__(
        self,
        spec: Rwkv7,
        kernels: Kernels,
        rkv: Mapping[str, Linear],
        o: Linear,
        weights: Mapping[str, Tensor],
        first_value: ValueOfFirstLayer,
        first: bool,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.rkv = rkv
        self.o = o
        self.weights = weights
        self.first_value = first_value
        self.first = first
        self.device = device
        ranks = [spec.decay_rank, spec.rate_rank, spec.value_rank, spec.gate_rank]
        into = weights["low_rank_a"].float().split(ranks)
        out_of = weights["low_rank_b"].float().split(ranks, dim=1)
        self._low_ranks = {name: (a.T, b.T) for name, a, b in zip("wavg", into, out_of, strict=True)}

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        assert isinstance(cache, SeatStates)
        spec, weights = self.spec, self.weights
        x = x.float()
        back = _token_before(x, batch, cache, "mix_shift") - x
        inputs = {name: x + back * shift for name, shift in zip("rwkvag", weights["shift"], strict=True)}
        kind = self.kernels.activation_dtype
        r, k, v = (self.rkv[name](inputs[name].to(kind)).float() for name in "rkv")
        decay = torch.tanh(inputs["w"] @ self._low_ranks["w"][0]) @ self._low_ranks["w"][1]
        decay = torch.exp(-_SLOWEST * torch.sigmoid(weights["decay"] + decay))
        rate = torch.sigmoid(weights["rate"] + self._low_rank("a", inputs["a"]))
        gate = torch.sigmoid(inputs["g"] @ self._low_ranks["g"][0]) @ self._low_ranks["g"][1]
        if self.first:
            self.first_value.value = v
        else:
            v = v + (self.first_value.value - v) * torch.sigmoid(weights["value"] + self._low_rank("v", inputs["v"]))
        removed = functional.normalize((k * weights["k_k"]).unflatten(1, (spec.heads, -1)), dim=-1)
        k = k * (1 + (rate - 1) * weights["k_a"])
        r, k, v, w, rate = (part.unflatten(1, (spec.heads, -1)) for part in (r, k, v, decay, rate))
        kernels, scanned = self.kernels, (r, w, k, v, -removed, removed * rate)
        out = cache.advance("state", batch, scanned, lambda s, x, at: kernels.delta_scan(s, *x, at))
        bonus = (r * k * weights["r_k"].unflatten(0, (spec.heads, -1))).sum(-1, keepdim=True) * v
        y = (_group_norm(out, weights) + bonus.flatten(1)) * gate
        return self.o(y.to(kind))

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> SeatStates:
        return _states(self.spec, seats, self.device)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield from self.rkv.items()
        yield "o", self.o

    def _low_rank(self, name: str, x: Tensor) -> Tensor:
        into, out_of = self._low_ranks[name]
        return x @ into @ out_of


class ChannelMixNetwork(ShiftedFeedForward):
    """down(relu(up(x))^2), in RWKV-6 times sigmoid(receptance(x)); x is mixed with that of the token before."""

    def __init__(self, kernels: Kernels, linears: Mapping[str, Linear], shift: Tensor) -> None:
        self.kernels = kernels
        self._linears = linears
        self.shift = shift  # [1 or 2, hidden], of up and of receptance

    def shifted(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        assert isinstance(cache, SeatStates)
        kind, x = self.kernels.activation_dtype, x.float()
        back = _token_before(x, batch, cache, "ffn_shift") - x
        up = self._linears["up"]((x + back * self.shift[0]).to(kind))
        y = self._linears["down"](functional.relu(up).square())
        if "receptance" not in self._linears:
            return y
        return torch.sigmoid(self._linears["receptance"]((x + back * self.shift[1]).to(kind))) * y

    def linears(self) -> Iterator[tuple[str, Linear]]:
        return iter(self._linears.items())


def _token_before(x: Tensor, batch: RaggedBatch, states: SeatStates, name: str) -> Tensor:
    """The x [tokens, hidden] of each token's predecessor; the part `name` of the states holds that of the last one."""
    return states.advance(name, batch, (x,), lambda state, inputs, at: _shifted(state, inputs[0], at))


def _shifted(state: Tensor, x: Tensor, batch: RaggedBatch) -> Tensor:
    edges, seats = batch.query_start.long(), seats_of(batch)
    before = x.roll(1, dims=0)
    before[edges[:-1]] = torch.where(fresh_of(batch)[:, None], 0, state[seats])
    state[seats] = x[edges[1:] - 1]
    return before


def _group_norm(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """[tokens, heads, head_dim] normed by head: [tokens, width]."""
    weight, bias = weights["group_norm"], weights["group_norm_bias"]
    return functional.group_norm(x.flatten(1), x.shape[1], weight, bias, GROUP_NORM_EPS)


def _states(spec: Rwkv6 | Rwkv7, seats: int, device: torch.device) -> SeatStates:
    shape, width = (spec.heads, spec.head_dim, spec.head_dim), spec.width
    return SeatStates.zeroed(seats, device, mix_shift=(width,), ffn_shift=(width,), state=shape)
