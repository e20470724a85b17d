"""What does a process do that holds a part of somebody else's model?

`leader.divided` starts it with a scenario's file, the meeting, a rank, a device, a number of threads and its own
number.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from membound.kernels.dispatch import alike
from membound.roofline.errors import MemboundError
from membound.roofline.scenario import load_scenario
from membound.runtime.cuda_graphs import DecodeGraphs
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.engine import Runtime
from membound.runtime.orphans import end_with
from membound.runtime.parallel.graphs import captured, part_of_step
from membound.runtime.parallel.group import Group, GroupError, ready_file
from membound.runtime.parallel.steps import Command, receive


def follow(decoder: Decoder, group: Group) -> None:
    """Computes this process's part of every step that the leader tells of, until it says stop."""
    caches: dict[int, KvCache] = {}
    graphs: dict[int, DecodeGraphs | None] = {}
    while (message := receive(group)).command is not Command.STOP:
        match message.command:
            case Command.NEW_CACHE:
                caches[message.cache] = decoder.new_cache(*message.sizes)
            case Command.DROP_CACHE:
                graphs.pop(message.cache, None)
                del caches[message.cache]
            case Command.CAPTURE:
                graphs[message.cache], _ = captured(decoder, group, caches[message.cache], *message.sizes)
            case Command.FORWARD:
                assert message.token_ids is not None and message.batch is not None and message.logits_rows is not None
                replayed = graphs.get(message.cache)
                inputs = message.token_ids, message.batch, caches[message.cache], message.logits_rows
                part_of_step(decoder, replayed, *inputs)


def main(scenario: str, meeting: str, rank: str, device: str, threads: str, leader: str, rounds: str) -> None:
    """Builds this rank's part and follows the leader."""
    end_with(int(leader), Path(meeting).parent)
    torch.set_num_threads(int(threads))
    read = load_scenario(scenario)
    where = f"cuda:{rank}" if device.startswith("cuda") else device
    runtime = Runtime(where, kernels=alike(where, rounds))
    runtime.model(read)
    ready_file(Path(meeting), int(rank)).touch()
    group = Group(Path(meeting), int(rank), read.setup.parallel.tp, where)
    follow(runtime.part(read, group), group)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except GroupError as error:
        # Whoever leads removes the place where they met, unless it was killed.
        shutil.rmtree(Path(sys.argv[2]).parent, ignore_errors=True)
        sys.exit(str(error))
    except MemboundError as error:
        sys.exit(str(error))
