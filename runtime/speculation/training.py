"""How are draft heads trained on what a model wrote, on a CPU and by the clock?

Both heads learn the model's own distributions over the tokens that it writes most: the divergence of a head's guess
from what the model, at that position, went on to say. The rate of learning falls to zero with the time that is left, so
that a run of any length ends well; a run that was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from membound.roofline.errors import MemboundError
from membound.roofline.models import GatedFfn, GroupedQueryAttention, ModelSpec
from membound.roofline.progress import Progress
from membound.roofline.speculation.draft_models import one_layer
from membound.runtime.loading.weights import Weights
from membound.runtime.rope import rope_tables
from membound.runtime.speculation.corpus import Text
from membound.runtime.speculation.heads import Head

GUESSABLE = 4096  # tokens that a head can guess
HEADS = 4
BATCH = 8  # texts of a step
RATES = {"medusa": 1e-3, "eagle": 6e-4}
NOISE = 0.1  # of a state's size is added to it, as the states that EAGLE continues later are not exact
STATE_WEIGHT = 0.2  # of the error of predicted states beside that of their guesses
CHECKPOINT_S = 60.0
HELD_OUT = 24  # texts that measure and do not train


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained for how long, and where its checkpoint and its log lie."""

    kind: str
    seconds: float
    folder: Path
    seed: int = 0


def train(
    plan: TrainingPlan,
    spec: ModelSpec,
    weights: Weights,
    texts: list[Text],
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Head:
    """Trains a head for `plan.seconds` of its own time; raises MemboundError where the model or the texts do not do."""
    if len(texts) < 2 * HELD_OUT:
        raise MemboundError(f"{len(texts)} texts are too few to train on; at least {2 * HELD_OUT} are needed")
    held_out, learnt = texts[:HELD_OUT], texts[HELD_OUT:]
    tokens = most_written(learnt, spec.vocab)
    rows = weights.lm_head[tokens].float()
    module = _MedusaModule(spec, rows) if plan.kind == "medusa" else _EagleModule(spec, weights, rows)
    run = _Run(plan, module, _fingerprint(texts), clock)
    while (left := 1 - run.elapsed_s / plan.seconds) > 0:
        for batch in _batches(learnt, run.generator):
            left = 1 - run.elapsed_s / plan.seconds
            if left <= 0:
                break
            loss = run.step(batch, RATES[plan.kind] * left)
            progress(1 - left, f"{plan.kind}: epoch {run.epoch + 1}, loss {loss:.3f}")
        run.epoch += 1
        run.log(agreement=agreement(module, held_out, tokens))
    return Head(plan.kind, {"tokens": tokens.int()} | module.exported(), {})


def _fingerprint(texts: list[Text]) -> str:
    return hashlib.sha256(torch.cat([text.token_ids for text in texts]).numpy().tobytes()).hexdigest()


def most_written(texts: list[Text], vocab: int) -> Tensor:
    """The tokens that stand most often behind a prompt, [GUESSABLE] in the order of their numbers."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text.token_ids[text.prompt_tokens :], minlength=vocab)
    return counts.topk(min(GUESSABLE, vocab)).indices.sort().values


@torch.no_grad()
def agreement(module: _Module, texts: list[Text], tokens: Tensor) -> list[float]:
    """How often a head's best guess is what the model wrote, at each position ahead, all before it given."""
    hits = torch.zeros(HEADS)
    counts = torch.zeros(HEADS)
    for batch in _batches(texts, None):
        for ahead, (logits, wrote) in enumerate(module.guesses(batch)):
            known = wrote >= 0
            hits[ahead] += (tokens[logits.argmax(-1)] == wrote)[known].sum()
            counts[ahead] += known.sum()
    return (hits / counts.clamp(min=1))[counts > 0].tolist()


@dataclass(frozen=True)
class _Batch:
    """Texts side by side, padded: `states[:, t]` is the model's state at token t, which wrote token t + 1."""

    token_ids: Tensor  # [texts, length + 1]
    states: Tensor  # [texts, length, hidden] fp32
    written: Tensor  # [texts, length] bool: token t + 1 was written by the model, not given


def _batches(texts: list[Text], generator: torch.Generator | None) -> Iterator[_Batch]:
    order = range(len(texts)) if generator is None else torch.randperm(len(texts), generator=generator).tolist()
    for start in range(0, len(order), BATCH):
        chosen = [texts[index] for index in order[start : start + BATCH]]
        length = max(text.hidden.shape[0] for text in chosen)
        ids = torch.zeros(len(chosen), length + 1, dtype=torch.int64)
        states = torch.zeros(len(chosen), length, chosen[0].hidden.shape[1])
        written = torch.zeros(len(chosen), length, dtype=torch.bool)
        for row, text in enumerate(chosen):
            size = text.hidden.shape[0]
            ids[row, : size + 1] = text.token_ids[: size + 1]
            states[row, :size] = text.hidden.float()
            written[row, text.prompt_tokens - 1 : size] = True
        yield _Batch(ids, states, written)


class _Module(torch.nn.Module):
    """A head while it learns."""

    def loss(self, batch: _Batch, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    def guesses(self, batch: _Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """For each position ahead the logits of guesses, and the tokens that were written there, -1 for none."""
        raise NotImplementedError

    def exported(self) -> dict[str, Tensor]:
        """The tensors of a `Head`."""
        raise NotImplementedError


class _MedusaModule(_Module):
    def __init__(self, spec: ModelSpec, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.weights = torch.nn.ParameterList(torch.zeros(spec.hidden, spec.hidden) for _ in range(HEADS))

    def _logits(self, states: Tensor, head: int) -> Tensor:
        return (states + functional.silu(states @ self.weights[head].T)) @ self.rows.T

    def loss(self, batch: _Batch, generator: torch.Generator) -> Tensor:
        total = torch.zeros(())
        for head in range(HEADS):
            ahead = head + 1
            known = batch.written[:, :-ahead] & batch.written[:, ahead:]
            said = batch.states[:, ahead:][known] @ self.rows.T
            total = total + _divergence(self._logits(batch.states[:, :-ahead][known], head), said)
        return total / HEADS

    def guesses(self, batch: _Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for head in range(HEADS):
            ahead = head + 1
            known = batch.written[:, :-ahead] & batch.written[:, ahead:]
            wrote = batch.token_ids[:, 1 + ahead :]
            yield self._logits(batch.states[:, :-ahead][known], head), wrote[known]

    def exported(self) -> dict[str, Tensor]:
        return {f"heads.{index}": weight.detach() for index, weight in enumerate(self.weights)}


class _EagleModule(_Module):
    """The layer begins as the model's last one, and the join as the model's own state."""

    def __init__(self, spec: ModelSpec, weights: Weights, rows: Tensor) -> None:
        super().__init__()
        attention, ffn = spec.stack[-1]
        if not isinstance(attention, GroupedQueryAttention) or not isinstance(ffn, GatedFfn) or not _is_plain(weights):
            raise MemboundError(
                f"an EAGLE head is trained as a layer with grouped-query attention and a gated network, without biases "
                f"and norms of heads, which those of '{spec.name}' are not; train kind 'medusa'"
            )
        self.heads, self.kv_heads, self.head_dim = attention.heads, attention.kv_heads, attention.head_dim
        self.eps = spec.norm_eps
        self.rows = rows
        self.embed = weights.embed
        width, factors = attention.head_dim, weights.rope_factors
        self.rope = rope_tables(one_layer(spec, dense=True), weights.arithmetic, width, width, factors=factors)
        last = {name: tensor.float().clone() for name, tensor in weights.layers[-1].items()}
        ones = {name: torch.ones(spec.hidden) for name in ("embed_norm", "hidden_norm")}
        join = torch.cat([torch.zeros(spec.hidden, spec.hidden), torch.eye(spec.hidden)], dim=1)
        own = last | ones | {"join": join, "final_norm": weights.final_norm.float().clone()}
        self.own = torch.nn.ParameterDict({name: torch.nn.Parameter(tensor) for name, tensor in own.items()})

    def forward(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """The states [texts, length, hidden] that follow `states` and the tokens behind each."""
        own = self.own
        embedded = self._norm(self.embed[token_ids].float(), "embed_norm")
        x = torch.cat([embedded, self._norm(states, "hidden_norm")], dim=-1) @ own["join"].T
        x = x + self._attend(self._norm(x, "mixer_norm"))
        gate, up = (self._norm(x, "ffn_norm") @ own["gate_up"].T).chunk(2, dim=-1)
        x = x + (functional.silu(gate) * up) @ own["down"].T
        return self._norm(x, "final_norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.own[name]

    def _attend(self, x: Tensor) -> Tensor:
        texts, length, _ = x.shape
        parts = (x @ self.own["qkv"].T).view(texts, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cos, sin = self.rope.cos[:length], self.rope.sin[:length]
        q, k = (_rotated(part, cos, sin) for part in (q, k))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(texts, length, -1) @ self.own["o"].T

    def loss(self, batch: _Batch, generator: torch.Generator) -> Tensor:
        size = batch.states.square().mean().sqrt()
        noise = (torch.rand(batch.states.shape, generator=generator) * 2 - 1) * NOISE * size
        states = batch.states[:, :-1] + noise[:, :-1]
        predicted = self(states, batch.token_ids[:, 1:-1])
        known, meant = batch.written[:, 1:], batch.states[:, 1:]
        error = functional.smooth_l1_loss(predicted[known] / size, meant[known] / size)
        guessed = _divergence(predicted[known] @ self.rows.T, meant[known] @ self.rows.T)
        return guessed + STATE_WEIGHT * error

    def guesses(self, batch: _Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Position by position from the states that the layer itself predicted, all texts at once."""
        states, ids, known = batch.states[:, :-1], batch.token_ids, batch.written
        for ahead in range(1, HEADS + 1):
            states = self(states, ids[:, ahead:-1])
            seen = known[:, :-ahead] & known[:, ahead:]
            yield states[seen] @ self.rows.T, ids[:, 1 + ahead :][seen]
            states = states[:, :-1]

    def exported(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.own.items()}


def _is_plain(weights: Weights) -> bool:
    return set(weights.layers[-1]) == {"mixer_norm", "qkv", "o", "ffn_norm", "gate_up", "down"}


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _divergence(guessed: Tensor, said: Tensor) -> Tensor:
    """KL divergence in nats of guessed from said logits [positions, guessable], the mean over positions."""
    return functional.kl_div(
        torch.log_softmax(guessed, -1), torch.log_softmax(said, -1), reduction="batchmean", log_target=True
    )


class _Run:
    """The state of a training that can be stopped at any time."""

    def __init__(self, plan: TrainingPlan, module: _Module, texts: str, clock: Callable[[], float]) -> None:
        self.plan = plan
        self.module = module
        self.epoch = self.steps = 0
        self.generator = torch.Generator().manual_seed(plan.seed)
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=RATES[plan.kind], weight_decay=0.0)
        self._clock = clock
        self._texts = texts
        self._before_s = self._cpu_before_s = 0.0
        self._losses: list[float] = []
        self._checkpoint = plan.folder / f"{plan.kind}.checkpoint"
        if self._checkpoint.exists():
            self._resume()
        self._start_s = self._saved_s = clock()
        self._cpu_start_s = time.process_time()

    @property
    def elapsed_s(self) -> float:
        return self._before_s + self._clock() - self._start_s

    def step(self, batch: _Batch, rate: float) -> float:
        """Learns from a batch and returns its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        loss = self.module.loss(batch, self.generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self._optimizer.step()
        self.steps += 1
        self._losses.append(loss.item())
        if self._clock() - self._saved_s > CHECKPOINT_S:
            self._save()
        return self._losses[-1]

    def log(self, agreement: list[float]) -> None:
        """Adds a line about the epoch that has ended."""
        losses, self._losses = self._losses, []
        line = {
            "kind": self.plan.kind,
            "epoch": self.epoch,
            "steps": self.steps,
            "seconds": round(self.elapsed_s, 1),
            "cpu_seconds": round(self._cpu_before_s + time.process_time() - self._cpu_start_s, 1),
            "loss": round(sum(losses) / max(len(losses), 1), 4),
            "agreement_by_position": [round(share, 4) for share in agreement],
        }
        with (self.plan.folder / f"{self.plan.kind}.log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._save()

    def _save(self) -> None:
        partial = self._checkpoint.with_suffix(".partial")
        state = {
            "module": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "texts": self._texts,
            "epoch": self.epoch,
            "steps": self.steps,
            "elapsed_s": self.elapsed_s,
            "cpu_s": self._cpu_before_s + time.process_time() - self._cpu_start_s,
        }
        torch.save(state, partial)
        partial.replace(self._checkpoint)
        self._saved_s = self._clock()

    def _resume(self) -> None:
        state = torch.load(self._checkpoint)
        if state["texts"] != self._texts:
            raise MemboundError(
                f"'{self._checkpoint}' was trained on other texts; remove it, or give another folder to train in"
            )
        self.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.epoch, self.steps = state["epoch"], state["steps"]
        self._before_s, self._cpu_before_s = state["elapsed_s"], state["cpu_s"]
