"""What does an experiment ask for, and what does it come to?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from membound.app.listener import Listener
    from membound.roofline.hardware import HardwareSpec
    from membound.runtime.engine import Runtime

Row = dict[str, Any]


class Axis(NamedTuple):
    """A column that a figure draws, with its title and unit."""

    column: str
    title: str
    log: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines of `y` over `x`, one for each value of the columns `lines`; the column `spread` gives their error bars."""

    x: Axis
    y: Axis
    lines: tuple[str, ...]
    spread: str | None = None


@dataclass(frozen=True)
class Finding:
    """An experiment's rows, what they say, and under which conditions they hold.

    One that has been run says when it was `made`, a day, and on which `machine` it measured; one that only predicts
    has none.
    """

    name: str
    question: str
    rows: list[Row]
    chart: Chart
    says: list[str]
    conditions: list[str]
    made: str = ""
    machine: str = ""

    def to_json(self) -> dict[str, Any]:
        """What `membound experiment --json` prints, and `of` reads back."""
        return asdict(self)

    @classmethod
    def of(cls, document: dict[str, Any]) -> Finding:
        """The finding of a document."""
        drawn = document["chart"]
        chart = Chart(Axis(*drawn["x"]), Axis(*drawn["y"]), tuple(drawn["lines"]), drawn["spread"])
        return cls(**document | {"chart": chart})


@dataclass(frozen=True)
class Ask:
    """How an experiment is run: on which machine, how thoroughly, and who is told how far it is.

    `runtime` is None for an experiment that only predicts.
    """

    listener: Listener
    hardware: HardwareSpec
    runtime: Runtime | None
    quick: bool = False

    def needed(self) -> Runtime:
        """The runtime of an experiment that measures."""
        assert self.runtime is not None, "the command makes one"
        return self.runtime


def best(rows: list[Row], column: str) -> Row:
    """The row with the largest value."""
    return max(rows, key=lambda row: row[column])
