"""How is a function of the C++ library called, now and again when a step is replayed?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.cpu import build as cpu_build
from membound.kernels.cpu.tape import BatchFields, Scratch, Tape, Watch, declared_replay


class Rows(Structure):
    """How many rows an operation works on (batch.h)."""

    _fields_ = [("fixed", c_int64), ("batch", c_void_p), ("each", c_int64)]


class LibraryCalls:
    """The compiled library, and the tape on which its calls are recorded while there is one."""

    def __init__(self) -> None:
        """Raises KernelBuildError where the library cannot be built."""
        self._library = cpu_build.load_library()
        self._replay = declared_replay(self._library)
        self._scratch = Scratch()
        self._tape: Tape | None = None
        self._last_batch: tuple[RaggedBatch, BatchFields] | None = None
        self._sum = self._declare("membound_sum", SumArguments)

    @contextmanager
    def recording(
        self, rows: int | None = None, batch: RaggedBatch | None = None, *, computed: bool = True
    ) -> Iterator[Tape]:
        """What is called meanwhile is recorded on a tape that can play it again, and `computed` or not.

        With `rows`, on other batches of up to so many tokens, too: then each operation works on the tokens of `batch`.
        """
        tape = Tape(self._replay, self._scratch, rows, batch, computed)
        self._tape = tape
        try:
            with Watch(tape):
                yield tape
        finally:
            self._tape = None
        tape.finish()

    def _declare(self, name: str, arguments: type[Structure]) -> Any:
        """An operation of the library: it takes its arguments and a number of threads, and returns nothing."""
        function = getattr(self._library, name)
        function.argtypes, function.restype = [POINTER(arguments), c_int], None
        return function

    def _run(self, operation: Any, arguments: Structure, *kept: object) -> None:
        tape = self._tape
        if tape is not None:
            tape.add(operation, arguments, kept)
        if tape is None or tape.computed:
            operation(byref(arguments), torch.get_num_threads())

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape) if self._tape is None else self._tape.empty(shape)

    def _rows(self, count: int) -> Rows:
        """`count` rows; in a replay as many for each of its tokens as there are now."""
        each = None if self._tape is None else self._tape.rows_each(count)
        if self._tape is None or each is None:
            return Rows(count, None, 0)
        return Rows(count, self._tape.batch_address, each)

    def _dense(self, x: Tensor) -> Tensor:
        """x, copied where its rows [tokens, width] have gaps between them."""
        if x.dim() != 2 or x.stride(0) == x.shape[1] or x.stride(1) != 1 or x.dtype is not torch.float32:
            return dense(x)
        out = self._empty(*x.shape)
        self._copy(x, out, 0)
        return out

    def _copy(self, x: Tensor, out: Tensor, first: int) -> None:
        """The rows of x [tokens, width] into those of out from column `first` on."""
        to = out.data_ptr() + first * out.itemsize
        strides, rows = (x.stride(0), 0, out.stride(0)), self._rows(x.shape[0])
        self._run(self._sum, SumArguments(x.data_ptr(), None, to, x.shape[1], *strides, rows, 1.0))

    def _fields(self, batch: RaggedBatch) -> BatchFields:
        if self._tape is not None:
            return self._tape.fields(batch)
        if self._last_batch is None or self._last_batch[0] is not batch:
            fields = BatchFields()
            fields.read(batch)
            self._last_batch = batch, fields  # keeping the batch keeps its addresses valid
        return self._last_batch[1]


class SumArguments(Structure):
    """Of `membound_sum` (pointwise.cpp)."""

    _fields_ = [(name, c_void_p) for name in ("x", "y", "out")]
    _fields_ += [(name, c_int64) for name in ("width", "x_stride", "y_stride", "out_stride")]
    _fields_ += [("rows", Rows), ("factor", c_float)]


def dense(x: Tensor) -> Tensor:
    """x, copied where its rows do not follow each other: a single row of a wider tensor looks as if it did."""
    if x.dtype is not torch.float32:
        raise TypeError(f"the CPU kernels take fp32 activations, not {x.dtype}")
    if x.is_contiguous() and (x.dim() < 2 or x.shape[0] != 1 or x.stride(0) == x[0].numel()):
        return x
    return torch.empty(x.shape).copy_(x)


def pointer(x: Tensor | None) -> int | None:
    """The address of its first element; null for none."""
    return None if x is None else x.data_ptr()
