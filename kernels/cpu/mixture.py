"""What does a mixture of experts cost on a CPU: choosing, each chosen expert's weights once, and the weighted sum?"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from membound.kernels.base import PackedWeight
from membound.kernels.cpu.calls import Rows, pointer
from membound.kernels.cpu.linear import LinearCalls, WeightFields
from membound.kernels.routing import Routing, RoutingRule


class CpuExperts:
    """The linear layers of a mixture's experts, of which those without rows are not read."""

    def __init__(self, kernels: MixtureCalls, weights: Sequence[PackedWeight], biases: Sequence[Tensor] | None) -> None:
        self.weights = list(weights)
        self._kernels = kernels
        self._biases = None if biases is None else [bias.float().contiguous() for bias in biases]
        known = [kernels.fields_of(weight) for weight in weights]
        self.fields: Array[WeightFields] = (WeightFields * len(known))(*known)
        self.bias_addresses: Array[c_void_p] | None = None
        if self._biases is not None:
            self.bias_addresses = (c_void_p * len(known))(*(bias.data_ptr() for bias in self._biases))

    def __call__(self, x: Tensor, routing: Routing, *, shared_rows: bool) -> Tensor:
        slots_a_row = routing.top_k if shared_rows else 1
        return self._kernels.multiply_experts(self, x, routing, slots_a_row)


class MixtureCalls(LinearCalls):
    """mixture.cpp"""

    def __init__(self, *, batch_invariant: bool) -> None:
        super().__init__(batch_invariant=batch_invariant)
        self._route = self._declare("membound_route", _RouteArguments)
        self._grouped = self._declare("membound_grouped", _GroupedArguments)
        self._combine = self._declare("membound_combine", _CombineArguments)
        self._count_routed = self._declare("membound_count_routed", _CountArguments)

    def grouped(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor] | None = None) -> CpuExperts:
        return CpuExperts(self, weights, biases)

    def multiply_experts(self, experts: CpuExperts, x: Tensor, routing: Routing, slots_a_row: int) -> Tensor:
        x = self._dense(x)
        n, k = experts.weights[0].shape
        if x.shape[1] != k:
            raise ValueError(f"x has {x.shape[1]} columns, and the experts are {n} x {k}")
        out = self._empty(x.shape[0] * slots_a_row, n)
        biases = experts.bias_addresses
        arguments = _GroupedArguments(
            addressof(experts.fields),
            None if biases is None else addressof(biases),
            x.data_ptr(),
            out.data_ptr(),
            routing.order.data_ptr(),
            routing.offsets.data_ptr(),
            len(experts.weights),
            slots_a_row,
        )
        self._run(self._grouped, arguments, experts)
        return out

    def route(
        self, logits: Tensor, top_k: int, rule: RoutingRule, bias: Tensor | None = None, slots: Tensor | None = None
    ) -> Routing:
        logits = self._dense(logits)
        tokens, experts = logits.shape
        bias = None if bias is None else bias.float().contiguous()
        chosen, weights = self._empty(tokens, top_k).view(torch.int32), self._empty(tokens, top_k)
        order = self._empty(tokens * top_k).view(torch.int32)
        offsets = self._empty(experts + 1).view(torch.int32)
        probabilities = self._empty(tokens, experts)
        arguments = _RouteArguments(
            logits.data_ptr(),
            pointer(bias),
            *(part.data_ptr() for part in (chosen, weights, order, offsets, probabilities)),
            self._rows(tokens),
            experts,
            top_k,
            rule.groups,
            rule.group_top_k,
            int(rule.scores == "sigmoid"),
            int(rule.normalized),
            int(rule.bias == "logits"),
            int(rule.group_score == "best_two"),
            rule.scale,
        )
        self._run(self._route, arguments, bias)
        return Routing(chosen, weights, order, offsets, probabilities)

    def combine(self, slots: Tensor, chosen: Routing) -> Tensor:
        slots = self._dense(slots)
        tokens, top_k = chosen.experts.shape
        out = self._empty(tokens, slots.shape[1])
        addresses = (part.data_ptr() for part in (slots, chosen.experts, chosen.weights, out))
        self._run(self._combine, _CombineArguments(*addresses, self._rows(tokens), slots.shape[1], top_k))
        return out

    def count_routed(self, chosen: Routing, tokens: Tensor, load: Tensor, probability: Tensor) -> None:
        assert chosen.probabilities is not None, "a router that is counted says them"
        rows, experts = chosen.probabilities.shape
        parts = (chosen.offsets, chosen.probabilities, tokens, load, probability)
        addresses = (part.data_ptr() for part in parts)
        self._run(self._count_routed, _CountArguments(*addresses, self._rows(rows), experts), tokens, load, probability)


class _RouteArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("logits", "bias", "chosen", "weights", "order", "offsets")]
    _fields_ += [("probabilities", c_void_p), ("tokens", Rows)]
    _fields_ += [(name, c_int64) for name in ("experts", "top_k", "groups", "group_top_k")]
    _fields_ += [(name, c_int64) for name in ("sigmoid", "normalized", "bias_in_logits", "best_two")]
    _fields_ += [("scale", c_float)]


class _GroupedArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("weights", "biases", "x", "out", "order", "offsets")]
    _fields_ += [("experts", c_int64), ("slots_a_row", c_int64)]


class _CombineArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("slots", "chosen", "weights", "out")]
    _fields_ += [("tokens", Rows), ("n", c_int64), ("top_k", c_int64)]


class _CountArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("offsets", "probabilities", "counted", "load", "probability")]
    _fields_ += [("tokens", Rows), ("experts", c_int64)]
