"""What do chosen techniques gain together on an engine that keeps its other techniques?

`membound stack` starts from an engine that keeps of its techniques how it schedules; here it keeps all of them, so that
a cache can be quantized, say, on one whose weights are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.progress import Progress, silent
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import AnyTechnique, GainMetric, Technique
from membound.simulator.costing import ClosedForm, Costing, simulated
from membound.simulator.deployment import check_context, deployment_of
from membound.simulator.load import Lengths, Load
from membound.simulator.stacking.asked import closed_loop
from membound.simulator.stacking.document import to_json
from membound.simulator.stacking.game import MOST_FACTORIAL, StackingGame
from membound.simulator.stacking.stacking import MOST_SIMULATED, analyse
from membound.simulator.steady import Steady
from membound.simulator.workers import Workers


def parse_techniques(documents: Iterable[Mapping[str, Any]]) -> list[Technique]:
    """Techniques from plain data, each on its own: of those that exclude each other the analysis says so."""
    adapter: TypeAdapter[Technique] = TypeAdapter(AnyTechnique)
    return [adapter.validate_python(document) for document in documents]


def stack_document(
    engine: Scenario,
    techniques: Sequence[Technique],
    *,
    batch: int,
    context: int,
    metric: GainMetric,
    simulate: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The analysis of one stack as `membound stack --json` prints it, on `engine` less what is stacked.

    Raises MemboundError where the engine cannot be costed at all.
    """
    names = {technique.name for technique in techniques}
    kept = tuple(one for one in engine.techniques if one.name not in names)
    # without the usual techniques among those that are stacked
    plain = engine.with_techniques((*kept, *techniques)).with_techniques(kept)
    lengths = Lengths.of(plain.workload).at_context(context)
    model, hardware = resolve_model(plain.model), get_hardware(plain.hardware)
    check_context(model, lengths)
    plain = closed_loop(plain, batch, lengths, context)
    load = Load(float(batch), lengths)
    costing = Costing(simulated, Workers()) if simulate else Costing(ClosedForm(load))
    game = StackingGame(techniques, plain, costing, metric)
    most = MOST_SIMULATED if simulate else MOST_FACTORIAL
    game.ahead(most, progress)
    error = Steady(deployment_of(plain, model, hardware), load).relative_error
    stack = analyse(game, {"batch": batch, "context": context}, error, "", most)
    document = to_json([stack], techniques)
    return {
        "techniques": document["techniques"],
        "stack": document["stacks"][0],
        "kept": [technique.name for technique in kept],
        "relative_error": error,
        "simulated": simulate,
    }
