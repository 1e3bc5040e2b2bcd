"""Score terms: everything that hides scores or adds to them, one class each.

A key is visible to a query only if every term allows it. What terms add is added to the scaled and capped scores; what
they multiply with queries, to the products of query and key.

To add a term write a class with `field`, `of` and `example`, and with `visible` and `cause`, `added` or `products`, and
put it into the TERMS of its module. The dense backend, the cost model, the tiles and the comparison use nothing but
these. Fast paths refuse it until they are taught.

Shapes in comments: b batch, h heads, r the queries of a tile, k its keys. `load` takes a NumPy array to the library
and device of the backend; arrays that it returns know comparison, `&`, `~`, arithmetic and `abs`.
"""

from __future__ import annotations

from typing import Final

from attention_service.attention.score_term import Frame, ScoreTerm
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.terms import additions, masks, positions, relative, selected

# In the order in which they are made, and in which their errors are found.
TERMS: Final[tuple[type[ScoreTerm], ...]] = (
    *relative.TERMS,
    *additions.TERMS,
    *masks.TERMS,
    *positions.TERMS,
    *selected.TERMS,
)
# By the field that hides a key, in the order of their bits.
CAUSES: Final = dict(
    sorted(((kind.field, kind.cause) for kind in TERMS if kind.cause is not None), key=lambda named: named[1].bit)
)
# The fields that make terms, and those of them whose meaning `query_offset` changes.
FIELDS: Final = frozenset(kind.field for kind in TERMS)
POSITIONAL: Final = frozenset(kind.field for kind in TERMS if kind.reads_offset)


def make_terms(spec: AttentionSpec, frame: Frame) -> tuple[ScoreTerm, ...]:
    """The terms of a request. Errors: InvalidRequest of every kind."""
    if spec.query_offset is not None:
        frame.offset(spec)  # a wrong offset is refused even if no term needs it
    return tuple(term for kind in TERMS if (term := kind.of(spec, frame)) is not None)
