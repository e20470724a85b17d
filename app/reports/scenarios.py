"""How do the scenarios that ship with membound read in a terminal?"""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table


def scenarios(document: dict[str, Any]) -> RenderableType:
    """The shipped scenarios."""
    table = Table(show_header=False, box=None)
    for item in document["scenarios"]:
        table.add_row(item["name"], item["description"])
    return table
