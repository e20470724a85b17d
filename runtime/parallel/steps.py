"""How does the leader of a divided model tell the others what to compute? As integers, in two messages a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.parallel.group import Group

HEADER_FIELDS = 9
_INT32 = ("query_start", "context_len", "block_table")


class Command(IntEnum):
    """What a follower does next."""

    STOP = 0
    NEW_CACHE = 1
    DROP_CACHE = 2
    FORWARD = 3
    CAPTURE = 4


@dataclass(frozen=True)
class Message:
    """A command on the cache number `cache`, and what it needs.

    A step's tensors, or as `sizes` a new cache's blocks, block size and seats, or the blocks a sequence, sequences and
    guesses of the steps to capture.
    """

    command: Command
    cache: int = 0
    sizes: tuple[int, int, int] = (0, 0, 0)
    token_ids: Tensor | None = None
    batch: RaggedBatch | None = None
    logits_rows: Tensor | None = None


def send(group: Group, message: Message) -> None:
    """Tells all followers."""
    header = torch.zeros(HEADER_FIELDS, dtype=torch.int64)
    header[0], header[1] = int(message.command), message.cache
    if message.command is not Command.FORWARD:
        header[2:5] = torch.tensor(message.sizes)
        group.broadcast(header)
        return
    batch = message.batch
    assert batch is not None and message.token_ids is not None and message.logits_rows is not None, "a step has them"
    optional = [part for part in (batch.seats, batch.tree) if part is not None]
    table = batch.block_table
    header[2:] = torch.tensor(
        [
            batch.num_tokens,
            batch.num_sequences,
            table.shape[1],
            message.logits_rows.shape[0],
            -1 if batch.most_queries is None else batch.most_queries,
            int(batch.seats is not None),
            int(batch.tree is not None),
        ]
    )
    group.broadcast(header)
    parts = [message.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_len, table.flatten()]
    group.broadcast(torch.cat([part.cpu().long() for part in (*parts, message.logits_rows, *optional)]))


def receive(group: Group) -> Message:
    """Waits for what the leader says; raises GroupError where it is gone."""
    header = group.broadcast(torch.zeros(HEADER_FIELDS, dtype=torch.int64)).tolist()
    command, cache, *rest = header
    if command != Command.FORWARD:
        first, second, third = rest[:3]
        return Message(Command(command), cache, (first, second, third))
    tokens, sequences, width, rows, most, seated, treed = rest
    sizes = {
        "token_ids": tokens,
        "positions": tokens,
        "slots": tokens,
        "query_start": sequences + 1,
        "context_len": sequences,
        "block_table": sequences * width,
        "logits_rows": rows,
    }
    sizes |= {"seats": sequences} if seated else {}
    sizes |= {"tree": tokens} if treed else {}
    content = group.broadcast(torch.zeros(sum(sizes.values()), dtype=torch.int64))
    fields = dict(zip(sizes, content.split(list(sizes.values())), strict=True))
    token_ids, logits_rows = fields.pop("token_ids"), fields.pop("logits_rows")
    fields |= {name: fields[name].int() for name in _INT32}
    fields["block_table"] = fields["block_table"].view(sequences, width)
    batch = RaggedBatch(**fields, most_queries=None if most < 0 else most)
    return Message(Command.FORWARD, cache, token_ids=token_ids, batch=batch, logits_rows=logits_rows)
