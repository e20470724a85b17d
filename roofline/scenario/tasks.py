"""What do the requests of a task look like: code, chat, retrieval, reasoning, agent?

Profiles are files in `data/tasks/`. Each value has its source beside it, or says that it is assumed.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import Annotated, get_args

from pydantic import Field

from membound.roofline.errors import MemboundError
from membound.roofline.part import Part
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario.workload import (
    FixedLength,
    Length,
    SessionPrompts,
    SyntheticPrompts,
    TaskName,
    TracePrompts,
    Workload,
)
from membound.roofline.speculation.acceptance import AcceptanceProfile
from membound.roofline.techniques.drafts import DrafterKind


class TaskAcceptance(Part):
    """A task's acceptance of one kind of drafter, and the measurement that it was fitted to.

    The profile emits `emitted` tokens a step, on average, at `drafts` drafts of which `found` of the steps have any:
    along the longest path of the tree that the measurement had, as `speculation/by_depth.py` says.
    """

    profile: AcceptanceProfile
    drafts: int = Field(ge=1, le=64)
    found: float = Field(1.0, gt=0, le=1)
    emitted: float = Field(ge=1)
    source: str


class TaskProfile(Part):
    name: TaskName
    description: str
    prompts: Annotated[SyntheticPrompts | SessionPrompts, Field(discriminator="kind")]
    prompts_source: str
    output_tokens: Length
    output_source: str
    rank_correlation: float = Field(gt=-1, lt=1)
    rank_correlation_source: str
    acceptance: dict[DrafterKind, TaskAcceptance]


@lru_cache(maxsize=1)
def task_profiles() -> dict[str, TaskProfile]:
    """Every shipped task profile by name."""
    folder = resources.files("membound.data") / "tasks"
    profiles = {}
    for name in get_args(TaskName):
        text = (folder / f"{name}.yaml").read_text("utf-8")
        profiles[name] = TaskProfile.model_validate(parse_yaml(text, f"data/tasks/{name}.yaml"))
    return profiles


def resolve(workload: Workload) -> Workload:
    """`workload` with prompts, output lengths and correlation from its task, where it gives none itself.

    Raises MemboundError where the task's correlation meets a length that follows nothing.
    """
    if workload.task is None or workload.rows_of_trace:
        return workload
    profile = task_profiles()[workload.task]
    prompts = workload.prompts or profile.prompts
    output_tokens, rank_correlation = workload.output_tokens, workload.rank_correlation
    if output_tokens is None and not isinstance(prompts, TracePrompts):
        output_tokens = profile.output_tokens
        if rank_correlation is None and workload.prompts is None:
            rank_correlation = profile.rank_correlation
    lengths = (getattr(prompts, "tokens", None), output_tokens)
    if rank_correlation and any(isinstance(length, FixedLength) for length in lengths):
        raise MemboundError(
            f"field 'workload.rank_correlation' is {rank_correlation}, but a fixed length follows nothing"
        )
    update = {"prompts": prompts, "output_tokens": output_tokens, "rank_correlation": rank_correlation}
    return workload.model_copy(update=update)


def acceptance_of(workload: Workload, drafter: DrafterKind) -> AcceptanceProfile | None:
    """The workload's own acceptance profile, else its task's for that kind of drafter where it knows it, else None."""
    known = _known(workload, drafter)
    return workload.acceptance if workload.acceptance is not None or known is None else known.profile


def found_of(workload: Workload, drafter: DrafterKind) -> float | None:
    """The share of steps in which the task's drafter finds a draft; None without a task that knows it."""
    known = _known(workload, drafter)
    return None if known is None else known.found


def _known(workload: Workload, drafter: DrafterKind) -> TaskAcceptance | None:
    return None if workload.task is None else task_profiles()[workload.task].acceptance.get(drafter)
