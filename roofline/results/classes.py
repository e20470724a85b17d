"""How were the requests of each service class served?"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from membound.roofline.results.metrics import good_requests, tpot_s
from membound.roofline.results.result import Column, Distribution
from membound.roofline.scenario import Scenario


class ClassSummary(BaseModel):
    """A class of a run's requests: times are of those that were completed.

    The objective is the scenario's, with the class's own bound on the first token where it has one.
    """

    name: str
    priority: int
    requests: int
    completed: int
    preemptions: int
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    slo_attainment: float


def summaries_of_classes(scenario: Scenario, requests: Mapping[str, Column]) -> list[ClassSummary]:
    """One summary for each of the engine's classes; none where it has none, or where nobody says whose a request is."""
    if "service_class" not in requests:
        return []
    summaries = []
    for index, service in enumerate(scenario.engine.classes):
        own = {name: column[requests["service_class"] == index] for name, column in requests.items()}
        done, count = own["completed"], len(own["completed"])
        slo = scenario.slo.model_copy(update={"ttft_s": service.ttft_s or scenario.slo.ttft_s})
        summaries.append(
            ClassSummary(
                name=service.name,
                priority=service.priority,
                requests=count,
                completed=int(done.sum()),
                preemptions=int(own["preemptions"].sum()),
                ttft_s=Distribution.of((own["first_token_s"] - own["arrival_s"])[done]),
                tpot_s=Distribution.of(tpot_s(own)),
                e2e_s=Distribution.of((own["finished_s"] - own["arrival_s"])[done]),
                slo_attainment=good_requests(own, slo) / count if count else 0.0,
            )
        )
    return summaries
