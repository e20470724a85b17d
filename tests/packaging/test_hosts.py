"""Does the repository leave it to the user's own settings where packages and models come from?"""

from __future__ import annotations

import re
from pathlib import Path

# spelled in pieces, so that this file does not name them
REGISTRIES = (
    r"py" r"pi\.(python\.)?org",
    r"python" r"hosted\.org",
    r"download\.py" r"torch\.org",
    r"pypi\.nv" r"idia\.com",
    r"npm" r"js\.(org|com)",
    r"(deb|security|ftp)\.deb" r"ian\.org",
    r"ana" r"conda\.(org|com)",
)
HUBS = (r"hugging" r"face\.co", r"\bhf\.co\b", r"hf-mirror\.com", r"model" r"scope\.cn")


def named(pattern: tuple[str, ...], files: list[Path], root: Path) -> list[str]:
    search = re.compile("|".join(pattern), re.IGNORECASE)
    found = []
    for path in files:
        for number, line in enumerate((root / path).read_text("utf-8", errors="ignore").splitlines(), 1):
            if search.search(line):
                found.append(f"{path}:{number}")
    return found


def test_no_package_registry_is_named(root: Path, repository_files: list[Path]) -> None:
    assert named(REGISTRIES, repository_files, root) == []


def test_model_hubs_are_named_as_sources_only(root: Path, repository_files: list[Path]) -> None:
    elsewhere = [path for path in repository_files if path.parts[0] != "data" and path.suffix != ".md"]
    assert named(HUBS, elsewhere, root) == []
