"""Which models does membound know by name?"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib import resources
from typing import Any

import yaml

from membound.roofline.models.base import ModelError
from membound.roofline.models.names import family_and_size, has_active_size, lookup_keys, normalise_name
from membound.roofline.models.spec import ModelSpec, build

_EXAMPLES = ("Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-20b")
# How far the size in a registry's name may be from the parameters: command-r7b:7b has 8.0 billion.
_SIZE_TOLERANCE = 0.15
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Catalog(Mapping[str, ModelSpec]):
    """Models by name, in the order of their files; each is checked when it is first asked for."""

    def __init__(self, entries: Mapping[str, dict[str, Any]]) -> None:
        self._entries = entries
        self._specs: dict[str, ModelSpec] = {}

    def __getitem__(self, name: str) -> ModelSpec:
        if name not in self._specs:
            self._specs[name] = build(**self._entries[name])
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @cached_property
    def by_key(self) -> Mapping[str, str]:
        """Names by the keys of names and aliases; raises ModelError where two models share a key."""
        keys: dict[str, str] = {}
        for name, entry in self._entries.items():
            for known in (name, *entry.get("aliases", ())):
                if keys.setdefault(normalise_name(known), name) != name:
                    other = keys[normalise_name(known)]
                    raise ModelError(f"{known!r} in the catalog means both {other} and {name}: it must mean one.")
        return keys


@cache
def catalog() -> Catalog:
    """All models of `data/models/*.yaml` by name; each file holds a list under `models`."""
    entries: dict[str, dict[str, Any]] = {}
    for file in sorted((resources.files("membound.data") / "models").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".yaml"):
            for fields in yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)["models"]:
                if fields["name"] in entries:
                    raise ModelError(f"The model {fields['name']} stands twice in the catalog, again in {file.name}.")
                entries[fields["name"]] = fields
    return Catalog(entries)


def get_model(name: str) -> ModelSpec:
    """The catalog's model of that name or alias (`lookup_keys`); raises ModelError with close matches otherwise."""
    known, key = catalog(), normalise_name(name)
    for found in lookup_keys(name):
        if found in known.by_key:
            return known[known.by_key[found]]
    if sized := _by_size(known, name):
        return sized
    close = dict.fromkeys(known.by_key[match] for match in difflib.get_close_matches(key, known.by_key, 6, 0.4))
    some = f"known are {len(known)} models, such as {', '.join(_EXAMPLES)}; the path of a config.json or GGUF will do."
    hint = f"did you mean {' or '.join(list(close)[:3])}?" if close else some
    raise ModelError(f"The model {name!r} is not in the catalog: {hint}")


def _by_size(known: Catalog, name: str) -> ModelSpec | None:
    """What a registry means that leaves out the active parameters (`qwen3:30b`) or repeats what a name says."""
    key = normalise_name(name)
    found = {model for other, model in known.by_key.items() if has_active_size(other, key)}
    if len(found) == 1:
        return known[found.pop()]
    family, billions = family_and_size(name) or ("", 0.0)
    if family in known.by_key:
        spec = known[known.by_key[family]]
        if abs(billions * 1e9 - spec.params) <= _SIZE_TOLERANCE * spec.params:
            return spec
    return None
