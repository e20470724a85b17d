"""Do published results come out under their own conditions, against their own baselines?

`python -m membound.simulator.agreement.published` prints the table that is kept in AGREEMENT.md. No constant is
fitted to it: where ours disagrees, the case says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

Verdict = Literal["agrees", "near", "higher", "lower"]
How = Literal["simulated", "closed form"]


INTRODUCTION = (
    "Each published figure has its own conditions and its own baseline, both of which are rebuilt as far as they are "
    'known; "from memory" was not seen in a source, "assumed" nobody published. The interval is what comes out with '
    "step times at both ends of their stated error, for a ratio of two step times with their errors not cancelling. "
    "*Agrees* says that the interval meets the published range, *near* that 10 % more would do, which is how well "
    "lengths and knees of curves can be read. Nothing was fitted to this table."
)
NOT_YET = (
    "Sarathi-Serve's 5.6x with Falcon-180B in stages: bubbles of whole prompts are simulated, but its network and "
    "objective were not seen.",
    "Where chunks of a buddy allocator lie, and so what is lost between them.",
    "Offload of experts to host memory with a cache: the ratio of copying to computing is a closed form, Fiddler's "
    "tokens a second are not simulated.",
)
# Lengths and knees of published curves are known no better than that.
READING = 0.1


class Range(NamedTuple):
    """A published figure, or the range that a source gives."""

    low: float
    high: float

    @classmethod
    def of(cls, low: float, high: float | None = None) -> Range:
        return cls(low, low if high is None else high)


class Ours(NamedTuple):
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Case:
    """A published figure with its baseline and conditions, and how membound comes to its own.

    `value` is ours where step times are so many times as long as predicted, and `error` how far off they may be: the
    interval is what comes out with step times at both ends. `within` is the factor by which ours may miss the
    published range, as stated in the tests; `why` says what is known about the distance.
    """

    name: str
    what: str
    baseline: str
    conditions: str
    source: str
    published: Range
    how: How
    value: Callable[[float], float]
    error: float
    within: float
    unit: str = "x"
    why: str = ""

    def ours(self) -> Ours:
        ends = [self.value(1 + self.error), self.value(1 / (1 + self.error))]
        middle = self.value(1.0)
        return Ours(middle, min(middle, *ends), max(middle, *ends))

    def miss(self, value: float) -> float:
        """The factor between a value of ours and the nearest of the published range; above 1 where ours is higher."""
        return value / min(max(value, self.published.low), self.published.high)


def verdict(case: Case, ours: Ours) -> Verdict:
    """Whether our interval meets the published range, would but for what reading a figure costs, or where it lies."""
    low, high = case.published
    if ours.low <= high and low <= ours.high:
        return "agrees"
    if ours.low <= high * (1 + READING) and low * (1 - READING) <= ours.high:
        return "near"
    return "lower" if ours.high < low else "higher"


def cases() -> list[Case]:
    """All of them, in the order of the table."""
    from membound.simulator.agreement.distserve import distserve
    from membound.simulator.agreement.serving import serving_cases
    from membound.simulator.agreement.steps import step_cases

    return [*serving_cases(), *distserve(), *step_cases()]


def table(cases: Iterable[Case], progress: Callable[[str], None] = lambda name: None) -> str:
    """The cases as a Markdown table, ours beside the published figure, and the reasons below it."""
    head = "| case | what | against | published | ours (interval) | ours / published | how | verdict |"
    lines = [head, "|---|---|---|--:|--:|--:|---|---|"]
    reasons: dict[str, list[str]] = {}
    conditions: dict[str, list[str]] = {}
    for case in cases:
        progress(case.name)
        ours = case.ours()
        found = verdict(case, ours)
        lines.append(
            f"| {case.name} | {case.what} | {case.baseline} | {_range(case.published)} {case.unit} | "
            f"{_number(ours.value)} ({_number(ours.low)} to {_number(ours.high)}) {case.unit} | "
            f"{case.miss(ours.value):.2f} | {case.how} | {found} |"
        )
        conditions.setdefault(f"{case.conditions}. Source: {case.source}.", []).append(case.name)
        if case.why:
            reasons.setdefault(f"{case.why}.", []).append(case.name)
    for title, said in (("Conditions", conditions), ("Why ours differs", reasons)):
        lines += ["", f"## {title}", "", *(f"* **{', '.join(names)}**: {text}" for text, names in said.items())]
    return "\n".join(lines)


def _range(published: Range) -> str:
    low, high = published
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    """Prints AGREEMENT.md."""
    import sys

    def progress(name: str) -> None:
        print(name, file=sys.stderr)

    print("# Does the simulator agree with what others published?\n")
    command = "python -m membound.simulator.agreement.published"
    print(f"Made on {datetime.now(UTC):%d %B %Y} by `{command}`. {INTRODUCTION}\n")
    print(table(cases(), progress))
    print("\n## What cannot be simulated yet\n")
    print("\n".join(f"* {one}" for one in NOT_YET))


if __name__ == "__main__":
    main()
