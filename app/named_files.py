"""Which files of this machine may a scenario from a page name?

Whoever sends a scenario does not own the machine: a page opens what was uploaded to it, what lies below
`MEMBOUND_HOME/models`, and what lies below the folders that the server was started with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from membound.app import uploads
from membound.app.store import Store
from membound.app.tasks import scenario_of
from membound.roofline.errors import MemboundError
from membound.roofline.reading.files import expanded, is_folder
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario import Scenario

# The folders that `membound dashboard --allow-files` names, for the pages and the workers of this server.
ALLOWED_VARIABLE = "MEMBOUND_ALLOW_FILES"
# Below the store's home: where a model is put that pages may open.
MODELS = "models"
# Fields that name a file where a scenario is read from the command line, and words of theirs that are no file.
FIELDS = ("file", "model", "weights", "hardware", "draft", "head")
WORDS = ("random", "pretrained")
SUFFIXES = (".yaml", ".yml", ".json", ".gguf", ".csv", ".jsonl", ".safetensors")
_FIRST_LAYERS = re.compile(r"\[:\d+\]$")


def allow(folders: Sequence[Path]) -> None:
    """Let pages of this process open files below these folders, too; raises MemboundError for what is no folder."""
    for folder in folders:
        if not is_folder(expanded(folder, "option --allow-files")):
            raise MemboundError(f"option --allow-files is '{folder}', which is no folder; give one that there is")
    os.environ[ALLOWED_VARIABLE] = os.pathsep.join(str(folder.expanduser().resolve()) for folder in folders)


def scenario_of_page(text: str, store: Store) -> Scenario:
    """The scenario of a text that came by a page; raises MemboundError for one that names a file that is not allowed.

    What a text names is looked at before anything of it is read, and again as the scenario understands it.
    """
    check_files(parse_yaml(text, "the scenario"), store)
    scenario = scenario_of({"scenario": text})
    check_files(scenario.model_dump(mode="json"), store)
    return scenario


def check_files(document: Any, store: Store) -> None:
    """Raises MemboundError where a scenario's document names a file that no page may open."""
    for field, name in _named(document, ""):
        if _is_file(name) and not _is_upload(name, store) and not _is_allowed(name, store):
            raise MemboundError(
                f"field '{field}' is '{name[:80]}', a file, and a page opens files below '{store.home / MODELS}' only; "
                "put it there, or start the dashboard with --allow-files and its folder"
            )


def _is_file(name: str) -> bool:
    """Whether a name of a scenario is looked for among the files, as far as that can be told without looking."""
    if name in WORDS:
        return False
    bare = _FIRST_LAYERS.sub("", name)
    if "/" in bare or "\\" in bare or "\0" in bare or bare.startswith(("~", ".")):
        return True
    return PurePath(bare).suffix.lower() in SUFFIXES or is_folder(Path(bare))


def _is_allowed(name: str, store: Store) -> bool:
    """Whether a file lies below a folder that pages may open, wherever its links lead."""
    try:
        file = Path(_FIRST_LAYERS.sub("", name)).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    given = os.environ.get(ALLOWED_VARIABLE, "").split(os.pathsep)
    folders = ((store.home / MODELS).resolve(), *(Path(folder) for folder in given if folder))
    return any(file.is_relative_to(folder) for folder in folders)


def _is_upload(name: str, store: Store) -> bool:
    try:
        return str(uploads.find(store, PurePath(name).name)) == name
    except MemboundError:
        return False


def _named(node: Any, field: str) -> Iterator[tuple[str, str]]:
    """Each field that may name a file, by its path in the document, with what it holds."""
    if isinstance(node, Mapping):
        for key, inner in node.items():
            if isinstance(inner, str) and str(key).rsplit(".", 1)[-1] in FIELDS:
                yield f"{field}{key}", inner
            yield from _named(inner, f"{field}{key}.")
    elif isinstance(node, list):
        for at, inner in enumerate(node):
            yield from _named(inner, f"{field}{at}.")
