"""Does the interface say the same in both languages, and nothing outside them? Do numbers carry the right units?"""

from __future__ import annotations

import ast
import json
import re
import string
from pathlib import Path

import pytest

from membound.app import text
from membound.app.i18n import LANGUAGES, Translate, language_of, sentences
from membound.app.views.tables import VERDICT_MARKS
from membound.roofline.results.result import BOUNDS

APP = Path(__file__).parents[2] / "app"
SOURCES = [
    *sorted((APP / "views").glob("*.py")),
    *sorted((APP / "figures").glob("*.py")),
    APP / "main.py",
    APP / "run_files.py",
]
# terms of techniques stay English; a language may add a translation in brackets
OPTIONAL = "technique."
UNITS = {"FLOP", "byte", "GiB", "tok"}
SHOWS = {
    "button",
    "caption",
    "checkbox",
    "download_button",
    "error",
    "expander",
    "file_uploader",
    "header",
    "info",
    "markdown",
    "metric",
    "page_link",
    "pills",
    "segmented_control",
    "selectbox",
    "slider",
    "subheader",
    "success",
    "text",
    "text_area",
    "text_input",
    "title",
    "toggle",
    "warning",
    "write",
}


def _keys(language: str) -> set[str]:
    return {key for key in sentences(language) if not key.startswith(OPTIONAL)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_key_stands_once(language: str) -> None:
    """JSON takes the last of equal keys without a word."""
    text = (APP / "i18n" / f"{language}.json").read_text("utf-8")
    keys = json.loads(text, object_pairs_hook=lambda pairs: [key for key, _ in pairs])
    assert len(keys) == len(set(keys)) > 1000


def _placeholders(sentence: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name is not None}


def test_every_language_has_the_same_keys() -> None:
    for language in LANGUAGES:
        assert _keys(language) == _keys("en")


def test_every_sentence_has_the_same_placeholders() -> None:
    for language in LANGUAGES:
        for key in _keys("en"):
            assert _placeholders(sentences(language)[key]) == _placeholders(sentences("en")[key]), (language, key)


def test_every_key_that_the_code_names_exists_and_every_sentence_is_used() -> None:
    code = "\n".join(source.read_text("utf-8") for source in SOURCES)
    named = set(re.findall(r"""\bt\(\s*["']([\w. ]+)["'](?!["'])""", code))
    named |= set(re.findall(r'"([a-z]+\.[a-z_]+)"', code))
    prefixes = tuple(set(re.findall(r"""\bt\(\s*f["']([a-z]+\.(?:[a-z_]+_)?)\{""", code)))
    for source in SOURCES:  # the fields of a form, and the words of their options
        page = re.search(r'^PAGE = "(\w+)"', source.read_text("utf-8"), re.MULTILINE)
        keys = re.findall(r'fields\.\w+\(\s*PAGE,\s*"(\w+)"', source.read_text("utf-8"))
        prefixes += tuple(f"{page.group(1)}.{key}" for key in keys if page is not None)
    known = _keys("en")
    assert {key for key in named if key.split(".")[0] in {k.split(".")[0] for k in known if "." in k}} <= known
    unused = {key for key in known if key not in named and not key.startswith(prefixes)}
    assert not unused


def test_every_bound_and_verdict_can_be_said() -> None:
    for language in LANGUAGES:
        t = Translate(language)
        assert all(t(f"bound.{bound}") for bound in BOUNDS)
        assert all(t(f"verdict.{verdict}") for verdict in VERDICT_MARKS)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_page_shows_a_bare_string(source: Path) -> None:
    bare = []
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in SHOWS
            and node.args
        ):
            words = {word for literal in _literals(node.args[0]) for word in re.findall(r"[^\W\d_]{2,}", literal)}
            if words - UNITS and source.name != "main.py":
                bare.append((node.lineno, words))
    assert not bare


def _literals(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant)]
    return []


def test_a_browser_in_chinese_gets_chinese_and_any_other_english() -> None:
    assert [language_of(locale) for locale in ("zh-CN", "zh", "zh-TW", "en-US", "de", None)] == ["zh"] * 3 + ["en"] * 3


def test_bandwidth_is_decimal_and_memory_binary() -> None:
    assert text.bandwidth(3.35e12) == "3,350 GB/s"
    assert text.gib(80 * 2**30) == "80.0 GiB"
    assert text.gib(5 * 2**20) == "5.00 MiB"
    assert text.moved(17.2e9) == "17.2 GB"


def test_numbers_keep_three_digits_and_a_unit() -> None:
    assert [text.seconds(value) for value in (2.5, 0.0123, 4.56e-5, 7e-9)] == [
        "2.50 s",
        "12.3 ms",
        "45.6 µs",
        "7.00 ns",
    ]
    assert text.flop_rate(1.234e12) == "1.23 TFLOP/s"
    assert text.gain(1.8333) == "1.83×"
    assert text.signed_percent(-0.031) == "−3.1 %"
    assert text.rate(1095.4) == "1,095 tok/s"
    assert text.digits(0.0) == "0"
