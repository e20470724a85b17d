"""X3: what is left of a compressed KV cache when the next question is another one?"""

from __future__ import annotations

from membound.app.experiments.finding import Ask, Axis, Chart, Finding, Row
from membound.roofline.models import ModelSpec
from membound.roofline.scenario import load_scenario
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup, KvEviction, KvQuantization, Technique
from membound.runtime.quality.retrieval import recall

QUESTION = "Compressed once, asked several questions: which policies of the KV cache still answer another one?"
BUDGETS = (128, 48, 12)  # of contexts of about 270 tokens
PAGE = 16  # Quest reads two of them at least
STACKED = 48
CONTEXTS = 4


def policies(quick: bool) -> list[tuple[str, int | None, tuple[Technique, ...]]]:
    """Each policy by its name, its budget in tokens where it has one, and its techniques."""
    budgets = BUDGETS[:1] if quick else BUDGETS
    chosen: list[tuple[str, int | None, tuple[Technique, ...]]] = [("whole cache", None, ())]
    chosen += [(format, None, (KvQuantization(format=format),)) for format in ("int8", "int4", "kivi2")]
    chosen += [
        (policy, tokens, (KvEviction(policy=policy, budget=tokens),))
        for policy in ("streaming", "h2o", "snapkv", "quest")
        for tokens in (max(budget, 2 * PAGE) if policy == "quest" else budget for budget in budgets)
    ]
    if not quick:
        chosen += [
            (f"{policy} in int4", STACKED, (KvEviction(policy=policy, budget=STACKED), KvQuantization(format="int4")))
            for policy in ("snapkv", "quest")
        ]
    return chosen


def run(ask: Ask) -> Finding:
    """Asks for words that a context told: the question in sight when it was compressed, hidden, or another one."""
    runtime = ask.needed()
    base = load_scenario("live-cpu").model_copy(update={"sweep": ()}).with_techniques(())
    loaded = runtime.model(base)
    assert loaded.tokenizer is not None, "SmolLM2 has text"
    chosen = policies(ask.quick)
    rows: list[Row] = []
    for number, (name, budget, techniques) in enumerate(chosen):
        ask.listener.progress(number / len(chosen), f"{name}{f', {budget} tokens' if budget else ''}")
        ask.listener.check_cancelled()
        scenario = base.with_techniques(techniques)
        found = recall(runtime.decoder(scenario), loaded.tokenizer, contexts=1 if ask.quick else CONTEXTS)
        rows.append(
            {
                "policy": name,
                "budget": budget,
                "share_read": _kv_bytes(loaded.spec, scenario.setup, found.context_tokens)
                / _kv_bytes(loaded.spec, base.setup, found.context_tokens),
                "answered_in_sight": found.visible,
                "answered_hidden": found.hidden,
                "answered_after_another": found.reused,
                "lost_by_another": found.visible - found.reused,
                "questions": found.questions,
                "chance": 1 / found.choices,
                "context_tokens": found.context_tokens,
            }
        )
    full = rows[0]
    said = [
        f"whole cache: {full['answered_in_sight']:.0%} in sight, {full['answered_after_another']:.0%} after another "
        f"question, {full['questions']} questions, chance {full['chance']:.0%}"
    ]
    for name in dict.fromkeys(row["policy"] for row in rows[1:]):
        smallest = [row for row in rows if row["policy"] == name][-1]
        said.append(
            f"{name} at {smallest['share_read']:.0%} of the bytes: {smallest['answered_in_sight']:.0%} in sight, "
            f"{smallest['answered_after_another']:.0%} after another question"
        )
    return Finding(
        "x3",
        QUESTION,
        rows,
        Chart(
            Axis("share_read", "share of the cache's bytes that a step reads", log=True),
            Axis("answered_after_another", "answered after another question"),
            ("policy",),
        ),
        said,
        [
            f"SmolLM2-135M-Instruct, contexts of about {full['context_tokens']} tokens that tell secret words of "
            "cities between sentences of Python's manual; compressed once; an answer counts where the right word is "
            "the likeliest of those told. Quest evicts nothing, and its pages' bounds are read too"
        ],
    )


def _kv_bytes(model: ModelSpec, setup: EngineSetup, context: int) -> float:
    """Bytes of the cache that a step of decode reads for one sequence."""
    return sum(float(op.kv_bytes) * op.calls for op in step_operators(model, setup, StepShape.decode(1, context)))
