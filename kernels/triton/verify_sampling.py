"""Which drafted tokens are kept, and which token follows, without a word to the host?

Rejection sampling keeps the target's distribution: draft x is accepted with probability min(1, p(x) / q(x)), and after
the first rejection one token is drawn from what p has more than q. Source: Leviathan et al., ICML 2023, algorithm 1. A
draft without q is a point mass. Drawing is an argmax of log weights plus Gumbel noise, so the vocabulary is read once a
kernel, by many programs. At temperature 0 a draft is accepted when it is the most likely token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.base import Emitted
from membound.kernels.triton import check
from membound.kernels.triton.launch import Config, configure, launch, machine_for


@triton.jit
def logits_parts_kernel(logits, row_start, temperature, peaks, sums, best, stride, vocab,
                        PARTS: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """Program (sequence, its row, part of the vocabulary): the largest l = logit / temperature, which token that is,
    and the sum of exp(l - largest)."""
    sequence, part = tl.program_id(0), tl.program_id(2)
    row = tl.load(row_start + sequence) + tl.program_id(1)
    if row >= tl.load(row_start + sequence + 1):
        return
    row = row.to(tl.int64)
    degree = tl.load(temperature + sequence)
    inverse = 1.0 / tl.where(degree > 0.0, degree, 1.0)
    lane = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, tl.minimum(PART, vocab - part * PART), BLOCK, num_stages=STAGES):
        v = part * PART + start + lane
        logit = tl.load(logits + row * stride + v, mask=v < vocab, other=float("-inf")).to(tl.float32) * inverse
        larger = logit > peak
        new_peak = tl.where(larger, logit, peak)
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - safe) + tl.exp(logit - safe)
        token = tl.where(larger, v, token)
        peak = new_peak
    largest = tl.max(peak, 0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    at = row * PARTS + part
    tl.store(peaks + at, largest)
    tl.store(sums + at, tl.sum(total * tl.exp(peak - safe), 0))
    tl.store(best + at, tl.min(tl.where(peak == largest, token, 2147483647), 0))


@triton.jit
def accept_kernel(logits, row_start, temperature, drafts, draft_probabilities, seed, peaks, sums, best, tokens, counts,
                  log_sums, stride, vocab, MOST_ROWS: tl.constexpr, PARTS: tl.constexpr,
                  BLOCK_PARTS: tl.constexpr):  # fmt: skip
    """Program (sequence): walks its drafts to the first rejection. Puts the likeliest token behind the accepted ones,
    which is final at temperature 0, and leaves the log sum of that row."""
    sequence = tl.program_id(0)
    first = tl.load(row_start + sequence)
    rows = tl.load(row_start + sequence + 1) - first
    degree = tl.load(temperature + sequence)
    inverse = 1.0 / tl.where(degree > 0.0, degree, 1.0)
    part = tl.arange(0, BLOCK_PARTS)
    alive = rows > 0
    accepted = rows * 0
    for j in tl.static_range(MOST_ROWS):
        row = (first + j).to(tl.int64)
        here = alive & (j < rows)
        at = row * PARTS + part
        peak = tl.load(peaks + at, mask=here & (part < PARTS), other=float("-inf"))
        largest = tl.max(peak, 0)
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        size = tl.load(sums + at, mask=here & (part < PARTS), other=0.0)
        log_sum = safe + tl.log(tl.maximum(tl.sum(size * tl.exp(peak - safe), 0), 1e-37))
        likeliest = tl.load(best + at, mask=here & (part < PARTS), other=2147483647)
        likeliest = tl.min(tl.where(peak == largest, likeliest, 2147483647), 0)
        has_draft = here & (j + 1 < rows)
        draft = tl.load(drafts + row, mask=has_draft, other=0)
        p = tl.exp(tl.load(logits + row * stride + draft, mask=has_draft, other=0.0).to(tl.float32) * inverse - log_sum)
        q = 1.0
        if draft_probabilities is not None:
            q = tl.load(draft_probabilities + row * vocab + draft, mask=has_draft, other=1.0)
        likely = tl.rand(tl.load(seed), row.to(tl.int32)) * q < p
        accept = has_draft & tl.where(degree > 0.0, likely, draft == likeliest)
        out = tokens + sequence.to(tl.int64) * MOST_ROWS + j
        tl.store(out, tl.where(accept, draft, likeliest.to(tl.int64)), mask=here)
        tl.store(log_sums + sequence, log_sum, mask=here)
        accepted += accept.to(tl.int32)
        alive = accept
    tl.store(counts + sequence, tl.where(rows > 0, accepted + 1, 0))


@triton.jit
def gumbel(uniform):
    """Gumbel noise from uniform noise of steps of 2**-31.

    It is -log of an exponential -log(1 - u), by its series where u is small: of many tokens the smallest u wins, and
    there 1 - u would keep only 24 bits.
    """
    u = tl.maximum(uniform, 2.3e-10)
    small = u * (1.0 + u * (0.5 + u * 0.33333334))
    return -tl.log(tl.where(u < 1e-3, small, -tl.log(1.0 - tl.minimum(u, 0.9999999))))


@triton.jit
def draw_parts_kernel(logits, row_start, temperature, drafts, draft_probabilities, seed, counts, log_sums, scores,
                      winners, stride, vocab, rows_in_all, PARTS: tl.constexpr, PART: tl.constexpr,
                      STAGES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program (sequence, part of the vocabulary): the best of log weight + Gumbel noise, and which token it is."""
    sequence, part = tl.program_id(0), tl.program_id(1)
    degree = tl.load(temperature + sequence)
    count = tl.load(counts + sequence)
    if (degree <= 0.0) | (count == 0):
        return
    first = tl.load(row_start + sequence)
    row = (first + count - 1).to(tl.int64)
    rejected = row + 1 < tl.load(row_start + sequence + 1)
    draft = tl.load(drafts + row, mask=rejected, other=-1)
    log_sum = tl.load(log_sums + sequence)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, tl.minimum(PART, vocab - part * PART), BLOCK, num_stages=STAGES):
        v = part * PART + start + lane
        logit = tl.load(logits + row * stride + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp(logit / degree - log_sum)
        if draft_probabilities is not None:
            q = tl.load(draft_probabilities + row * vocab + v, mask=(v < vocab) & rejected, other=0.0)
            weight = tl.maximum(weight - q, 0.0)
        else:
            weight = tl.where(v == draft, 0.0, weight)
        # Counted behind the noise of the acceptance, so that no number is used twice.
        noise = tl.rand(tl.load(seed), rows_in_all + sequence * vocab + v)
        score = tl.where(weight > 0.0, tl.log(tl.maximum(weight, 1e-37)) + gumbel(noise), float("-inf"))
        larger = score > best
        best = tl.where(larger, score, best)
        token = tl.where(larger, v, token)
    largest = tl.max(best, 0)
    at = sequence * PARTS + part
    tl.store(scores + at, largest)
    tl.store(winners + at, tl.min(tl.where(best == largest, token, 2147483647), 0))


@triton.jit
def draw_kernel(temperature, counts, scores, winners, tokens, MOST_ROWS: tl.constexpr, PARTS: tl.constexpr,
                BLOCK_PARTS: tl.constexpr):  # fmt: skip
    """Program (sequence): the best of all parts behind its accepted drafts."""
    sequence = tl.program_id(0)
    count = tl.load(counts + sequence)
    if (tl.load(temperature + sequence) <= 0.0) | (count == 0):
        return
    part = tl.arange(0, BLOCK_PARTS)
    score = tl.load(scores + sequence * PARTS + part, mask=part < PARTS, other=float("-inf"))
    winner = tl.load(winners + sequence * PARTS + part, mask=part < PARTS, other=2147483647)
    largest = tl.max(score, 0)
    token = tl.min(tl.where(score == largest, winner, 2147483647), 0)
    # If rounding left nothing of p - q, the likeliest token stays.
    where = tokens + sequence.to(tl.int64) * MOST_ROWS + count - 1
    tl.store(where, token.to(tl.int64), mask=largest > float("-inf"))


def verify_sampling(
    logits: Tensor,
    row_start: Tensor,
    drafts: Tensor,
    temperature: Tensor,
    seed: Tensor,
    *,
    most_rows: int,
    draft_probabilities: Tensor | None = None,
    config: Config | None = None,
) -> Emitted:
    """What each sequence emits.

    Sequence i has rows `row_start[i] : row_start[i + 1]` (int32), at most `most_rows`, of logits [rows, vocab]; row r
    is followed by draft `drafts[r]` (int64), except a sequence's last, whose entry is not read. `draft_probabilities`
    [rows, vocab] (fp32) is the distribution each draft was drawn from; without it each is a point mass. `temperature`
    is [sequences] (fp32); `seed` [1] (int64) should differ from call to call.
    """
    check.strided("logits", logits, [None, None], [torch.float32, *check.HALVES])
    rows, vocab = logits.shape
    check.tensor("temperature", temperature, [None], [torch.float32], logits)
    sequences = temperature.shape[0]
    check.tensor("row_start", row_start, [sequences + 1], [torch.int32], logits)
    check.tensor("drafts", drafts, [rows], [torch.int64], logits)
    check.tensor("seed", seed, [1], [torch.int64], logits)
    check.require(most_rows > 0, "most_rows", f"is {most_rows}, should be at least 1")
    largest = rows + sequences * vocab
    check.require(largest < 2**31, "logits", f"{largest} random numbers are more than 2**31")
    if draft_probabilities is not None:
        check.tensor("draft_probabilities", draft_probabilities, [rows, vocab], [torch.float32], logits)
    device = logits.device
    config = config or configure("verify_sampling", machine_for(logits))
    part = config.tiles["BLOCK"] * 4
    parts = triton.cdiv(vocab, part)
    constants = dict(PARTS=parts, PART=part, STAGES=config.num_stages)
    reduced = dict(MOST_ROWS=most_rows, PARTS=parts, BLOCK_PARTS=triton.next_power_of_2(parts))
    peaks, sums = (torch.empty(rows, parts, device=device) for _ in range(2))
    best = torch.empty(rows, parts, dtype=torch.int32, device=device)
    scores = torch.empty(sequences, parts, device=device)
    winners = torch.empty(sequences, parts, dtype=torch.int32, device=device)
    log_sums = torch.empty(sequences, device=device)
    tokens = torch.full((sequences, most_rows), -1, dtype=torch.int64, device=device)
    counts = torch.empty(sequences, dtype=torch.int32, device=device)
    shape = logits.stride(0), vocab
    launch(
        logits_parts_kernel,
        (sequences, most_rows, parts),
        logits,
        row_start,
        temperature,
        peaks,
        sums,
        best,
        *shape,
        config=config,
        **constants,
    )
    chosen = drafts, draft_probabilities, seed
    launch(
        accept_kernel,
        (sequences,),
        logits,
        row_start,
        temperature,
        *chosen,
        peaks,
        sums,
        best,
        tokens,
        counts,
        log_sums,
        *shape,
        config=configure("verify_sampling_reduce", machine_for(logits)),
        **reduced,
    )
    launch(
        draw_parts_kernel,
        (sequences, parts),
        logits,
        row_start,
        temperature,
        *chosen,
        counts,
        log_sums,
        scores,
        winners,
        *shape,
        rows,
        config=config,
        **constants,
    )
    launch(
        draw_kernel,
        (sequences,),
        temperature,
        counts,
        scores,
        winners,
        tokens,
        config=configure("verify_sampling_reduce", machine_for(logits)),
        **reduced,
    )
    return Emitted(tokens, counts)


def verify_sampling_reference(
    logits: Tensor,
    row_start: Tensor,
    drafts: Tensor,
    temperature: Tensor,
    noise: Tensor,
    draft_probabilities: Tensor | None = None,
) -> list[list[int]]:
    """What each sequence emits, step by step in fp32.

    The `noise` is uniform: one number for each row's acceptance, then a [vocab] for each sequence's drawing.
    """
    rows, vocab = logits.shape
    drawing = -torch.log(-torch.log1p(-noise[rows:].double())).view(-1, vocab)
    emitted = []
    for i, (degree, first, end) in enumerate(
        zip(temperature.tolist(), row_start.tolist(), row_start.tolist()[1:], strict=False)
    ):
        tokens: list[int] = []
        for row in range(first, end):
            draft = int(drafts[row]) if row + 1 < end else None
            p = torch.softmax(logits[row].float() / degree, -1) if degree > 0 else logits[row].float()
            likeliest = int(logits[row].float().argmax())
            q = None if draft_probabilities is None else draft_probabilities[row]
            if draft is not None:
                accept = noise[row] * (1.0 if q is None else q[draft]) < p[draft] if degree > 0 else draft == likeliest
                if accept:
                    tokens.append(draft)
                    continue
                rest = p.clone() if q is None else (p - q).clamp(min=0)
                if q is None:
                    rest[draft] = 0
                p = rest
            tokens.append(likeliest if degree == 0 else int((p.double().log() + drawing[i]).argmax()))
            break
        emitted.append(tokens)
    return emitted


def verify_sampling_bytes(logits: Tensor, sequences: int, *, with_draft_probabilities: bool) -> int:
    """Bytes that must move: all logits once, the last row of each sequence again (its q too), which none fits in."""
    row = logits[0].nbytes + (4 * logits.shape[1] if with_draft_probabilities else 0)
    return logits.nbytes + sequences * row
