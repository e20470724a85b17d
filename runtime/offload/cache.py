"""Which experts of a layer does the device keep, and when do the others come?

The least recently used makes room, except one that the step under way will still read. What is missing is fetched in
the background while experts that are there compute, and so are those that the next step or layer is expected to choose.
Speculative loading: Eliseev and Mazur, Fast Inference of Mixture-of-Experts Language Models with Offloading, 2023.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import torch

from membound.kernels.base import PackedWeight
from membound.runtime.offload.place import Place, buffers_like


@dataclass
class Moves:
    """What was asked of the experts of all layers, and what it took."""

    hits: int = 0  # experts that were there, or under way, when they were chosen
    misses: int = 0
    foreseen: int = 0  # fetched before anybody chose them
    bytes: int = 0
    stalled_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Of the experts that steps chose; 1 where nothing was asked."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


@dataclass
class _Slot:
    weights: dict[str, PackedWeight]
    coming: Future[None] | None = None


@dataclass
class ExpertCache:
    """The experts of one layer: all of them in `place`, the `capacity` last used on `device`.

    A step says which it chose (`begin`) and reads them in that order (`weight`).
    """

    place: Place
    capacity: int
    device: torch.device
    loader: Executor
    moves: Moves
    _numbers: dict[int, dict[str, int]] = field(default_factory=dict)  # by expert and part
    _packed: dict[str, PackedWeight] = field(default_factory=dict)  # one of each part: how buffers are laid out
    _slots: OrderedDict[int, _Slot] = field(default_factory=OrderedDict)  # by expert, the last used last
    _left: list[int] = field(default_factory=list)  # what the step has yet to read, in order
    _missing: list[int] = field(default_factory=list)  # of those, what nobody fetches yet
    _reading: int | None = None
    _free: list[_Slot] = field(default_factory=list)

    def add(self, expert: int, part: str, weight: PackedWeight) -> None:
        """Puts a matrix of an expert away."""
        self._numbers.setdefault(expert, {})[part] = self.place.keep(weight)
        self._packed.setdefault(part, buffers_like(weight, torch.device("meta")))

    @property
    def expert_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._packed.values())

    def begin(self, chosen: Sequence[int]) -> None:
        """A step will read these, in this order."""
        self._reading = None
        self._left = list(chosen)
        self._missing = [expert for expert in chosen if expert not in self._slots]
        self.moves.misses += len(self._missing)
        self.moves.hits += len(self._left) - len(self._missing)
        if self._left and self._left[0] not in self._missing:  # else that one is read at once, by whom it is waited for
            self._fetch_missing()

    def foresee(self, experts: Sequence[int]) -> None:
        """The next step is expected to read these; they come if there is room, without anybody waiting."""
        if len(experts) > self.capacity:
            return
        for expert in experts:
            if expert not in self._slots and self._make_room(keeping=experts):
                self._fetch(expert)
                self.moves.foreseen += 1

    def weight(self, expert: int, part: str) -> PackedWeight:
        """A matrix of the expert, once it is there."""
        if expert != self._reading:
            self._turn_to(expert)
        return self._slots[expert].weights[part]

    def _turn_to(self, expert: int) -> None:
        self._reading = expert
        if expert in self._left:
            self._left.remove(expert)
        began_s = time.perf_counter()
        if expert not in self._slots:
            self._missing = [other for other in self._missing if other != expert]
            if not self._make_room():
                self._give_up_the_last()
            slot = self._seat(expert)
            self._fetch_missing()
            self._read(expert, slot)
            self.moves.stalled_s += time.perf_counter() - began_s
            return
        self._slots.move_to_end(expert)
        self._fetch_missing()
        slot = self._slots[expert]
        if slot.coming is not None:
            slot.coming.result()
            slot.coming = None
            self.moves.stalled_s += time.perf_counter() - began_s

    def _fetch_missing(self) -> None:
        while self._missing and self._make_room():
            self._fetch(self._missing.pop(0))

    def _make_room(self, keeping: Sequence[int] = ()) -> bool:
        """Whether one more expert can come; the least recently used one that nobody waits for leaves."""
        if len(self._slots) < self.capacity:
            return True
        wanted = {*self._left, *keeping, self._reading}
        for expert, slot in self._slots.items():
            if expert not in wanted and (slot.coming is None or slot.coming.done()):
                self._drop(expert)
                return True
        return False

    def _give_up_the_last(self) -> None:
        """All that is there will be read: what is read last leaves, and comes again."""
        there = [expert for expert in self._left if expert in self._slots]
        if not there:  # what was foreseen is still coming
            there = [next(expert for expert in self._slots if expert != self._reading)]
        else:
            self._missing.append(there[-1])
            self._missing.sort(key=self._left.index)
            self.moves.hits -= 1
            self.moves.misses += 1
        self._drop(there[-1])

    def _drop(self, expert: int) -> None:
        slot = self._slots.pop(expert)
        if slot.coming is not None:
            slot.coming.result()
            slot.coming = None
        self._free.append(slot)

    def _fetch(self, expert: int) -> None:
        """Lets the expert come in the background."""
        slot = self._seat(expert)
        slot.coming = self.loader.submit(self._read, expert, slot)

    def _seat(self, expert: int) -> _Slot:
        """The buffers that an expert is to be read into."""
        slot = self._free.pop() if self._free else _Slot(self._new_buffers())
        self._slots[expert] = slot
        self.moves.bytes += self.expert_bytes
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # what was there may still be read
        return slot

    @torch.inference_mode()  # a thread's own, and the buffers are made within the decoder's
    def _read(self, expert: int, slot: _Slot) -> None:
        for part, number in self._numbers[expert].items():
            self.place.read(number, slot.weights[part])

    def _new_buffers(self) -> dict[str, PackedWeight]:
        return {part: buffers_like(weight, self.device) for part, weight in self._packed.items()}
