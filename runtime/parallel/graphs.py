"""How do the processes of a divided model replay their decode steps, each its own part of the same graph?

NCCL's collectives are captured like kernels (NCCL user guide, "Using NCCL with CUDA Graphs"), but a process that
replays waits for all others to do the same. So the processes capture in the same order and vote on the result, and what
each step is replayed by follows from what all of them were told of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.cuda_graphs import DecodeGraphs, decode_graphs
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.parallel.group import Group, GroupError


def captured(
    part: Decoder, group: Group, cache: KvCache, max_blocks: int, max_num_seqs: int, guesses: int
) -> tuple[DecodeGraphs | None, str | None]:
    """This process's graphs, and in words what was done, as `decode_graphs`; all processes call it, or none.

    What cannot be captured fails in all alike, and they go on kernel by kernel. Raises GroupError where a process is
    gone, or failed alone: the others then hold collectives of a step that it never began, and no sum is right again.
    """
    graphs, note = None, None
    try:
        # A list of its own: graphs that held the leader's cache would keep all processes from dropping theirs.
        graphs, note = decode_graphs(part, list(cache), max_blocks, max_num_seqs, guesses)
    except GroupError as error:  # a collective that cannot be captured; if a process is gone, the vote says so
        torch.cuda.empty_cache()
        note = f"decode without CUDA graphs: the capture failed ({error})"
    votes = group.votes(graphs is not None)
    if votes not in (0, group.size):
        why = note if graphs is None else "another process has its reason"
        raise GroupError(
            f"{group.size - votes} of {group.size} processes of this model could not capture its decode steps ({why}); "
            "give engine.max_num_seqs a smaller number, or the GPUs more free memory"
        )
    return graphs, note


def part_of_step(
    part: Decoder,
    graphs: DecodeGraphs | None,
    token_ids: Tensor,
    batch: RaggedBatch,
    cache: KvCache,
    logits_rows: Tensor,
) -> Tensor:
    """Logits [rows, vocab] of a step that lies on the host: replayed where `graphs` take it, else kernel by kernel."""
    if graphs is not None and graphs.takes(batch):
        return graphs.run(token_ids, batch, logits_rows)[1]
    device = part.device
    return part.forward(token_ids.to(device), batch.to(device), cache, logits_rows.to(device))
