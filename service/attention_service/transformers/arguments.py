"""The arguments of `capture`, checked before a model runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final, get_args

import torch

from attention_service.attention.spec import Output
from attention_service.errors import quote

NAMES: Final[tuple[str, ...]] = get_args(Output)


def indices(argument: str, given: Any) -> list[int] | None:
    """The indices that an argument lists; None for all. Errors: TypeError, ValueError for an empty list."""
    if given is None:
        return None
    expected = f"{argument}: expected a list of integers"
    found = [_index(expected, item) for item in _items(expected, given)]
    if not found:
        raise ValueError(f"{argument}: expected at least one index, or None for all, got an empty list")
    return found


def names(given: Any) -> list[str]:
    """The names of what to keep. Errors: TypeError, ValueError for a name that the service has not."""
    expected = f"include: expected a list of the names {', '.join(NAMES)}"
    found = _items(expected, given)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{expected}; got {_said(name)} in it")
        if name not in NAMES:
            raise ValueError(f"{expected}; got {_said(name)}")
    return found


def labels(argument: str, given: Any) -> tuple[list[list[str]], bool]:
    """The labels of the tokens: a list for each batch entry, or one and True if it is for all. Errors: TypeError."""
    if given is None:
        return [], True
    expected = f"{argument}: expected a list of strings, or one for each batch entry"
    found = _items(expected, given)
    is_for_all = not found or isinstance(found[0], str)
    batches = [found] if is_for_all else [_items(expected, entry) for entry in found]
    for label in (label for entry in batches for label in entry):
        if not isinstance(label, str):
            raise TypeError(f"{expected}; got {_said(label)} in it")
    return batches, is_for_all


def modules(model: Any) -> dict[Any, str] | None:
    """The names of the modules of a model; None for every model. Errors: TypeError."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, or None for every model that runs; got {_said(model)}")
    return None if model is None else {module: name for name, module in model.named_modules()}


def from_start(argument: str, given: Iterable[int], count: int, what: str) -> list[int]:
    """Indices of which negative ones count from the end, as ones from 0.

    what: has `count` of them, in words

    Errors: IndexError for one that is not there.
    """
    for index in given:
        if not -count <= index < count:
            raise IndexError(f"{argument}: {what} has the {argument} 0 to {count - 1}, or -{count} to -1; got {index}")
    return [index % count for index in given]


def count_layers(model: Any) -> int:
    """The number of layers of a model, from whose end negative indices count. Errors: ValueError if it is not known."""
    needed = "layers: negative ones count from the end of a model"
    if model is None:
        raise ValueError(f"{needed}; say which by capture(model=…)")
    numbers = [number for module in model.modules() if isinstance(number := getattr(module, "layer_idx", None), int)]
    configured = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    count = max(numbers) + 1 if numbers else configured
    if not isinstance(count, int):
        raise ValueError(f"{needed}, and {type(model).__name__} does not tell how many it has; use indices from 0")
    return count


def _items(expected: str, given: Any) -> list[Any]:
    """The items of a list, or of what is like one. Errors: TypeError for a string, which is one of characters."""
    if not isinstance(given, str | bytes):
        try:
            return list(given)
        except TypeError:
            pass
    raise TypeError(f"{expected}; got {_said(given)}")


def _index(expected: str, item: Any) -> int:
    """An integer of Python, NumPy or torch. Errors: TypeError, also for a boolean: a mask is no list of indices."""
    is_boolean = isinstance(item, bool) or getattr(item, "dtype", None) == torch.bool
    try:
        if not is_boolean:
            return operator.index(item)
    except TypeError:
        pass
    raise TypeError(f"{expected}; got {_said(item)} in it")


def _said(given: Any) -> str:
    """What was given, in a few words."""
    return f"string {quote(given)}" if isinstance(given, str) else f"{type(given).__name__} {quote(repr(given))}"
