"""Processes of a divided model replay a step together, or none of them does.

Threads stand in for the processes, and for a capture the same function on the same buffers, called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from membound.kernels.reference import TorchKernels
from membound.roofline.parallel import Parallelism
from membound.runtime.cuda_graphs import DecodeGraphs
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.loading.weights import load_safetensors
from membound.runtime.parallel import graphs as parallel_graphs
from membound.runtime.parallel.follower import follow
from membound.runtime.parallel.group import Group, GroupError
from membound.runtime.parallel.leader import DividedDecoder
from membound.runtime.parallel.recipe import ShardRecipe
from membound.runtime.parallel.shards import shard_spec
from membound.runtime.parallel.steps import Command, Message, send
from membound.runtime.ragged import Part, ragged_batch
from membound.runtime.recipe import FormatRecipe

Captured = tuple[DecodeGraphs | None, str | None]
PROCESSES = Parallelism(tp=2)
KERNELS = TorchKernels()


class There:
    """Followers that have not ended."""

    alive = True

    def reason(self, patience_s: float = 0.0) -> None:
        return None


def part_of(folder: Path, group: Group) -> Decoder:
    spec, weights = load_safetensors(folder)
    recipe = ShardRecipe(FormatRecipe(KERNELS, "bf16"), group, spec, PROCESSES)
    return Decoder(shard_spec(spec, PROCESSES), weights, KERNELS, recipe, replayed=False)


@contextmanager
def divided(folder: Path, meeting: Path) -> Iterator[tuple[DividedDecoder, Future[None]]]:
    """The leader of two, and what becomes of the other; both believe that they are on a GPU when they capture."""
    with ThreadPoolExecutor(1) as others:

        def other() -> None:
            group = Group(meeting, 1, 2, "cpu", 20.0)
            follow(part_of(folder, group), group)

        ended = others.submit(other)
        group = Group(meeting, 0, 2, "cpu", 20.0)
        spec, _ = load_safetensors(folder)
        leader = DividedDecoder(spec, part_of(folder, group), group, There())  # type: ignore[arg-type]
        leader.device = torch.device("cuda")
        try:
            yield leader, ended
        finally:
            if leader.usable:
                send(group, Message(Command.STOP))
        if leader.usable:
            ended.result(20.0)


class Stand:
    """In place of `decode_graphs`: graphs of one and two sequences that count their replays by rank."""

    def __init__(self, fails: Callable[[int], Exception | None] = lambda rank: None) -> None:
        self.fails = fails
        self.replays = [0, 0]

    def __call__(self, part: Decoder, kv: KvCache, max_blocks: int, max_num_seqs: int, guesses: int) -> Captured:
        rank = part.blocks[0].mixer.o.group.rank  # type: ignore[union-attr]

        def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
            run()

            def replay() -> Tensor:
                self.replays[rank] += 1
                return run()

            return replay

        graphs = DecodeGraphs(part, kv, max_blocks, range(1, max_num_seqs + 1), capture, exact=True)
        if (error := self.fails(rank)) is not None:
            if isinstance(error, GroupError):
                raise error
            return None, f"the capture failed ({error})"
        return graphs, "by graphs"


def steps(decoder: DividedDecoder, cache: KvCache) -> list[Tensor]:
    """The logits of two prompts, and of three tokens behind each."""
    parts = [[Part(0, 5, [1]), Part(0, 9, [2])], *([Part(5 + i, 1, [1]), Part(9 + i, 1, [2])] for i in range(3))]
    logits = []
    for step, both in enumerate(parts):
        batch = ragged_batch(both, 16)
        ids = torch.arange(batch.num_tokens) + 3 * step
        logits.append(decoder.forward(ids, batch, cache, batch.query_start[1:].long() - 1).clone())
    return logits


def test_all_processes_replay_the_decode_steps_and_get_what_they_compute_kernel_by_kernel(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand()
    monkeypatch.setattr(parallel_graphs, "decode_graphs", stand)
    with divided(reference / "tiny_llama3", tmp_path / "meeting") as (leader, _):
        plain, captured = leader.new_cache(4, 16), leader.new_cache(4, 16)
        assert leader.capture(captured, 2, 2, 0) == "by graphs"
        for found, expected in zip(steps(leader, captured), steps(leader, plain), strict=True):
            torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
        assert stand.replays == [3, 3]
        del captured
        assert not leader._graphs, "they go with the cache, which the others drop with the next message"
        assert leader.usable


@pytest.mark.parametrize("failing", [0, 1])
def test_a_capture_that_fails_in_one_process_alone_is_said_and_its_group_used_no_more(
    failing: int, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(lambda rank: RuntimeError("out of memory") if rank == failing else None)
    monkeypatch.setattr(parallel_graphs, "decode_graphs", stand)
    why = r"\(the capture failed \(out of memory\)\)" if failing == 0 else "another process has its reason"
    with divided(reference / "tiny_llama3", tmp_path / "meeting") as (leader, ended):
        cache = leader.new_cache(4, 16)
        with pytest.raises(GroupError, match=f"1 of 2 processes of this model could not capture .*{why}"):
            leader.capture(cache, 2, 2, 0)
        assert not leader.usable and isinstance(ended.exception(20.0), GroupError)


def test_a_collective_that_cannot_be_captured_leaves_the_model_in_order(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_graphs, "decode_graphs", Stand(lambda rank: GroupError("not supported in capture")))
    with divided(reference / "tiny_llama3", tmp_path / "meeting") as (leader, _):
        cache = leader.new_cache(4, 16)
        assert leader.capture(cache, 2, 2, 0) == (
            "decode without CUDA graphs: the capture failed (not supported in capture)"
        )
        assert len(steps(leader, cache)) == 4


def test_without_a_gpu_nobody_is_told_to_capture(reference: Path, tmp_path: Path) -> None:
    with divided(reference / "tiny_llama3", tmp_path / "meeting") as (leader, _):
        leader.device = torch.device("cpu")
        assert leader.capture(leader.new_cache(4, 16), 2, 2, 0) is None
