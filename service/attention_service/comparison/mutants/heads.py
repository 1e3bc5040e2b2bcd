"""Mistakes of heads, values and outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attention_service.attention.terms.positions import Causal
from attention_service.comparison.case import Case
from attention_service.comparison.mutants.table import mutant
from attention_service.comparison.problem import Answer, Problem, sigmoid
from attention_service.comparison.sample import BLOCK
from attention_service.comparison.solve import keys_as_values


def _tiled(case: Case) -> np.ndarray:
    return np.arange(case.plan.sizes.num_heads) % case.plan.sizes.num_kv_heads


def _is_grouped(case: Case) -> bool:
    return 1 < case.plan.sizes.num_kv_heads < case.plan.sizes.num_heads


@mutant("heads.tiled", "Query head n reads key/value head n % num_kv_heads, not n // group size.")
def heads_tiled(case: Case) -> Iterator[Case]:
    if _is_grouped(case):
        yield case.changed(key_of_head=_tiled(case), value_of_head=_tiled(case))


@mutant("heads.first", "All heads read the first key/value head.")
def heads_first(case: Case) -> Iterator[Case]:
    if case.plan.sizes.num_kv_heads > 1:
        first = np.zeros(case.plan.sizes.num_heads, np.int64)
        yield case.changed(key_of_head=first, value_of_head=first)


@mutant("heads.keys_only", "Keys are those of the right head, values those of head n % num_kv_heads.")
def heads_keys_only(case: Case) -> Iterator[Case]:
    if _is_grouped(case):
        yield case.changed(value_of_head=_tiled(case))


@mutant("heads.values_only", "Values are those of the right head, keys those of head n % num_kv_heads.")
def heads_values_only(case: Case) -> Iterator[Case]:
    if _is_grouped(case):
        yield case.changed(key_of_head=_tiled(case))


@mutant("heads.kv_reversed", "The key/value heads are read in reverse order.")
def heads_kv_reversed(case: Case) -> Iterator[Case]:
    last = case.plan.sizes.num_kv_heads - 1
    if last:
        yield case.changed(key_of_head=last - case.key_of_head, value_of_head=last - case.value_of_head)


@mutant("heads.layout", "Memory that has tokens before heads is read as if heads came first.")
def heads_layout(case: Case) -> Iterator[Case]:
    sizes = case.plan.sizes
    for moved in _misread(case, ("query", "key", "value")):
        yield moved
        if case.plan.score_count <= 2 * BLOCK and sizes.num_heads > 1 and sizes.query_length > 1:  # all rows are needed
            detail = "and the output is written in the same way"
            yield moved.changed(of_whole=_unmoved, head_outputs=None, detail=detail)


def _misread(case: Case, roles: Collection[str]) -> Iterator[Case]:
    """The case whose new operands of these roles, (b, l, h, d) in memory, are taken for (b, h, l, d)."""
    if any(min(getattr(case, role).shape[1:3]) > 1 for role in roles):
        make = {role: partial(_taken, getattr(case, role)) for role in roles}
        fields: dict[str, Any] = {role: case.once(f"misread {role}", make[role]) for role in roles}
        if case.bad_values is not None and "value" in roles:
            old, new = np.split(case.bad_values, [case.past_length], axis=-1)
            fields["bad_values"] = np.concatenate([old, _taken(new[..., None])[..., 0]], axis=-1)
        yield case.changed(**fields)


for _name, _roles in {"query": ["query"], "keys": ["key"], "values": ["value"], "kv": ["key", "value"]}.items():
    _what = "keys and values" if _name == "kv" else f"the {_name}"
    _add = mutant(f"{_name}.layout", f"Memory of {_what} that has tokens before heads is read as if heads came first.")
    _add(partial(_misread, roles=_roles))


def _taken(array: np.ndarray) -> np.ndarray:
    """An operand (b, h, l, d) whose memory (b, l, h, d) is taken for (b, h, l, d)."""
    return array.swapaxes(1, 2).reshape(array.shape)


def _unmoved(outputs: np.ndarray) -> np.ndarray:
    """Outputs (b, h, q, e) whose memory is taken for (b, q, h, e)."""
    b, h, q, e = outputs.shape
    return outputs.reshape(b, q, h, e).swapaxes(1, 2)


@mutant("heads.as_tokens", "The heads of a token attend to each other: tokens are taken for heads, heads for tokens.")
def heads_as_tokens(case: Case) -> Iterator[Case]:
    sizes = case.plan.sizes
    is_square = sizes.num_heads == sizes.num_kv_heads > 1 and 1 < sizes.query_length == sizes.key_length
    is_small = sizes.batch_size * sizes.query_length * sizes.num_heads**2 <= 2 * BLOCK
    is_small = is_small and sizes.num_heads <= 2 * sizes.key_length  # takes no more than the scores of the case
    is_plain = not (case.past_length or any(case.steps.values()) or case.sinks is not None or case.softcap)
    is_plain = is_plain and case.bad_values is None and not isinstance(case.scale, np.ndarray)
    if is_square and is_small and is_plain and case.plan.normalization == "softmax":
        for is_causal in (False, True) if case.term(Causal) else (False,):
            if all(isinstance(term, Causal) for term in case.terms):
                detail = "which are causal" if is_causal else ""
                yield case.changed(of_whole=partial(_across_heads, case, is_causal), detail=detail)


def _across_heads(case: Case, is_causal: bool, _: np.ndarray) -> np.ndarray:
    """Attention of the heads of each token to each other, (b, h, q, e)."""
    query, key, value = (getattr(case, role).swapaxes(1, 2) for role in ("query", "key", "value"))
    scores = query @ key.swapaxes(-1, -2) * case.scale  # b q h h
    if is_causal:
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: np.ndarray = weights / weights.sum(axis=-1, keepdims=True) @ value
    return found.swapaxes(1, 2)


def permuted(case: Case, order: np.ndarray) -> Case:
    """The case whose head n returns what head order[n] should."""
    return case.changed(head_order=case.head_order[order])


@mutant("heads.reversed", "The heads are returned in reverse order.")
def heads_reversed(case: Case) -> Iterator[Case]:
    heads = case.plan.sizes.num_heads
    if heads > 1:
        yield permuted(case, np.arange(heads)[::-1])


@mutant("value.transposed", "The values are read as if keys and features were swapped.")
def value_transposed(case: Case) -> Iterator[Case]:
    if case.plan.sizes.key_length == case.plan.sizes.value_dim > 1 and not case.past_length:
        yield case.changed(value=case.value.swapaxes(-1, -2))


@mutant("value.is_key", "The keys are used as values.")
def value_is_key(case: Case) -> Iterator[Case]:
    if case.plan.sizes.head_dim != case.plan.sizes.value_dim:
        return
    if np.array_equal(case.key, case.value) and np.array_equal(case.past_key, case.past_value):
        return
    yield case.changed(value=case.key, past_value=case.past_key, bad_values=None)
    if case.steps["key"]:
        yield case.changed(
            value=keys_as_values(case),
            past_value=case.past_key,
            steps={**case.steps, "value": ()},
            bad_values=None,
            detail="prepared",
        )


@mutant("output.packed", "The output has its heads and features swapped: (d, h) where (h, d) is right.")
def output_packed(case: Case) -> Iterator[Case]:
    h, _, _, _, _, _, e = case.plan.sizes
    if h > 1 and e > 1 and not case.needs_all_heads:

        def packed(outputs: np.ndarray) -> np.ndarray:
            b, _, q, _ = outputs.shape
            return outputs.transpose(0, 2, 3, 1).reshape(b, q, h, e).transpose(0, 2, 1, 3)

        yield case.changed(of_whole=packed)


@mutant("output.unmoved", "The output has heads before tokens in memory where tokens come first.")
def output_unmoved(case: Case) -> Iterator[Case]:
    if case.plan.sizes.num_heads > 1 and case.plan.sizes.query_length > 1:
        yield case.changed(of_whole=_unmoved)


def _instead(fill: Callable[[Problem], np.ndarray]) -> Callable[[Problem, Answer], Answer]:
    def edited(problem: Problem, answer: Answer) -> Answer:
        return replace(answer, output=np.broadcast_to(fill(problem), answer.output.shape))

    return edited


@mutant("output.zeros", "The output is 0 everywhere.")
def output_zeros(case: Case) -> Iterator[Case]:
    yield case.edited(_instead(lambda problem: np.zeros((1, 1, 1, 1), problem.value.dtype)))


@mutant("output.mean_value", "The output is the mean of all values: neither query nor key is read.")
def output_mean_value(case: Case) -> Iterator[Case]:
    yield case.edited(_instead(lambda problem: problem.value.mean(axis=2, keepdims=True)))


@mutant("gate.absent", "The head outputs are not multiplied by the gates.")
def gate_absent(case: Case) -> Iterator[Case]:
    if case.gate is not None:
        yield case.changed(None if case.spec.gate is None else {"gate": None}, gate=None)


@mutant("gate.activated_again", "The sigmoid is taken of gates that are activated already.")
def gate_activated_again(case: Case) -> Iterator[Case]:
    if case.gate is not None:
        yield case.changed(gate=sigmoid(case.gate))
