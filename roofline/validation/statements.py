"""What do the texts of a row say: lengths, a batch, and the numbers in its notes?

Only the forms that published tables use mean something; a text of another form is refused, never read in part.
"""

from __future__ import annotations

import re

from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelSpec
from membound.roofline.validation.tables import Row, number

# Mean prompt lengths of data sets that tables name instead of a length. MLPerf: the means of its published sets
# (OpenOrca 294 in and out; CNN/DailyMail 870 in, 128 out at most; the mixed set of Mixtral). The others are assumed.
DATASET_TOKENS = {
    "openorca": 294.0,
    "gpqa": 250.0,
    "lm-arena-chat": 120.0,
    "sourcegraph-fim": 900.0,
    "mt-bench": 200.0,
    "sharegpt": 220.0,
    "cnn": 870.0,
    "dataset": 294.0,
}
# Published runs go up to 5 times the context that a model was made for (8192 tokens after 512 on BLOOM's 2048).
# Up to a million tokens it may be more than that; beyond, only what the model was made for.
_CONTEXTS, _LONG = 8.0, 2.0**20
# The words for a batch that is not stated as a number: as many sequences as fit, and what a server's load makes of it.
AS_MANY_AS_FIT, SERVED = ("", "max", "max that fits"), ("server-load",)
_MOST_SEQUENCES = 1e6


def tokens(row: Row, column: str, default: float, model: ModelSpec) -> float:
    """A length in tokens: a number, an approximate one (`~294 (mean)`), or a data set's name; 1 for a prompt of 0.

    Raises MemboundError for any other text and for more tokens than the model could have in its context.
    """
    text = row.text(column)
    if not text:
        return default
    name = text.lower().removesuffix(" dataset")
    if name in DATASET_TOKENS:
        return DATASET_TOKENS[name]
    about = re.fullmatch(r"~([^\s()]+)( \(.*\))?", text)
    stated = about.group(1) if about else text
    if not re.match(r"[+-]?\.?\d", stated):
        names = ", ".join(DATASET_TOKENS)
        raise MemboundError(f"{row.at(column)} is '{text}'; it must be a number of tokens or one of {names}")
    least = 0.0 if column == "input_len" else 1.0
    most = max(model.max_context, min(_CONTEXTS * model.max_context, _LONG))
    return max(number(stated, row.at(column), least=least, most=most), 1.0)


def batch(row: Row) -> float | None:
    """The batch or concurrency where it is a number, None where it is left to the engine or not stated."""
    text = row.text("batch_or_concurrency")
    if text in (*AS_MANY_AS_FIT, *SERVED):
        return None
    if not re.match(r"[+-]?\.?\d", text):
        words = ", ".join(word for word in (*AS_MANY_AS_FIT, *SERVED) if word)
        raise MemboundError(f"{row.at('batch_or_concurrency')} is '{text}'; it must be a number from 1, or {words}")
    return number(text, row.at("batch_or_concurrency"), least=1.0, most=_MOST_SEQUENCES)


def noted(
    row: Row, *phrases: str, least: float = 1.0, most: float = _MOST_SEQUENCES, whole: bool = False
) -> float | None:
    """The number behind the first of `phrases` in the notes, None where none has one behind it.

    The number goes on to the next blank, semicolon, bracket or comma that no digit follows; the full stop of a sentence
    does not belong to it.
    """
    named = "|".join(re.escape(phrase) for phrase in phrases)
    found = re.search(rf"(?<![A-Za-z_])({named}) ?([-+~]?\.?\d(?:[^\s;,()]|,(?=\d))*)", row.text("notes"))
    if not found:
        return None
    stated = found.group(2).rstrip(".:")
    return number(stated, row.at(f"'{found.group(1)}' in notes"), least=least, most=most, whole=whole)
