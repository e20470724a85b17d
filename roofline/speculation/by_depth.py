"""How right are guesses further ahead, or those of another tree, against the ones that a profile describes?

A profile says how predictable content is, position by position, as tables of accepted tokens give it: for all guesses
of the tree with which they were made. What differs from drafter to drafter is here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest

from membound.roofline.speculation.token_tree import RANK_EXPONENT
from membound.roofline.techniques.drafts import Drafts

# Nodes of the trees with which the tables of accepted tokens were made: EAGLE's paper and Medusa's (from memory).
TABLED_NODES = {"eagle": 25, "medusa": 63}


@lru_cache(maxsize=1024)
def shares_by_depth(drafts: Drafts) -> tuple[float, ...]:
    """How many times as often as the profile says a guess at depth 1, 2 .. is right, where all before it were.

    Against the tree of the tables, with guesses that are as right at each depth as at the first: smaller trees and
    heads that see less far accept less of the same content, larger trees more.
    """
    # Those of the tables are fixed, so that what a tree gains that grows is not among what they say.
    drafts = replace(drafts, rank_exponent=min(drafts.rank_exponent, RANK_EXPONENT))
    nodes = None if drafts.nodes is None else max(drafts.gamma, TABLED_NODES[drafts.kind])
    tabled = replace(drafts, nodes=nodes, decay=1.0).tree.conditional_by_depth
    own = drafts.tree.conditional_by_depth
    return tuple(here / there if there else 1.0 for here, there in zip_longest(own, tabled[: len(own)], fillvalue=0.0))
