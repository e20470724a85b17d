"""Which operators does a mixture of experts add to a step?"""

from __future__ import annotations

import math

import numpy as np

from membound.roofline.chosen_experts import distinct_experts, missing_experts
from membound.roofline.expert_load import Busiest, busiest_rank
from membound.roofline.models.ffn import MoeFfn
from membound.roofline.operators import ExpertLoad, ExpertMoves, Operator, matrix_bytes, message
from membound.roofline.shape import Count, is_there
from membound.roofline.step_context import StepContext


def mixture_operators(step: StepContext, ffn: MoeFfn, count: int, prefix: str) -> list[Operator]:
    """Router and shared experts on every device, routed experts spread over `ep` groups of devices."""
    model, w, parallel, plan = step.model, step.width, step.parallel, step.plan
    t = step.tokens
    made = []
    for name, n, k in ffn.linears(model.hidden, parallel.tp):
        part = "shared_experts" if name.startswith(("shared_gate_up", "shared_up", "shared_down")) else "router"
        made.append(step.linear(f"{prefix}{name}", count, t, n, k, part))
        if name in ("shared_gate_up", "shared_up"):
            made.append(step.activation(f"{prefix}shared_silu", count, t, n, gated=name == "shared_gate_up"))
    weights = plan.weights_of("experts")
    matrices = ffn.expert_linears(model.hidden, parallel.moe_tp)
    pairs, active = _busiest(step, ffn)
    elements = sum(n * k for _, n, k in matrices)
    inner = sum(n for name, n, _ in matrices if name != "down")
    if (storage := step.setup.expert_storage) is not None:
        asked = (float(ffn.experts), ffn.computed_per_token, step.all_tokens, step.setup.expert_skew)
        missing = missing_experts(*asked, float(storage.cached)) / parallel.ep
        each = sum(matrix_bytes(weights, n, k) for _, n, k in matrices)
        moves = ExpertMoves(missing, storage.place, storage.gb_per_s and 1e9 * storage.gb_per_s)
        name = f"{prefix}fetch_experts"
        made.append(Operator(name, "expert_moves", count, link_bytes=each * missing, moves=moves))
    to, back = _messages(step, ffn, count, prefix, matrices[0].k, pairs)
    made += to
    each_bytes = sum(matrix_bytes(weights, n, k) for _, n, k in matrices)
    load = ExpertLoad(pairs, active, 2.0 * elements, each_bytes, _present(step, ffn, pairs))
    made.append(
        Operator(
            f"{prefix}experts",
            "moe",
            count,
            flops=2.0 * elements * pairs,
            weight_bytes=load.bytes_per_expert * active,
            activation_bytes=pairs * (4.0 * matrices[0].k + 3.0 * inner) * w,
            precision=weights,
            activations=plan.activations_of("experts"),
            experts=load,
        )
    )
    made += back
    return made


def _messages(
    step: StepContext, ffn: MoeFfn, count: int, prefix: str, width: int, pairs: Count
) -> tuple[list[Operator], list[Operator]]:
    """The messages before and after the routed experts, whose inputs and outputs have `width` elements.

    Ranks of dp that share the columns of experts gather their tokens and scatter the sums of their outputs, since
    each computes its columns for all of them. Between groups with other experts a token goes to those of its own;
    each device sends its share of its group's tokens to the device in its place there. The busiest gets more than
    its share, and all wait for it. What devices of tp have is summed at last, that of shared experts too.
    """
    parallel, w, t = step.parallel, step.width, step.tokens
    tp, dp, ep, cp = parallel.tp, parallel.dp, parallel.ep, parallel.cp
    asked = min(step.plan.activations_of("experts").bits / 8, w)
    to: list[Operator] = []
    back: list[Operator] = []
    apart = math.gcd(dp, ep)
    together = dp // apart
    if together > 1:
        gathered = together * t * width
        name = f"{prefix}gather_tokens"
        to.append(message(name, count, "allgather", gathered * asked, together, stride=tp * cp))
    if apart > 1:
        # Kernels for prompts send a token to a device once, and over the network to a node once; those for decode
        # send each copy, which is sooner there, as long as all tokens to all devices are not fewer.
        k = ffn.computed_per_token
        copies = 1.0 + (k - 1.0) * is_there(step.shape.prefill_tokens)
        busiest = np.minimum(pairs / np.maximum(step.all_tokens * k, 1e-9), 1.0)
        uneven = (1.0 - (1.0 - busiest) ** copies) / (1.0 - (1.0 - 1.0 / ep) ** copies)
        elements = step.all_tokens / ep * np.minimum(k * uneven, ep * copies) * width
        stride = parallel.moe_tp * cp
        for made, name, each in ((to, "dispatch", asked), (back, "combine", w)):
            sent = elements * each
            title, groups = f"{prefix}{name}", ffn.node_groups
            made.append(message(title, count, "alltoall", sent, ep, copies=copies, stride=stride, groups=groups))
    if together > 1:
        name = f"{prefix}scatter_outputs"
        back.append(message(name, count, "reducescatter", gathered * w, together, stride=tp * cp))
    if tp > 1:
        partial = parallel.moe_tp > 1 or dp == 1 or ffn.shared_intermediate > 0
        name, operation = ("reduce_experts", "allreduce") if partial else ("gather_experts", "allgather")
        back.append(message(f"{prefix}{name}", count, operation, t * step.model.hidden * w, tp))
    return to, back


def _present(step: StepContext, ffn: MoeFfn, pairs: Count) -> Count:
    """The pairs of all tokens on a device: of all that its group has, where only groups send each other tokens."""
    in_a_group = step.parallel.ep / math.gcd(step.parallel.dp, step.parallel.ep)
    return np.minimum(pairs * in_a_group, step.all_tokens * ffn.computed_per_token)


def _busiest(step: StepContext, ffn: MoeFfn) -> Busiest:
    """The pairs and experts of the device that the others wait for."""
    tokens, ep, setup = step.all_tokens, step.parallel.ep, step.setup
    if ffn.choice == "expert":
        pairs = ffn.experts / ep * np.ceil(tokens * ffn.top_k / ffn.experts)
        return Busiest(pairs, np.minimum(ffn.experts / ep, pairs))
    if ep > 1:
        return busiest_rank(ffn.experts, ffn.computed_per_token, ep, tokens, setup.expert_skew, setup.redundant_experts)
    read = distinct_experts(float(ffn.experts), ffn.computed_per_token, tokens, setup.expert_skew)
    return Busiest(tokens * ffn.computed_per_token, read)
