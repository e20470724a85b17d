"""How do the numbers noted for each step become the recorder's tables and samples?"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from membound.roofline.shape import AMOUNTS
from membound.simulator.scheduling.recorder import COUNTED_COLUMNS

Table = NDArray[np.float64]

# What is noted of each row of steps. `since_start` of those who decode had their last token when it began; attended and
# held tokens and blocks are those of its first step.
NOTED = (
    "start_s",
    "steps",
    "first_s",
    "slope_s",
    "decoding",
    "since_start",
    "kv_tokens",
    "held_tokens",
    "blocks_used",
)
# Of rows with prompts also which row it is, how many prompts ended, and the sums of its shape.
NOTED_OF_PROMPTS = ("row", "ended", *AMOUNTS)


def table_of(noted: list[float] | list[int], columns: int) -> Table:
    """What was noted one after the other, as rows; the fastest way from a list of numbers to an array."""
    return np.frombuffer(struct.pack(f"{len(noted)}d", *noted)).reshape(-1, columns)


def step_table(noted: dict[str, Table], of_prompts: Table, later_growth: Table, block_size: int) -> Table:
    """Rows of COUNTED_COLUMNS: counts as they were noted, shapes as means over steps, the rest as means over time."""
    n, k, time_s, first_s, slope_s = (noted[name] for name in ("decoding", "steps", "time_s", "first_s", "slope_s"))
    later_s = first_s * k * (k - 1) / 2 + slope_s * (k - 1) * k * (2 * k - 1) / 6
    per_s = np.divide(1, time_s, out=np.zeros(len(k)), where=time_s > 0)
    grown = n * (k - 1) / 2  # the mean step attends to so many tokens more than the first
    growth_block_s = _growth_block_s(k, time_s, first_s, slope_s, later_growth, block_size)
    columns = {
        "start_s": noted["start_s"],
        "time_s": noted["end_s"] - noted["start_s"],
        "steps": k,
        "emitted": n * k,
        "blocks_used": (noted["blocks_used"] * time_s + growth_block_s) * per_s,
        "held_tokens": (noted["held_tokens"] * time_s + n * later_s) * per_s,
        "tokens": n,
        "sequences": n,
        "kv_tokens": noted["kv_tokens"] + grown,
        "attended": noted["kv_tokens"] + grown,
        "logits_rows": n,
    }
    table = stacked(columns, COUNTED_COLUMNS, len(k))
    index = of_prompts[:, 0].astype(np.int64)
    table[index, COUNTED_COLUMNS.index("emitted")] += of_prompts[:, 1]
    table[index, -len(AMOUNTS) :] = of_prompts[:, 2:]
    return table


def _growth_block_s(
    steps: Table, time_s: Table, first_s: Table, slope_s: Table, later_growth: Table, block_size: int
) -> Table:
    """Block-seconds of the blocks that each row's steps after the first add.

    Each row of k steps has min(k - 1, block size) entries in `later_growth`: entry j says how many blocks are taken at
    the row's steps j, j + block size, ... (counted from 0), and used from there to the row's end.
    """
    entries = np.minimum(steps - 1, block_size).astype(np.int64)
    first_entry = np.cumsum(entries) - entries
    some = np.flatnonzero(later_growth)
    row = np.repeat(np.arange(len(steps)), entries)[some]
    step = some - first_entry[row] + 1.0
    times = (steps[row] - 1 - step) // block_size + 1
    pairs, slope_half_s = times * (times - 1) / 2, slope_s[row] / 2
    sum_of_steps = times * step + block_size * pairs
    sum_of_squares = step * (times * step + 2 * block_size * pairs) + block_size**2 * pairs * (2 * times - 1) / 3
    left_s = times * time_s[row] - (first_s[row] - slope_half_s) * sum_of_steps - slope_half_s * sum_of_squares
    total_s: Table = np.bincount(row, later_growth[some] * left_s, len(steps)).astype(np.float64)
    return total_s


def ramps_of(noted: dict[str, Table]) -> Table:
    """The ramps of `Samples` that the gaps within rows, and those since they began, come to."""
    n, since_start, k = noted["decoding"], noted["since_start"], noted["steps"]
    several, all_since = k > 1, since_start == n
    span_s = np.where(several, noted["first_s"], noted["end_s"] - noted["start_s"])
    slope_s = np.where(several, noted["slope_s"], 0.0)
    whole = np.stack((span_s, slope_s, k, n), axis=1)[all_since & (n > 0)]
    first = np.stack((span_s, np.zeros(len(k)), np.ones(len(k)), since_start), axis=1)
    rest = np.stack((span_s + slope_s, slope_s, k - 1, n), axis=1)
    return np.concatenate((whole, first[~all_since & (since_start > 0)], rest[~all_since & several]))


def stacked(columns: Mapping[str, NDArray[np.generic]], names: tuple[str, ...], rows: int) -> Table:
    """The columns side by side in the order of `names`; zeros where there is none."""
    table = np.zeros((rows, len(names)))
    for name, column in columns.items():
        table[:, names.index(name)] = column
    return table
