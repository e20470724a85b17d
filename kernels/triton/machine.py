"""For which GPU is a kernel launched: its architecture, and how many multiprocessors want work?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)  # decided when triton is imported: TRITON_INTERPRET=1

Widening = Literal["", "ptx", "fp8", "pure"]


@dataclass(frozen=True)
class Machine:
    """`arch` is sm80, sm90, sm100, gfx942, ...; `multiprocessors` are the SMs (NVIDIA) or CUs (AMD)."""

    arch: str
    multiprocessors: int

    @property
    def overlaps(self) -> bool:
        """Whether a launch may begin before the one before it has ended, as `overlap` says.

        From sm90 on; not on sm120, where they cannot be captured as a graph (github.com/sgl-project/sglang/pull/18596).
        """
        return self.arch.startswith("sm") and 90 <= int(self.arch[2:]) < 120

    @property
    def widening(self) -> Widening:
        """By which instructions codes become halves, as `widen` names them. e4m3 is converted from sm89 on."""
        if not self.arch.startswith("sm"):
            return ""
        capability = int(self.arch[2:])
        return "ptx" if capability < 89 else "pure" if capability in (100, 101, 103, 110) else "fp8"


# Multiprocessors of the GPUs whose code is built without one: NVIDIA's A100, RTX 4090, H100 SXM and H200, B200 and RTX
# 5090 and AMD's MI300X (the vendors' architecture white papers and data sheets; from memory).
REFERENCE_MACHINES = {
    machine.arch: machine
    for machine in (
        Machine("sm80", 108),
        Machine("sm89", 128),
        Machine("sm90", 132),
        Machine("sm100", 148),
        Machine("sm120", 170),
        Machine("gfx942", 304),
    )
}
_INTERPRETER = Machine("interpreter", 2)


def machine_of(device: torch.device) -> Machine:
    """The machine behind a CUDA (or ROCm) device; under Triton's interpreter the CPU is one too."""
    if device.type == "cuda":
        return _cuda_machine(device.index if device.index is not None else torch.cuda.current_device())
    if INTERPRETED and device.type == "cpu":
        return _INTERPRETER
    raise ValueError(f"the Triton kernels run on a GPU, not on device '{device}'")


@cache
def _cuda_machine(index: int) -> Machine:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Machine(properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Machine(f"sm{properties.major}{properties.minor}", properties.multi_processor_count)
