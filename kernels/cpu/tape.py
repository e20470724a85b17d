"""How do the operations of a step run again without the interpreter between them?

They run once as ever and are recorded: which function of the library, with which arguments. A tape then runs them all
in one call. What they leave to each other lies in memory that stays where it is, and what changes from step to step,
where tokens live and how many there are, in one structure that they all point at.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from ctypes import POINTER, Structure, addressof, c_double, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from membound.kernels.base import RaggedBatch

LARGEST_TREE = 64


class BatchFields(Structure):
    """The addresses in a ragged batch as the C++ sees them (batch.h)."""

    _fields_ = [
        (name, c_void_p)
        for name in ("positions", "slots", "query_start", "context_len", "block_table", "tree", "seats")
    ]
    _fields_ += [(name, c_int64) for name in ("tokens", "sequences", "table_stride")]

    def read(self, batch: RaggedBatch) -> None:
        """Takes the addresses of `batch`, which must stay while they are used."""
        table = batch.block_table
        if table.dtype is not torch.int32 or table.stride(1) != 1:
            raise TypeError("a block table holds int32, a sequence a row")
        self.positions = _pointer(batch.positions, torch.int64)
        self.slots = _pointer(batch.slots, torch.int64)
        self.query_start = _pointer(batch.query_start, torch.int32)
        self.context_len = _pointer(batch.context_len, torch.int32)
        self.block_table = table.data_ptr()
        self.tree = _tree_pointer(batch)
        self.seats = None if batch.seats is None else _pointer(batch.seats, torch.int64)
        self.tokens, self.sequences = batch.num_tokens, batch.num_sequences
        self.table_stride = table.stride(0)


class Scratch:
    """Memory for what operations leave to each other, given out again once no tensor lies in it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """A contiguous fp32 tensor."""
        size = 1 << (math.prod(shape) - 1).bit_length()
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else torch.empty(size)
        # Tensors in it, views too, keep this array; when the last one is gone, so is the array.
        lease = memory.numpy()
        weakref.finalize(lease, free.append, memory)
        return torch.from_numpy(lease)[: math.prod(shape)].view(shape)


class Tape:
    """Operations that were recorded on a `batch`, for steps of up to `rows` tokens; with `rows` None as they were.

    `problem` says why it cannot be played, where something was computed that is none of the library's operations.
    """

    def __init__(
        self, replay: Any, scratch: Scratch, rows: int | None, batch: RaggedBatch | None, computed: bool
    ) -> None:
        self.rows = rows
        self.computed = computed
        self._room = rows
        self.problem: str | None = None
        self.batch = BatchFields()
        self._replay = replay
        self._scratch = scratch
        self._batch: RaggedBatch | None = None
        if batch is not None:
            self.fields(batch)
        self._recorded: list[tuple[int, Structure]] = []
        self._kept: list[object] = []
        self._operations: ctypes.Array[_Operation] | None = None

    def __len__(self) -> int:
        return len(self._recorded)

    def add(self, function: Any, arguments: Structure, kept: tuple[object, ...]) -> None:
        """Records a call of `function`; `kept` is what its arguments point at, besides activations and KV blocks."""
        address = ctypes.cast(function, c_void_p).value
        assert address is not None, "a function has an address"
        self._recorded.append((address, arguments))
        self._kept.append(kept)

    def fields(self, batch: RaggedBatch) -> BatchFields:
        """Where the recorded operations find the batch, which must be the same for all of them."""
        if self._batch is None:
            self._batch = batch
            self.batch.read(batch)
        elif self._batch is not batch:
            self.problem = "its operations belong to several batches"
            other = BatchFields()
            other.read(batch)
            self._kept.append((other, batch))  # what runs now must still find its own batch
            return other
        return self.batch

    @property
    def batch_address(self) -> int:
        """Where a replay finds how many tokens it has."""
        return addressof(self.batch)

    def rows_each(self, count: int) -> int | None:
        """How many of an operation's `count` rows each token has; None where it always works on so many."""
        if self.rows is None:
            return None
        assert self._batch is not None, "a tape for other steps begins with one"
        each, rest = divmod(count, self._batch.num_tokens)
        if rest:
            self.problem = "an operation works on other rows than the tokens"
            return None
        return each

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for an operation's result."""
        if self.rows is None or self._batch is None or shape[0] % self._batch.num_tokens:
            return self._scratch.empty(shape)
        each = shape[0] // self._batch.num_tokens
        return self._scratch.empty(((self._room or 0) * each, *shape[1:]))[: shape[0]]

    def finish(self) -> None:
        """Ends the recording."""
        self._batch = None
        entries = [_Operation(address, addressof(arguments)) for address, arguments in self._recorded]
        self._operations = (_Operation * len(entries))(*entries)

    def play(self, batch: RaggedBatch | None = None) -> None:
        """Runs the operations; with a `batch` for its tokens, which may be others than were recorded."""
        if batch is not None:
            assert self.rows is not None and batch.num_tokens <= self.rows, "the caller has checked it"
            self.batch.read(batch)
        self._replay(self._operations, len(self._recorded), None, torch.get_num_threads())

    def timed_s(self) -> list[float]:
        """Runs the operations and returns the seconds that each took."""
        seconds = (c_double * len(self._recorded))()
        self._replay(self._operations, len(self._recorded), seconds, torch.get_num_threads())
        return list(seconds)


class Watch(TorchDispatchMode):
    """Notes on a tape what torch computes while it is recorded: that would be missing when it is played."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping Dynamo out would load it, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func._schema.name in _HARMLESS):
            self.tape.problem = f"{func} is computed by torch"
        return func(*args, **(kwargs or {}))


_HARMLESS = ("aten::detach", "aten::empty", "aten::lift_fresh")


class _Operation(Structure):
    _fields_ = [("run", c_void_p), ("arguments", c_void_p)]


def declared_replay(library: ctypes.CDLL) -> Any:
    """The library's function that plays operations, which every tape is given."""
    function = library.membound_replay
    function.argtypes, function.restype = [POINTER(_Operation), c_int64, POINTER(c_double), c_int], None
    return function


def _pointer(x: Tensor, dtype: torch.dtype) -> int:
    if x.dtype is not dtype or not x.is_contiguous():
        raise TypeError(f"a ragged batch holds contiguous {dtype}, not {x.dtype}")
    return x.data_ptr()


def _tree_pointer(batch: RaggedBatch) -> int | None:
    if batch.tree is None:
        return None
    most = int((batch.query_start[1:] - batch.query_start[:-1]).max())
    if most > LARGEST_TREE or batch.tree.shape[0] != batch.num_tokens:
        raise ValueError(
            f"tree: has {batch.tree.shape[0]} masks for {batch.num_tokens} tokens, of which a sequence brings up to "
            f"{most}; should have a mask a token, and at most {LARGEST_TREE} tokens a sequence"
        )
    return _pointer(batch.tree, torch.int64)
