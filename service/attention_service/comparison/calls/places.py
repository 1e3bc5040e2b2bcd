"""Where the answer of a call is wrong: sequences, heads and queries of all of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from attention_service.comparison.actual import canonical
from attention_service.comparison.engine.comparison import Comparison
from attention_service.comparison.errors import distances
from attention_service.comparison.places import place_of, worst
from attention_service.comparison.truth import Question
from attention_service.comparison.wrong import NOUNS
from attention_service.engines.call import Call
from attention_service.schemas.compare import Place, WorstElement

AXES = ("sequence", "head", "query", "feature")


@dataclass
class WrongPlaces:
    """Where an array is wrong, gathered part by part.

    sequences, heads, queries: True where a number is; count: of such numbers; elements: the worst of the worst part
    """

    call: Call
    array: str
    sequences: np.ndarray = field(init=False)
    heads: np.ndarray = field(init=False)
    queries: np.ndarray = field(init=False)
    count: int = 0
    ratio: float = 0.0
    elements: list[WorstElement] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = self.call.query.lengths
        self.sequences = np.zeros(len(lengths), bool)
        self.heads = np.zeros(self.call.query.heads, bool)
        self.queries = np.zeros(int(lengths.max(initial=0)), bool)

    def add(self, part: np.ndarray, found: Comparison[Question]) -> None:
        """Add the places of a part whose array is wrong. part: its sequences"""
        name, plan = self.array, found.question.plan
        sent = canonical((found.question.actual or {})[name].astype(np.float64), name, plan)
        expected = canonical(found.reference[name], name, plan)
        unit = np.log(2) if name == "logsumexp" and found.question.base2 else 1.0
        wrong = distances(sent * unit, expected) > found.judged[name].element_limits
        self.count += int(np.count_nonzero(wrong))
        rows: np.ndarray = np.any(wrong.reshape(*wrong.shape[:3], -1), axis=-1)
        self.sequences[part[rows.any(axis=(1, 2))]] = True
        self.heads |= rows.any(axis=(0, 2))
        self.queries[: rows.shape[-1]] |= rows.any(axis=(0, 1))
        if found.judged[name].ratio >= self.ratio:
            self.ratio, self.elements = found.judged[name].ratio, worst(sent, expected / unit)
            for one in self.elements:
                one.index[0] = int(part[one.index[0]])

    @property
    def worst_sequence(self) -> int:
        """The sequence with the largest error."""
        return self.elements[0].index[0]

    def places(self) -> list[Place]:
        """The places, first in a sentence that names the worst."""
        if not self.count:
            return []
        call, name = self.call, self.array
        size = int(call.query.lengths.sum()) * call.query.heads * (1 if name == "logsumexp" else call.value.features)
        sequence, head, query, *_ = self.elements[0].index
        message = (
            f"{self.count} of {size} elements of {NOUNS.get(name, name)} ({self.count / size:.1%}) are wrong, worst in "
            f"sequence {sequence} of {len(self.sequences)}, head {head}, query {query}"
        )
        sent, right = np.array([self.elements[0].actual, self.elements[0].reference], np.float64)
        if not (np.isfinite(sent) and np.isfinite(right)):
            message += f": {sent:.6g} where {right:.6g} is right"
        axes = list(AXES[: 3 + (name == "output")])
        first = Place(array=name, what="elements", message=message, axes=axes, worst=self.elements)
        masks = zip(AXES, (self.sequences, self.heads, self.queries), strict=False)
        parts = [(axis, mask) for axis, mask in masks if not mask.all()]
        return [first, *(place_of(name, axis, np.flatnonzero(mask), len(mask)) for axis, mask in parts)]
