"""Which numbers of its deployments does a plan show side by side?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from membound.app import text
from membound.app.figures import plan as figures
from membound.app.i18n import Translate
from membound.app.views.plan_words import how


def deployments_table(rows: Sequence[Mapping[str, Any]], t: Translate) -> pd.DataFrame:
    """A deployment a row, as few columns as fit beside each other."""
    return pd.DataFrame(
        {
            t("plan.c_device"): f"{one['gpus']} × {one['device']}",
            t("plan.c_precision"): _precision(one["deployment"], t),
            t("plan.c_how"): how(one, t).strip(),
            t("plan.c_usd_h"): text.usd(one["usd_per_h"]),
            t("plan.c_usd_mtok"): text.usd(one["cost_usd_per_million_tokens"]),
            t("plan.c_energy"): _number(one["energy_j_per_token_at_board_power"], "J"),
            t("plan.c_ttft"): _p99(one, "ttft_s"),
            t("plan.c_tpot"): _p99(one, "tpot_s"),
            t("plan.c_upper_end"): _holds(one, t),
        }
        for one in rows
    )


def compared_table(compared: Sequence[Mapping[str, Any]], t: Translate) -> pd.DataFrame:
    """The best of a device and a way to serve a row, with what of its kind holds where times are longest."""
    return pd.DataFrame(
        {
            t("plan.c_device"): f"{one['best']['gpus']} × {one['device']}",
            t("plan.c_way"): t("plan.apart" if one["disaggregated"] else "plan.together"),
            t("plan.c_how"): how(one["best"], t).strip(),
            t("plan.c_usd_h"): text.usd(one["best"]["usd_per_h"]),
            t("plan.c_ttft"): _p99(one["best"], "ttft_s"),
            t("plan.c_tpot"): _p99(one["best"], "tpot_s"),
            t("plan.c_upper_end"): _enough(one["at_upper_end"], t),
        }
        for one in compared
    )


def _enough(place: Mapping[str, Any] | None, t: Translate) -> str:
    """How many devices were seen to hold at the upper end of the times, and their price."""
    if place is None:
        return "–"
    gpus = t("plan.gpus", gpus=place["gpus"])
    return gpus if place["usd_per_h"] is None else f"{gpus}, {text.usd(place['usd_per_h'])}"


def _holds(one: Mapping[str, Any], t: Translate) -> str:
    """`✓`, or how many devices keep the objective at the upper end of the times."""
    end = one.get("upper_end")
    if end is None:
        return "–"
    if end["meets_slo"]:
        return "✓"
    enough = end["gpus_that_meet_it"]
    return f"✕ {t('plan.gpus', gpus=enough)}" if enough else "✕"


def _number(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{text.digits(value)} {unit}"


def _p99(one: Mapping[str, Any], name: str) -> str:
    return text.milliseconds(one["summary"][name]["p99"]) if one["summary"] else "–"


def front_table(plans: Sequence[Mapping[str, Any]], t: Translate) -> pd.DataFrame:
    """The points of all fronts."""
    return pd.DataFrame(
        {
            t("plan.c_device"): point["device"],
            t("plan.c_precision"): t(f"plan.precision_{point['deployment']['precision']}"),
            t("plan.c_gpus"): point["gpus"],
            t("plan.c_batch"): round(point["batch"]),
            t("plan.x"): round(point["tokens_per_s_per_user"], 2),
            t("plan.y"): round(point["tokens_per_s_per_gpu"], 1),
            t("plan.c_ttft_mean"): text.seconds(point["ttft_s"]),
            t("plan.c_usd_mtok"): text.usd(point["cost_usd_per_million_tokens"]),
            t("plan.c_meets"): "✓" if point["meets_slo"] else "–",
        }
        for point in figures.front_points(plans)
    )


def _precision(deployment: Mapping[str, Any], t: Translate) -> str:
    """`8-bit, lossy`."""
    words = t(f"plan.precision_{deployment['precision']}")
    return words if deployment["lossless"] else f"{words}{t('sign.comma')}{t('plan.lossy')}"
