"""How is a table of checks or times kept: one JSON document, and one Markdown table of the same rows?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, str]


def write(folder: Path, stem: str, document: Mapping[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Writes `stem`.json and `stem`.md, the latter with the document's conditions above its table."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(finite(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n"}
    texts[".md"] = markdown(document, rows)
    paths = []
    for suffix, text in texts.items():
        path = folder / f"{stem}{suffix}"
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text, "utf-8")
        paths.append(partial.replace(path))
    return paths


def markdown(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The conditions as a list, the rows as a table."""
    lines = [f"# {document['title']}", ""]
    lines += [f"* {name}: {words(value)}" for name, value in document["conditions"].items()]
    columns = list(rows[0]) if rows else []
    if columns:
        lines += ["", _line(columns), _line(["---"] * len(columns))]
        lines += [_line([row[column].replace("|", "\\|") for column in columns]) for row in rows]
    return "\n".join(lines) + "\n"


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON has not: what is infinite here was no number."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def slug(name: str) -> str:
    """A device's name as a part of a file's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def words(value: Any) -> str:
    """A value for a person to read; of a mapping, each name and its value."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
