"""How does one layer continue the model's own hidden states? (EAGLE, Li et al., 2024; its dynamic tree, EAGLE-2)

From the model's normed hidden state at a position and the token behind it the layer predicts the next hidden state, and
the model's lm_head turns that into guesses; a guess and its predicted state are continued in turn. The layer attends to
its own K and V of all positions, in blocks with the numbers of the model's.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import ModelSpec
from membound.roofline.speculation.draft_models import one_layer
from membound.roofline.speculation.token_tree import MOST_BRANCHES
from membound.runtime.cuda_graphs import DecodeGraphs, DraftStep, decode_graphs
from membound.runtime.decoder import Decoder, Hidden, KvCache
from membound.runtime.linear import KernelLinear
from membound.runtime.loading.weights import Weights
from membound.runtime.ragged import MOST_IN_TREE, Part, ragged_batch
from membound.runtime.speculation.base import Paths
from membound.runtime.speculation.heads import Head
from membound.runtime.speculation.trees import Guess, best_draft
from membound.simulator.scheduling.drafter import Room
from membound.simulator.scheduling.request import Draft, Sequence, Step

_OWN = ("tokens", "join", "embed_norm", "hidden_norm", "final_norm")


class FeatureHead:
    """The layer, with the model's embedding, and the rows of its lm_head that can be guessed.

    A module for multi-token prediction is the same, with a layer as the model's own, experts included, rather than a
    `dense` one (DeepSeek-V3, 2024, section 2.2).
    """

    def __init__(self, head: Head, spec: ModelSpec, weights: Weights, kernels: Kernels, *, dense: bool = True) -> None:
        device = weights.embed.device
        own = {name: head.tensors[name].to(device) for name in _OWN}
        layer = {name: tensor.to(device) for name, tensor in head.tensors.items() if name not in _OWN}
        self.tokens = head.tokens.to(device)
        self.kernels = kernels
        self.eps = spec.norm_eps
        self.embed = weights.embed
        self.embed_norm, self.hidden_norm = own["embed_norm"], own["hidden_norm"]
        self.join = KernelLinear(kernels, kernels.pack(own["join"], "bf16"))
        guessable = weights.lm_head[self.tokens]
        drafting = Weights(
            embed=weights.embed,
            layers=(layer,),
            final_norm=own["final_norm"],
            lm_head=guessable,
            origin="draft head",
            rope_factors=weights.rope_factors,
            arithmetic=weights.arithmetic,
        )
        self.layer = Decoder(one_layer(spec, dense=dense), drafting, kernels)

    def new_cache(self, num_blocks: int, block_size: int) -> KvCache:
        return self.layer.new_cache(num_blocks, block_size)

    @torch.inference_mode()
    def __call__(self, normed: Tensor, token_ids: Tensor, batch: RaggedBatch, cache: KvCache) -> Hidden:
        """The states [tokens, hidden] that follow states `normed` and the tokens behind each."""
        embedded = self.embed[token_ids].to(self.kernels.activation_dtype)
        parts = (embedded, self.embed_norm), (normed.to(embedded.dtype), self.hidden_norm)
        joined = torch.cat([self.kernels.rms_norm(x, norm, self.eps) for x, norm in parts], dim=-1)
        return self.layer.continued(self.join(joined), batch, cache)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [rows, guessable]."""
        return self.layer.logits(normed)


@dataclass
class _Unread:
    """Hidden states of a sequence from position `start` on that the layer has not read yet."""

    start: int
    states: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + sum(part.shape[0] for part in self.states)


class EagleProposer:
    """A tree of up to `guesses` guesses, up to `depth` behind one another, for each sequence.

    At each depth the `branches` most likely guesses are continued, each by its most likely tokens; of all guesses the
    most likely ones are verified. A single branch is a chain.
    """

    reads_hidden = True

    def __init__(
        self, head: FeatureHead, num_blocks: int, block_size: int, depth: int, guesses: int, branches: int
    ) -> None:
        self.head = head
        self.cache = head.new_cache(num_blocks, block_size)
        self.block_size = block_size
        self.depth = depth
        self.guesses = guesses
        # A pass computes the guesses that were continued so far once more, rather than mask them in its cache.
        self.branches = min(branches, (MOST_IN_TREE - 1) // max(depth - 1, 1))
        self.candidates = 1 if self.branches == 1 else min(MOST_BRANCHES, guesses, len(head.tokens))
        self.computed_guesses = max(guesses, self.branches * (depth - 1), 1)
        self.graphs: DecodeGraphs | None = None
        self._unread: dict[int, _Unread] = {}

    def capture(self, max_blocks: int, max_num_seqs: int) -> str | None:
        """What was accepted is read in one kind of step, and there is one for the guesses of each depth."""

        def continues(states: Tensor, token_ids: Tensor, batch: RaggedBatch) -> Tensor:
            return self.head(states, token_ids, batch, self.cache).normed

        tokens = (1, self.depth + 1, *(self.branches * depth for depth in range(1, self.depth)))
        step = DraftStep(tokens, continues=continues)
        self.graphs, note = decode_graphs(self.head.layer, self.cache, max_blocks, max_num_seqs, drafting=step)
        return note

    def draft(self, sequences: list[Sequence], rooms: list[Room]) -> list[Draft]:
        growing = [
            _Growing(sequence, room, max(0, min(self.depth, room.depth)))
            for sequence, room in zip(sequences, rooms, strict=True)
            if sequence.id in self._unread and self._unread[sequence.id].end == sequence.computed and room.chain > 0
        ]
        if growing:
            self._read(growing)
        for depth in range(1, self.depth):
            deeper = [one for one in growing if depth < one.depth and self._fits(one)]
            if deeper:
                self._continue(deeper)
        by_id = {one.sequence.id: one for one in growing}
        return [
            by_id[seq.id].draft(min(self.guesses, room.guesses), self.branches == 1) if seq.id in by_id else Draft()
            for seq, room in zip(sequences, rooms, strict=True)
        ]

    def drawn_from(self, sequence: int) -> Tensor | None:
        return None

    def observe(self, step: Step, live: Container[int], normed: Tensor | None, paths: Paths) -> None:
        """Keeps the hidden states of what was computed for good: prompts, newest tokens and accepted guesses."""
        assert normed is not None, "it reads hidden states"
        self._unread = {id: unread for id, unread in self._unread.items() if id in live}
        first = 0
        for work in step.work:
            known = work.tokens - len(work.drafts)
            rows = [*range(known), *(known + guess for guess in paths.get(work.sequence, ()))]
            unread = self._unread.get(work.sequence)
            if unread is None or unread.end != work.start:
                unread = self._unread[work.sequence] = _Unread(work.start)
            unread.states.append(normed[torch.tensor(rows, device=normed.device) + first])
            first += work.tokens

    def _fits(self, one: _Growing) -> bool:
        """Whether the guesses that the next pass computes have blocks."""
        return len(one.continued) + self.branches <= one.room.guesses

    def _read(self, growing: list[_Growing]) -> None:
        """Reads what the model has computed of each sequence, and guesses what comes behind its newest token."""
        parts, states, token_ids = [], [], []
        for one in growing:
            unread, ids = self._unread[one.sequence.id], one.sequence.token_ids
            assert ids is not None, "the runtime needs the tokens"
            parts.append(Part(unread.start, unread.end - unread.start, one.sequence.blocks))
            states += unread.states
            token_ids += ids[unread.start + 1 : unread.end + 1]
            self._unread[one.sequence.id] = _Unread(unread.end)
        found, batch = self._pass(torch.cat(states), token_ids, parts)
        last = (batch.query_start[1:] - 1).long()
        self._add(growing, [[-1]] * len(growing), found[last.to(found.device)])

    def _continue(self, growing: list[_Growing]) -> None:
        """Continues the most likely of each sequence's newest guesses."""
        parts, states, token_ids, chosen = [], [], [], []
        rows: list[int] = []
        first = 0
        for one in growing:
            best = sorted(one.newest, key=lambda index: (-one.guesses[index].chance, index))[: self.branches]
            one.continued += best
            place = {index: i for i, index in enumerate(one.continued)} | {-1: -1}
            count = len(one.continued)
            parents = tuple(place[one.guesses[index].parent] for index in one.continued)
            parts.append(_forest(one.sequence, parents))
            states.append(torch.stack([one.states[one.guesses[index].parent] for index in one.continued]))
            token_ids += [one.guesses[index].token for index in one.continued]
            chosen.append(best)
            rows += range(first + count - len(best), first + count)
            first += count
        found, _ = self._pass(torch.cat(states), token_ids, parts)
        self._add(growing, chosen, found[torch.tensor(rows, device=found.device)])

    def _pass(self, states: Tensor, token_ids: list[int], parts: list[Part]) -> tuple[Tensor, RaggedBatch]:
        """The states that follow, valid until the next pass, and the batch on the host."""
        ids, batch, device = torch.tensor(token_ids), ragged_batch(parts, self.block_size), states.device
        if self.graphs is not None and self.graphs.takes(batch):
            return self.graphs.states(ids, batch, states), batch
        return self.head(states, ids.to(device), batch.to(device), self.cache).normed, batch

    def _add(self, growing: list[_Growing], parents: list[list[int]], states: Tensor) -> None:
        """Adds the best guesses behind each of `parents`, whose predicted states are `states` [rows, hidden]."""
        best = torch.softmax(self.head.logits(states), dim=-1).topk(self.candidates, dim=-1)
        chances, tokens = best.values.tolist(), self.head.tokens[best.indices].tolist()
        row = 0
        for one, listed in zip(growing, parents, strict=True):
            one.newest = []
            for parent in listed:
                one.states[parent] = states[row]
                above = 1.0 if parent < 0 else one.guesses[parent].chance
                for token, chance in zip(tokens[row], chances[row], strict=True):
                    one.newest.append(len(one.guesses))
                    one.guesses.append(Guess(token, above * chance, parent))
                row += 1


class _Growing:
    """The tree of a sequence while it is drafted."""

    def __init__(self, sequence: Sequence, room: Room, depth: int) -> None:
        self.sequence = sequence
        self.room = room
        self.depth = depth
        self.guesses: list[Guess] = []
        self.newest: list[int] = []  # those of the last depth
        self.continued: list[int] = []
        self.states: dict[int, Tensor] = {}  # the state that predicts what follows a guess

    def draft(self, count: int, is_chain: bool) -> Draft:
        found = best_draft(self.guesses, count)
        return Draft(found.tokens) if is_chain else found


def _forest(sequence: Sequence, parents: tuple[int, ...]) -> Part:
    """Guesses whose pairs of state and token begin at the position of the newest token; roots see only what is read."""
    return Part(sequence.computed, len(parents), sequence.blocks, 0, len(parents), parents)
