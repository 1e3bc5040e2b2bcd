"""What comparisons and suites say of the planted term, in the copy of the tree that has it: printed as JSON.

`tests/test_planted_term.py` runs this in the copy, after `generate` wrote the parameters of attend(). The right numbers
are computed here, in NumPy.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import numpy as np

from attention_service import assert_attention, attend, compare
from attention_service.attention.terms import CAUSES
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.inputs import make_input
from attention_service.comparison.recipes import recipe_for
from attention_service.comparison.rows import chosen_rows
from attention_service.conformance.corners import COMBINED
from attention_service.conformance.requests import Choice, make_fields
from attention_service.library import WeakInputs
from attention_service.pipeline.prepare import make_spec_and_plan

generate: Any = import_module("generate")  # openapi/generate.py of the copy
B, H, G, Q, K, D, SIZE = 2, 4, 2, 40, 67, 8, 9
OFFSETS = np.array([3, 27])


def request() -> dict[str, Any]:
    """A random request with stairs, in float32."""
    random = np.random.default_rng(0)
    shapes = {"query": (B, H, Q, D), "key": (B, G, K, D), "value": (B, G, K, D), "grad_output": (B, H, Q, D)}
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    stairs = {"size": SIZE, "slopes": random.uniform(0.1, 0.4, H), "key": random.normal(size=(H, D))}
    return {**arrays, "layout": "bhld", "query_offset": OFFSETS, "stairs": stairs}


def by_hand(fields: dict[str, Any], applied: bool, applied_back: bool) -> dict[str, np.ndarray]:
    """What a kernel returns that has the stairs, by their definition, or not: in its forward and its backward pass."""
    q, k, v, grad = (fields[name].astype(float) for name in ("query", "key", "value", "grad_output"))
    k, v = (np.repeat(array, H // G, axis=1) for array in (k, v))
    stairs, scale = fields["stairs"], D**-0.5
    back = (np.arange(Q)[:, None] + OFFSETS[:, None, None, None]) // stairs["size"] - np.arange(K) // stairs["size"]
    odd = np.arange(K) // stairs["size"] % 2
    own = stairs["key"][:, None]
    plain = np.einsum("bhqd,bhkd->bhqk", q, k)
    climbed = plain + (q * own).sum(-1, keepdims=True) * odd
    climbed = np.where(back >= 0, climbed * scale - stairs["slopes"][:, None, None] * back, -np.inf)
    scores = climbed if applied else plain * scale
    sums = np.log(np.exp(scores).sum(-1, keepdims=True))
    output = np.exp(scores - sums) @ v
    weights = np.exp((climbed if applied_back else plain * scale) - sums)
    of_scores = weights * (np.einsum("bhqd,bhkd->bhqk", grad, v) - (output * grad).sum(-1, keepdims=True)) * scale
    of_query = of_scores @ k + (of_scores * odd).sum(-1, keepdims=True) * own * applied_back
    of_key, of_value = of_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ grad
    of_key, of_value = (array.reshape(B, G, H // G, K, D).sum(2) for array in (of_key, of_value))
    found = {"output": output, "grad_query": of_query, "grad_key": of_key, "grad_value": of_value}
    found["slopes"] = -(of_scores * np.maximum(back, 0)).sum(axis=(0, 2, 3)) / scale
    found["key_of_stairs"] = ((of_scores * odd).sum(-1, keepdims=True) * q).sum(axis=(0, 2))
    return {name: array.astype(np.float32) for name, array in found.items()}


def first(report: Any) -> list[Any]:
    """The status of a report, and its first hypothesis."""
    best = report.hypotheses[0] if report.hypotheses else None
    return [report.verdict.status, *([] if best is None else [best.name, best.certainty, best.change])]


def weak(fields: dict[str, Any]) -> str:
    """What the assertion says of a right kernel whose inputs cannot show the stairs."""
    plain = {name: value for name, value in fields.items() if name != "stairs"}
    nothing = {"size": 1000, "slopes": np.zeros(H), "key": np.zeros((H, D))}
    try:
        assert_attention(attend(**plain).output, **plain | {"stairs": nothing})
    except WeakInputs as error:
        return str(error)
    return ""


def suites() -> int:
    """How many of the cases of `combined` have stairs, if requests may have no other option."""
    choice = Choice.of({"stairs", "query_offset"}, (), ())
    made = [make_fields(COMBINED, "float32", np.random.default_rng(seed), choice=choice) for seed in range(20)]
    for one in made:
        attend(**one)  # each is valid
    return sum("stairs" in one for one in made)


def rows() -> list[int]:
    """The rows that are judged of 100 queries and keys whose steps are 30 keys long."""
    arrays = {name: np.zeros((1, 2, 100, 4)) for name in ("query", "key", "value")}
    stairs = {"size": 30, "slopes": np.zeros(2), "key": np.zeros((2, 4))}
    _, plan = make_spec_and_plan(Decoded(arrays | {"stairs": stairs}, frozenset()))
    return [*map(int, chosen_rows(plan, 16))]


def pages() -> dict[str, bool]:
    """Whether the generated parts of docs and page have the term."""
    return {
        "field in docs/attention.md": "| `stairs` |" in generate.fields(),
        "bit in docs/attention.md": f"| {CAUSES['stairs'].bit} | `stairs` | on a later step |" in generate.causes(),
        "mistakes": all(f"| `{name}` |" in generate.mistakes() for name in ("stairs.absent", "grad.stairs_absent")),
        "sentence of the page": "data-stairs=" in generate.reasons(),
        "colour of the page": "--stairs: #123456;" in generate.tints(),
    }


def walk() -> dict[str, Any]:
    """What is said, by the part that says it."""
    fields = request()
    forward = {name: value for name, value in fields.items() if name != "grad_output"}
    right, forgets = by_hand(fields, True, True), by_hand(fields, True, False)
    output = {"output": right.pop("output")}
    of_stairs = {"slopes": right.pop("slopes"), "key": right.pop("key_of_stairs")}
    made, asked = make_input(recipe_for(["stairs.absent"]), 0), compare(**forward)
    return {
        "right": first(compare(output, **forward)),
        "ignored": first(compare(by_hand(fields, False, False)["output"], **forward)),
        "right gradients": first(compare({**right, "grad_stairs": of_stairs}, **fields)),
        "forgotten backwards": first(compare({name: forgets[name] for name in right}, **fields)),
        "survives": "stairs.absent" in asked.power.survivors,
        "weak": weak(forward),
        "made": {name: np.shape(value) for name, value in made.items()},
        "shown by the made input": "stairs.absent" not in compare(**made).power.survivors,
        "rows": rows(),
        "judged rows": assert_attention(output, **forward, rows=16).metadata["rows"],
        "suites": suites(),
        "pages": pages(),
    }


if __name__ == "__main__":
    print(json.dumps(walk()))
