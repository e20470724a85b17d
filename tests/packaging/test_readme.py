"""Do the commands that the README shows exist?"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from membound.roofline.validation.tables import END_TO_END_COLUMNS
from membound.simulator.scheduling.workload.trace_formats import FORMATS

READMES = ("README.md", "README.zh-CN.md")


def commands(readme: Path, program: str) -> set[tuple[str, ...]]:
    """What follows `program` in code, up to a placeholder, an option or a comment."""
    text = readme.read_text("utf-8")
    code = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    code = re.sub("#.*", "", code)
    found = set()
    for rest in re.findall(rf"(?:^|[\s/]){program} ([^\n]*)", code, re.MULTILINE):
        words = []
        for word in rest.split():
            if not re.fullmatch(r"[a-z][a-z0-9-]*", word):
                break
            words.append(word)
        if words:
            found.add(tuple(words))
    return found


@pytest.mark.parametrize("name", READMES)
def test_make_targets_exist(name: str, root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text("utf-8"), re.MULTILINE))
    used = {words[0] for words in commands(root / name, "make")}
    assert {"dashboard", "test"} <= used <= targets


@pytest.mark.parametrize("name", READMES)
def test_sub_commands_and_scenarios_exist(name: str, root: Path, run: Callable[..., Any], membound: Path) -> None:
    used = commands(root / name, "membound")
    assert used
    help_text = run(membound, "--help", env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout
    known = set(re.findall(r"^[\s│|]*([a-z-]+)\s{2,}", help_text, re.MULTILINE))
    assert {words[0] for words in used} <= known
    scenarios = {path.stem for path in (root / "data" / "scenarios").glob("*.yaml")}
    # Commands of their own below a name.
    groups = {
        "kernels": {"check", "bench", "resources"},
        "catalog": {"techniques", "profiles", "devices", "models"},
        "experiment": {"x1", "x2", "x3", "x4", "x5"},
    }
    for name, *words in used:
        assert set(words[:1]) <= groups.get(name, scenarios)


def test_both_languages_show_the_same_commands(root: Path) -> None:
    english, chinese = (root / name for name in READMES)
    for program in ("make", "membound"):
        assert commands(english, program) == commands(chinese, program)


def test_the_example_in_python_runs(root: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (root / "app" / "COMMANDS.md").read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "COMMANDS.md", "exec"), names)
    gains = names["gains"]
    assert gains.shape == (3, 9, 50)
    assert (gains[0] == 1).all() and (gains[1:, 0] > 1).all()


@pytest.mark.parametrize("name", READMES)
def test_the_question_that_is_shown_is_answered_in_python(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (root / name).read_text("utf-8")
    (question,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my.yaml").write_text(question, "utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, name, "exec"), names)
    assert names["point"].batch == 32 and names["point"].time_s > 0


def test_the_columns_that_commands_take_are_documented(root: Path) -> None:
    words = (root / "app" / "COMMANDS.md").read_text("utf-8")
    plain = next(form for form in FORMATS if form.name == "vidur")
    assert not [column for column in (*END_TO_END_COLUMNS, *plain.columns) if f"`{column}`" not in words]
