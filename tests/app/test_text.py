"""Do words that somebody else wrote stay the words that they are?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from membound.app.text import plain

# Markdown as pages show it: with tables, lines through words, and what HTML there is taken as HTML.
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
MARKED = ("![x](http://evil/p.png)", "[here](http://evil)", "<img src=x>", "`code`", "**b** _i_ ~~s~~", "&lt;b&gt;")
LINES = ("# big", "- one", "1. one", "a\n===", "> said", "a\n- b", "|a|\n|-|\n|b|", "---")


@pytest.mark.parametrize("words", [*MARKED, *LINES])
def test_markdown_is_shown_and_not_followed(words: str) -> None:
    assert shown(plain(words)) == unbroken(words)
    assert shown(words) != unbroken(words), "it would be followed"


@given(st.text(alphabet="ab1 \n![]()*_`<>#&;|~\\$:.+-=/", max_size=40))
def test_any_words_are_shown_as_they_are(words: str) -> None:
    assert shown(plain(unbroken(words))) == unbroken(words)


@pytest.mark.parametrize("words", ["a costs $3 and b $4", ":red[hot]", ":material/error: it", "12:abc"])
def test_what_only_streamlit_takes_for_a_sign_is_escaped(words: str) -> None:
    assert plain(words).replace("\\", "") == words and "\\" in plain(words)


def test_words_that_mean_themselves_stay_untouched() -> None:
    for words in (
        "field 'workload.output_tokens' is -1; give 1 or more",
        "1.5 ms of 2 (75 %), a-b at 10:30",
        "没有 GPU",
    ):
        assert plain(words) == words


def shown(markdown: str) -> str:
    """The text of Markdown that is one paragraph, with the names of whatever else it is in brackets."""
    tokens = [token for token in MARKDOWN.parse(markdown) if not token.type.startswith("paragraph")]
    parts = [part for token in tokens for part in (token.children or [token])]
    return "".join(
        {"text": part.content, "text_special": part.content, "softbreak": "\n"}.get(part.type, f"({part.type})")
        for part in parts
    )


def unbroken(words: str) -> str:
    """Words as one paragraph: no empty line, and no blanks at the ends of lines, which Markdown drops."""
    return "\n".join(line.strip(" ") for line in words.split("\n") if line.strip(" "))
