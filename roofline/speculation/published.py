"""How right are a drafter's guesses for a model, as others counted them, and how far apart are such counts?

Rows of `data/drafts/published.yaml` say how many tokens a step emitted with a drafter of some size. What a row comes to
for other sizes is the chance that its best first guess is right, with which the technique's own tree emits as many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

import numpy as np
from pydantic import Field

from membound.roofline.models import ModelSpec
from membound.roofline.part import Part
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario.workload import TaskName
from membound.roofline.speculation.token_tree import RANK_EXPONENT
from membound.roofline.techniques.drafts import DrafterKind, Drafts

_FILE = "drafts/published.yaml"


class Counted(Part):
    """Tokens that a step emitted with guesses `depth` deep, in a tree of `nodes`, or in a chain without.

    A `fixed` tree is the same in each step, and does not grow where the drafter is sure.
    """

    kind: DrafterKind
    model: str
    task: TaskName | None = None
    depth: int = Field(ge=1, le=64)
    nodes: int | None = Field(None, ge=1, le=1024)
    fixed: bool = False
    emitted: float = Field(gt=1)
    source: str = Field(min_length=1)


class _Table(Part):
    counted: tuple[Counted, ...]


@dataclass(frozen=True)
class Acceptance:
    """The chance that the best first guess is right, between `low` and `high`; `source` says who counted it.

    `pair` is whether it was counted for this model and this kind of drafter.
    """

    alpha: float
    low: float
    high: float
    pair: bool
    source: str


@lru_cache(maxsize=1)
def counted() -> tuple[Counted, ...]:
    """Every row that is shipped."""
    text = (resources.files("membound.data") / _FILE).read_text("utf-8")
    return _Table.model_validate(parse_yaml(text, f"data/{_FILE}")).counted


@lru_cache(maxsize=256)
def alpha_of(row: Counted, drafts: Drafts) -> float:
    """The alpha with which drafts like these, of the row's size, emit as many tokens as the row says."""
    exponent = min(drafts.rank_exponent, RANK_EXPONENT) if row.fixed else drafts.rank_exponent
    sized = replace(drafts, gamma=row.depth, nodes=row.nodes, hit_rate=1.0, rank_exponent=exponent)
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2.0
        emitted = 1.0 + replace(sized, alpha=middle).tree.expected_accepted
        low, high = (middle, high) if emitted < row.emitted else (low, middle)
    return high


def acceptance_for(model: ModelSpec, drafts: Drafts, task: TaskName | None = None) -> Acceptance | None:
    """What was counted of this kind of drafter for the model, in its task where somebody did; else for any model, with
    the drafts' own alpha. None for a kind that no row is of.

    Between `low` and `high` are 80 % of the rows, and for a model at least what rows of one model differ by.
    """
    rows = [row for row in counted() if row.kind == drafts.kind]
    if not rows:
        return None
    names = {name.lower() for name in (model.name, *model.aliases)}
    mine = [row for row in rows if row.model.lower() in names]
    used = [row for row in mine if row.task == task] or mine or rows
    alphas = [alpha_of(row, drafts) for row in used]
    alpha = float(np.median(alphas)) if mine else drafts.alpha
    apart = _apart(rows, drafts, single=len(used) == 1) if mine else 0.0
    low, high = (float(value) for value in np.quantile(alphas, (0.1, 0.9)))
    low, high = max(0.0, min(low, alpha - apart)), min(1.0, max(high, alpha + apart))
    if mine:
        source = f"counted by others for {model.name}: {'; '.join(dict.fromkeys(row.source for row in used))}"
    else:
        source = f"assumed: the technique's default; others counted {low:.2f} to {high:.2f} for other models"
    return Acceptance(alpha, low, high, bool(mine), source)


def _apart(rows: list[Counted], drafts: Drafts, single: bool) -> float:
    """How far from the alpha that is taken others of one model are at most: other versions, engines, prompts and sizes.

    Several counts have theirs in the middle; a `single` one may be at either end, as that of a tree is above chains'.
    """
    alphas: dict[str, list[float]] = {}
    for row in rows:
        alphas.setdefault(row.model, []).append(alpha_of(row, drafts))
    return max(max(mine) - min(mine) for mine in alphas.values()) / (1.0 if single else 2.0)
