"""How does it read with which parameters a technique was costed?"""

from __future__ import annotations

from typing import Any


def named(technique: str, parameters: dict[str, Any], drafts: dict[str, Any] | None) -> str:
    """A technique with the parameters that it has been costed with: `eagle (depth 3, tree 3)`."""
    if drafts is None:
        named = dict.fromkeys(_said(name, value) for name, value in parameters.items() if value is not None)
        return f"{technique} ({', '.join(named)})" if named else technique
    if drafts["off"]:
        return f"{technique} (off)"
    size = f"depth {drafts['depth']}" if "tree_size" in drafts else f"gamma {drafts['depth']}"
    tree = f", tree {drafts['tree_size']}" if "tree_size" in drafts else ""
    return f"{technique} ({size}{tree})"


def _said(name: str, value: Any) -> str:
    """`int4`, `8 redundant experts`: a format by itself, anything else with its name."""
    if isinstance(value, bool):
        return name.replace("_", " ") if value else f"no {name.replace('_', ' ')}"
    if name == "lm_head":
        return f"lm_head {value}"
    return str(value) if isinstance(value, str) else f"{name.replace('_', ' ')} {value:g}"


def drafting(found: dict[str, Any]) -> str:
    """What a speculator was costed with, and where its acceptance is from, in one sentence."""
    name = found["technique"]
    if found["off"]:
        return f"{name}: off, since no draft is worth its cost here"
    size = f"gamma {found['depth']}"
    if "tree_size" in found:
        size = f"depth {found['depth']}, tree_size {found['tree_size']}"
    chosen = " (the best here; name it to fix it)" if found["chosen"] else " (as given)"
    draft = f", draft model {found['draft']}" if "draft" in found else ""
    decay = f", decay {found['decay']:.2f}" if found["decay"] not in (None, 1.0) else ""
    hits = f", hit_rate {found['hit_rate']:.2f}" if found["hit_rate"] < 1.0 else ""
    doubt = f" (±{found['acceptance_error']:.0%})" if found["acceptance_error"] else ""
    tree = f"; vLLM has a tree only where {found['asked_by']} is given, else a chain" if "asked_by" in found else ""
    return (
        f"{name}: {size}{chosen}{draft}; alpha {found['alpha']:.2f}{decay}{hits} ({found['alpha_from']}) give "
        f"{found['tokens_per_step']:.2f} tokens a step{doubt}{tree}"
    )
