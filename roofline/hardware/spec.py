"""What is a device: its roofs, memory and links from the data sheet, and its calibration where it was measured?"""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, field_validator, model_validator

from membound.roofline.errors import MemboundError
from membound.roofline.hardware.calibration import Calibration
from membound.roofline.hardware.names import normalised
from membound.roofline.part import Part

# What a matrix unit can multiply. Microscaled formats count under the number they hold: mxfp4 and nvfp4 are fp4.
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp6", "fp4", "int4")
Architecture = Literal[
    "Volta",
    "Turing",
    "Ampere",
    "Ada",
    "Hopper",
    "Blackwell",
    "CDNA1",
    "CDNA2",
    "CDNA3",
    "CDNA4",
    "RDNA3",
    "RDNA4",
    "Xe-HPC",
    "Xe2",
    "Gaudi",
    "TPU",
    "NeuronCore",
    "Apple",
    "CPU",
    "unknown",
]

# 2:4 sparsity skips half of the multiplications; a larger ratio means that a sparse figure stands where a dense one
# belongs, or the other way round. The rest is the rounding of data sheets.
MOST_SPARSE_TO_DENSE = 2.05


def _within(low: float, high: float, unit: str) -> AfterValidator:
    """Refuses what no device has: such a figure is in another unit, or a slip of the hand."""

    def checked(value: float) -> float:
        if not low <= value <= high:
            raise ValueError(f"give {unit} between {low:g} and {high:g}")
        return value

    return AfterValidator(checked)


def _has_letters(name: str) -> str:
    if not normalised(name):
        raise ValueError("a name needs a letter or a digit")
    return name


# Wide enough for a microcontroller and for a rack that is sold as one device.
Bandwidth = Annotated[float, _within(1e8, 1e15, "bytes/s")]
Rate = Annotated[float, _within(1e9, 1e18, "FLOP/s")]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_has_letters)]


class Link(Part):
    """What connects a device with others or with its host.

    `bandwidth_bytes_per_s` is what one device sends in one direction over all its lanes together; data sheets often
    quote both directions. `max_devices` is how many devices reach each other over it.
    """

    kind: str = Field(min_length=1, description="NVLink 4, xGMI, PCIe 4.0 x16, InfiniBand NDR and so on")
    bandwidth_bytes_per_s: Annotated[float, _within(1e6, 1e15, "bytes/s")]
    latency_s: Annotated[float, _within(0, 1e-2, "seconds")]
    max_devices: int = Field(ge=2, le=1_000_000)
    topology: Literal["switched", "mesh", "ring", "torus", "pair", "host"]


class Price(Part):
    """What a device-hour cost on demand, from a published list of a day."""

    usd_per_h: Annotated[float, _within(1e-4, 1e5, "US dollars an hour")]
    date: datetime.date
    source: str = Field(min_length=1)


class HardwareSpec(Part):
    """One device. Rates are in SI units and dense; `matrix_flops` is by the numbers that the matrix unit multiplies.

    `sparse_flops` are the rates with 2:4 structured sparsity. `runs_as` names, for a number format that the matrix
    unit lacks, the one that engines use there instead at the same size. `sources` says where each figure is from and
    `verified` which of them were read there; the others are a lead. `calibration` is what was measured on it; without
    one its times are the data sheet's with typical efficiencies.
    """

    name: Name
    aliases: tuple[Name, ...] = ()
    variant_of: str | None = Field(None, description="the device with the same chip, whose kernels it runs")
    vendor: str
    kind: Literal["cpu", "gpu", "accelerator"]
    architecture: Architecture = "unknown"
    year: int | None = Field(None, ge=1990, le=2100)

    memory_bytes: Annotated[int, _within(1e6, 1e15, "bytes")]
    memory_kind: Literal["HBM", "GDDR", "LPDDR", "DDR", "unknown"] = "unknown"
    bandwidth_bytes_per_s: Bandwidth
    cache_bytes: Annotated[int, _within(1e3, 1e13, "bytes")] | None = Field(
        None, description="the last-level cache that all compute units share"
    )
    cache_bandwidth_bytes_per_s: Annotated[float, _within(1e8, 1e17, "bytes/s")] | None = None

    compute_units: Annotated[int, _within(1, 1e6, "compute units")] | None = Field(
        None, description="SMs, CUs, cores: what a kernel's blocks are dealt to"
    )
    clock_hz: Annotated[float, _within(1e6, 1e11, "hertz")] | None = Field(None, description="boost clock")
    matrix_flops: dict[str, Rate]
    sparse_flops: dict[str, Rate] = Field(default_factory=dict)
    vector_flops: Rate | None = Field(None, description="fp32 outside the matrix unit")
    runs_as: dict[str, str] = Field(default_factory=dict)
    launch_s: Annotated[float, _within(0, 1e-2, "seconds")] = Field(
        3e-6, description="time of an operator that does nothing, launches captured"
    )

    scale_up: Link | None = Field(None, description="between the devices of a node or rack")
    scale_out: Link | None = Field(None, description="between nodes, per device, as usually deployed")
    host: Link | None = Field(None, description="to the memory of the host")

    power_w: Annotated[float, _within(0.1, 1e6, "watts")] | None = None
    price: Price | None = None
    source: str = Field(min_length=1)
    sources: dict[str, str] = Field(default_factory=dict)
    verified: tuple[str, ...] = ()
    notes: str = ""
    calibration: Calibration | None = None

    @field_validator("memory_bytes", mode="before")
    @classmethod
    def _whole_in_any_notation(cls, value: Any) -> Any:
        """48e9 is a number of bytes too, which YAML reads as text."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return value
        return int(number) if number.is_integer() and not isinstance(value, bool) else value

    @field_validator("memory_kind", mode="before")
    @classmethod
    def _without_its_generation(cls, value: Any) -> Any:
        """HBM3e is HBM, and GDDR6X is GDDR: data sheets name the generation."""
        family = re.fullmatch(r"(HBM|GDDR|LPDDR|DDR)\d*[EX]?", value.upper()) if isinstance(value, str) else None
        return family[1] if family else value

    @model_validator(mode="after")
    def _rates_are_possible(self) -> HardwareSpec:
        for table in ("matrix_flops", "sparse_flops"):
            for dtype in getattr(self, table):
                if dtype not in DTYPES:
                    raise ValueError(f"{table} names the dtype '{dtype}'; known are {', '.join(DTYPES)}")
        for dtype, rate in self.sparse_flops.items():
            dense = self.matrix_flops.get(dtype)
            if dense is None:
                raise ValueError(f"sparse_flops.{dtype} has no dense rate beside it; give matrix_flops.{dtype} too")
            if not dense <= rate <= MOST_SPARSE_TO_DENSE * dense:
                raise ValueError(
                    f"sparse_flops.{dtype} is {rate:g}, {rate / dense:.2f} times the dense {dense:g}; "
                    "2:4 sparsity gives between 1 and 2 times, so one of the two is the other kind of figure"
                )
        for dtype, instead in self.runs_as.items():
            if dtype in self.matrix_flops or instead not in self.matrix_flops:
                raise ValueError(
                    f"runs_as.{dtype} is {instead}; it must lead from a dtype without a matrix rate to one with"
                )
        return self

    @property
    def price_usd_per_h(self) -> float | None:
        """The on-demand price of a device-hour, where one is known."""
        return self.price.usd_per_h if self.price else None

    @property
    def generation(self) -> str:
        """What devices share that behave alike: an architecture with HBM differs from the same with GDDR."""
        return f"{self.architecture} {self.memory_kind}"

    @property
    def stack(self) -> str:
        """Whose compiler and libraries a device's kernels come from, and its memory; CUDA's goes without its name."""
        return self.memory_kind if self.vendor == "NVIDIA" else f"{self.vendor} {self.memory_kind}"

    def to_yaml(self) -> str:
        """The device as YAML that `read_hardware` reads back to an equal one."""
        document = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)

    def computes_in(self, dtype: str) -> str | None:
        """The dtype that the device really multiplies for operands of `dtype`; None where it cannot."""
        instead = self.runs_as.get(dtype, dtype)
        return instead if instead in self._rates(sparse=False) else None

    def peak_flops(self, precision: str, *, sparse: bool = False) -> float:
        """The dense rate in FLOP/s for operands of `precision`, or its 2:4 rate where `sparse`.

        Raises MemboundError where the device has none: a rate is never made up.
        """
        rates = self._rates(sparse=sparse)
        dtype = self.runs_as.get(precision, precision)
        if dtype in rates:
            return rates[dtype]
        kind = "2:4 sparse matrix" if sparse else "matrix"
        known = f"it has {', '.join(rates)}" if rates else "it has none"
        raise MemboundError(f"hardware '{self.name}' has no {precision} {kind} rate; {known}")

    def _rates(self, *, sparse: bool) -> dict[str, float]:
        """The matrix rates; a device that multiplies fp32 only on its vector units has their rate for it."""
        if sparse:
            return self.sparse_flops
        vector = {} if self.vector_flops is None else {"fp32": self.vector_flops}
        return {**vector, **self.matrix_flops}
