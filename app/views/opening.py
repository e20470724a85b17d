"""How does a deployment of Plan become the form of Simulate, in one click?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from membound.app.views import traffic

DEGREES = ("tp", "pp", "dp", "ep")


def opened(name: str, settings: dict[str, Any], key: str) -> None:
    """A button that fills the form of Simulate with the settings and goes there; its URL then holds them."""
    if st.button(name, key=key, icon=":material/play_arrow:"):
        for field, value in (traffic.DEFAULTS | settings).items():
            st.session_state[field] = value
        st.switch_page(st.session_state["pages"]["simulate"])


def settings_of(found: Mapping[str, Any], demand: Mapping[str, Any]) -> dict[str, Any]:
    """The form's fields for a deployment under the whole demand, or for a point of the front at its batch."""
    parts, slo = found["deployment"], demand["slo"]
    settings: dict[str, Any] = {
        "model": demand["model"],
        "hw": found["device"],
        "formats": parts["precision"],
        **{degree: parts["parallel"][degree] for degree in DEGREES},
        "spread": "fixed",
        "prompt": round(demand["prompt_tokens"]),
        "output": round(demand["output_tokens"]),
        "policy": parts["batching"] or traffic.DEFAULTS["policy"],
        "seats": min(parts["max_num_seqs"], 4096),
        "budget": parts["max_batched_tokens"],
        "versus": [],
        "ttft": 1e3 * slo["ttft_s"],
        "tpot": 1e3 * slo["tpot_s"],
    }
    if "batch" in found:
        users = max(1, round(found["batch"]))
        return settings | {"traffic": "closed_loop", "users": users, "requests": min(100_000, max(200, 4 * users))}
    if demand["rate_rps"]:
        settings |= {"traffic": "poisson", "rate": demand["rate_rps"], "requests": 3000}
    else:
        settings |= {"traffic": "closed_loop", "users": round(demand["concurrency"]), "requests": 3000}
    pools = parts["disaggregation"]
    if pools:
        return settings | {"pre": pools["prefill_engines"], "dec": pools["decode_engines"]}
    return settings | {"replicas": parts["replicas"]}
