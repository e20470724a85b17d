"""What do the tables of the pages hold? Every cell carries its unit, every gain its baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from membound.app import text
from membound.app.figures import comparison
from membound.app.figures.live import SERIES, thinned
from membound.app.figures.memory import memory_parts
from membound.app.figures.template import bound_words
from membound.app.i18n import Translate
from membound.roofline.operating_point import OperatingPoint, SweepPoint
from membound.roofline.results.comparison import Comparison
from membound.roofline.techniques import TECHNIQUES

VERDICT_MARKS = {"gain": "▲", "loss": "▼", "no difference": "＝", "not measured": "…", "emulated": "∅"}


def operator_table(point: OperatingPoint, t: Translate) -> pd.DataFrame:
    """The operators of a step by what they serve, the longest first."""
    return pd.DataFrame(
        {
            t("column.group"): f"{t(f'group.{group.name}')} {text.percent(group.time_s / point.time_s)}",
            t("column.operator"): op.operator.name,
            t("column.calls"): op.operator.calls,
            t("column.time"): text.seconds(float(op.total_s)),
            t("column.share"): text.percent(float(op.total_s) / point.time_s),
            t("column.flops"): text.flops(float(op.operator.flops) * op.operator.calls),
            t("column.bytes"): text.moved(float(op.operator.bytes + op.operator.link_bytes) * op.operator.calls),
            t("column.bound"): bound_words(op.bound, t),
        }
        for group in sorted(point.groups, key=lambda group: -group.time_s)
        for op in sorted(group.operators, key=lambda op: -float(op.total_s))
    )


def steps_table(points: Sequence[OperatingPoint], t: Translate) -> pd.DataFrame:
    """Steps of one model on one device, as they lie under its roofs."""
    return pd.DataFrame(
        {
            t("column.weights"): point.setup.weights.name,
            t("column.batch"): point.batch,
            t("column.time"): text.seconds(float(point.cost.time_s)),
            t("column.interval"): f"{text.seconds(float(point.cost.low_s))} – {text.seconds(float(point.cost.high_s))}",
            t("column.intensity"): f"{text.digits(float(point.cost.arithmetic_intensity))} FLOP/byte",
            t("column.reached"): text.flop_rate(float(point.cost.flops / point.cost.time_s)),
            t("column.bound"): bound_words(point.bottleneck, t),
        }
        for point in points
    )


def memory_table(point: OperatingPoint, t: Translate) -> pd.DataFrame:
    """What fills the memory, and what is left of it."""
    parts = memory_parts(point.memory, point.usable_bytes)
    return pd.DataFrame(
        {
            t("column.part"): t(f"memory.{part}"),
            t("column.memory"): text.gib(held),
            t("column.share"): text.percent(held / point.usable_bytes),
        }
        for part, held in parts.items()
    )


def live_table(points: Sequence[tuple[float, Mapping[str, Any]]], t: Translate) -> pd.DataFrame:
    """What is drawn of a run that goes on."""
    return pd.DataFrame(
        {t("live.x"): round(at, 3)} | {t(f"live.{key}"): payload[key] for key in SERIES if key in payload}
        for at, payload in thinned(points)
    )


def sweep_table(points: Sequence[SweepPoint], t: Translate) -> pd.DataFrame:
    """Time and rate of a step at each batch."""
    return pd.DataFrame(
        {
            t("column.batch"): p.batch,
            t("column.time"): text.milliseconds(p.time_s),
            t("column.interval"): f"{text.milliseconds(p.low_s)} – {text.milliseconds(p.high_s)}",
            t("column.rate"): text.rate(p.tokens_per_s),
            t("column.bound"): bound_words(p.bottleneck, t),
        }
        for p in points
    )


def summary_table(summary: Mapping[str, Any], t: Translate) -> pd.DataFrame:
    """The latencies of a run, their means and percentiles."""
    latencies = {name: value for name, value in summary.items() if isinstance(value, dict) and "p50" in value}
    return pd.DataFrame(
        {
            t("column.metric"): t(f"metric.{name}"),
            **{
                column: "–" if value[column] is None else text.seconds(value[column])
                for column in ("mean", "p50", "p90", "p99")
            },
        }
        for name, value in latencies.items()
    )


def baseline_table(rows: Sequence[Comparison], t: Translate) -> pd.DataFrame:
    """Time per output token of the plain engine at each point."""
    return pd.DataFrame(
        {
            t("column.point"): comparison.point_label(row.point, t),
            t("column.tpot_predicted"): text.milliseconds(row.predicted),
            t("column.interval"): f"{text.milliseconds(row.low)} – {text.milliseconds(row.high)}",
            t("column.tpot_measured"): _measured_ms(row),
            t("column.error"): _error(row),
            t("column.bound"): bound_words(row.bottleneck_before, t),
        }
        for row in rows
    )


def _baseline(row: Comparison, t: Translate) -> str:
    """What a row is compared with; a technique's usual baseline with a translation where the language has one."""
    name = row.technique.partition(" ")[0]
    usual = name in TECHNIQUES and row.baseline == TECHNIQUES[name].baseline
    return t.name(f"technique.{name}.baseline", row.baseline) if usual else row.baseline


def gains_table(rows: Sequence[Comparison], t: Translate) -> pd.DataFrame:
    """Each technique at each point with all that a gain needs to be one."""
    return pd.DataFrame(
        {
            t("column.point"): comparison.point_label(row.point, t),
            t("column.technique"): comparison.technique_title(row.technique, t),
            t("column.baseline"): f"{_baseline(row, t)}{t('sign.comma')}{t(f'short.{row.metric}')}",
            t("column.predicted"): f"{text.gain(row.predicted)} ({row.low:.2f}–{row.high:.2f})",
            t("column.measured"): _measured_gain(row),
            t("column.error"): _error(row),
            t("column.verdict"): f"{VERDICT_MARKS[row.verdict]} {t(f'verdict.{row.verdict}')}",
            t("column.quality"): _quality(row, t),
            t("column.bottleneck"): " → ".join(
                dict.fromkeys(bound_words(bound, t) for bound in (row.bottleneck_before, row.bottleneck_after))
            ),
        }
        for row in rows
    )


def _measured_gain(row: Comparison) -> str:
    if row.measured is None:
        return "–"
    return text.gain(row.measured) + ("" if row.spread is None else f" ± {row.spread:.2f}")


def _measured_ms(row: Comparison) -> str:
    """A time with its spread, of which one digit says all."""
    if row.measured is None:
        return "–"
    spread = "" if row.spread is None else f" ± {text.digits(row.spread * 1e3, 1)}"
    return f"{text.digits(row.measured * 1e3)}{spread} ms"


def _error(row: Comparison) -> str:
    return "–" if row.error is None else text.signed_percent(row.error)


def _quality(row: Comparison, t: Translate) -> str:
    if row.lossless:
        same = row.same_outputs
        return t("quality.lossless") if same is None else t("quality.same", share=f"{same:.0%}")
    if row.quality is None:
        return t("quality.unknown")
    if not row.quality.exceeded:
        return t("quality.not_exceeded", context=row.quality.context, budget=row.quality.budget)
    price = t(
        "quality.price",
        kl=text.digits(row.quality.kl_nats, 2),
        agreement=f"{row.quality.top1_agreement:.1%}",
    )
    before, after = row.quality.perplexity_before, row.quality.perplexity
    if before is None or after is None:
        return price
    return price + t("quality.perplexity", before=text.digits(before, 3), after=text.digits(after, 3))
