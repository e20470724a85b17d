"""What did this machine show when its roofs were measured with micro-benchmarks?

The tables here are measured by `runtime/calibration/` on generic shapes, never on a scenario's run, and read by
`times.calibrated.CalibratedTimes`. Everything is in seconds and bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from membound.roofline.errors import MemboundError
from membound.roofline.reading.files import write_files
from membound.roofline.reading.problems import one_sentence

# The working set that the cached columns of a linear table rotate over: beyond the caches that a core has to itself,
# within those that hold a small model.
CACHE_SET_BYTES = 16 * 2**20

# Repeats of what memory gives in one state of a machine differ by up to a tenth, its states by a third and more.
STATE_TOLERANCE = 0.2


def attention_over(kv_values: str) -> str:
    """What a calibration calls attention over K and V of these values, such as `int8`."""
    return f"attention_{kv_values}"


@overload
def one_state(rate: float, other: float) -> bool: ...
@overload
def one_state(rate: NDArray[np.float64], other: float) -> NDArray[np.bool_]: ...
def one_state(rate: float | NDArray[np.float64], other: float) -> bool | NDArray[np.bool_]:
    """Whether rates of memory in bytes/s belong to one state of a machine with another."""
    same = np.maximum(rate, other) <= (1 + STATE_TOLERANCE) * np.minimum(rate, other)
    return same if isinstance(same, np.ndarray) else bool(same)


def recurrence_of(mixer: str) -> str:
    """What a calibration calls a recurrent layer of a kind of which it has measurements of its own."""
    return f"recurrent_{mixer}"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BandwidthPoint(_Table):
    """Read rate of a working set: below a cache's size the cache's roof, above it that of memory."""

    working_set_bytes: int = Field(gt=0)
    bytes_per_s: float = Field(ge=1e8, le=1e15)


class LinearTable(_Table):
    """Seconds of y [m, n] = x [m, k] W^T for one weight format, on the grid n x k x m.

    `memory_s[i][j][l]` has the weights come from memory, `cache_s[i][j][l]` from the level that holds
    `CACHE_SET_BYTES`.
    """

    n: list[int]
    k: list[int]
    m: list[int]
    memory_s: list[list[list[float]]]
    cache_s: list[list[list[float]]]

    @model_validator(mode="after")
    def _complete(self) -> LinearTable:
        shape = (len(self.n), len(self.k), len(self.m))
        for name in ("memory_s", "cache_s"):
            if np.shape(getattr(self, name)) != shape:
                raise ValueError(f"{name} has shape {np.shape(getattr(self, name))}, not {shape}")
            if not np.all(np.asarray(getattr(self, name)) > 0):
                raise ValueError(f"{name} has {np.min(getattr(self, name)):g} seconds; a time is above zero")
        for name in ("n", "k", "m"):
            axis = getattr(self, name)
            if len(axis) < (1 if name == "m" else 2) or axis[0] < 1 or np.any(np.diff(axis) <= 0):
                raise ValueError(f"{name} is {axis}; a grid rises from 1 or more, n and k over two points or more")
        return self


class LinearCost(_Table):
    """Seconds of an operator as a sum of non-negative terms, fitted on a grid of micro-benchmarks."""

    seconds: dict[str, Annotated[float, Field(ge=0)]]

    def time_s(self, **amounts: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """The sum of `amounts[term] * seconds[term]`; a `call` term counts once."""
        total: float | NDArray[np.float64] = self.seconds.get("call", 0.0)
        for term, amount in amounts.items():
            total = total + amount * self.seconds.get(term, 0.0)
        return total


class Calibration(_Table):
    """A machine's measured roofs, with who measured what, when and how repeatable it was.

    `operators` has a cost for each kind of operator that is not a linear: `rms_norm`, `add_rms_norm`,
    `rope_and_store`, `silu_mul` and `embed` by `elements`; `moe`, what a mixture costs beside its matrices, by
    `experts` that have tokens and by `elements`, pairs of a token and an expert; `recurrent`, the update of a state, by
    `elements` (tokens), `sequences`, `kv_bytes` and `flops`, where the kind of layer has a cost of its own
    (`recurrence_of`) with all that it computes beside its matrices; `attention`, also over quantized K and V
    (`attention_over`), by `sequences`, `kv_bytes`, `flops` and `activation_bytes`; `host`, the Python and sampling of a
    step, by `sequences`, `tokens` and `logits`. `linear` has a table for each of the kernels' weight formats.
    `repeatability` is the largest relative difference between two passes; `residual` the median relative error of the
    tables on shapes they were not made of. `watched_bytes_per_s` is what a plain read of memory gave while it was
    measured, where that was watched: what runs while memory gives something else is on another machine.
    """

    schema_version: Literal[1] = 1
    created: str
    machine: str
    kind: Literal["cpu", "gpu"]
    threads: int = Field(ge=1, le=4096)
    kernels: str
    versions: dict[str, str]
    memory_bytes: int = Field(ge=10**6, le=10**15)
    bandwidth: list[BandwidthPoint] = Field(min_length=2)
    linear: dict[str, LinearTable]
    operators: dict[str, LinearCost]
    repeatability: float = Field(ge=0)
    residual: float = Field(ge=0)
    watched_bytes_per_s: float | None = Field(default=None, gt=0)
    notes: list[str] = []

    def bandwidth_at(self, working_set_bytes: float) -> float:
        """Read rate in bytes/s at a working set, between the measured points linear in its logarithm."""
        points = sorted(self.bandwidth, key=lambda point: point.working_set_bytes)
        sizes = np.log([point.working_set_bytes for point in points])
        rates = [point.bytes_per_s for point in points]
        return float(np.interp(np.log(max(working_set_bytes, 1.0)), sizes, rates))

    @property
    def memory_bandwidth(self) -> float:
        """Read rate in bytes/s of the largest working set: the roof of memory itself."""
        return max(self.bandwidth, key=lambda point: point.working_set_bytes).bytes_per_s

    def matrix_flops(self, weight_format: str) -> float:
        """The best matrix rate that the table shows for a weight format, in FLOP/s."""
        table = self.linear[weight_format]
        n, k, m = np.meshgrid(table.n, table.k, table.m, indexing="ij")
        return float(np.max(2.0 * n * k * m / np.minimum(table.cache_s, table.memory_s)))

    def save(self, path: Path) -> None:
        """Writes the calibration beside `path` and then over it, so that a failure leaves the old one."""
        write_files({path: self.model_dump_json(indent=1).encode()})

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Reads a saved calibration; raises MemboundError where it is missing or damaged."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise MemboundError(f"calibration '{path}' is missing; run `membound calibrate`") from None
        except OSError as error:
            raise MemboundError(
                f"calibration '{path}' cannot be read ({error.strerror}); set MEMBOUND_HOME to a folder of your own"
            ) from None
        except ValidationError as error:
            raise MemboundError(
                f"calibration '{path}' is damaged or from another version ({one_sentence(error, cls)}); "
                "run `membound calibrate`"
            ) from None
