"""Import: a layer from a checkpoint of another library."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import numpy as np

from attention_service.codecs.named_tensors import nested
from attention_service.errors import quote
from attention_service.layers.checkpoint import Checkpoint
from attention_service.layers.families import FAMILIES, Family
from attention_service.layers.models import MODELS, Model, check_options
from attention_service.layers.module import Module, find_module, layer_number
from attention_service.layers.tensors import BadFile
from attention_service.printable import printable

# Rows of rotary tables, unless the command says otherwise, or the model has fewer positions.
POSITIONS: Final = 8192
# Rows that a command may ask for: those of a head of 128 features take 1 GiB, and four times that while they are made.
MAX_POSITIONS: Final = 2**20
OTHER_SENSES: Final = re.compile("vision|visual|audio")


@dataclass(frozen=True)
class Imported:
    """A layer that was imported: its arrays by dotted names, its options, and where it comes from."""

    arrays: Mapping[str, np.ndarray]
    options: Mapping[str, Any]
    source: str


def import_layer(
    path: Path,
    layer: int | None,
    *,
    family: str | None = None,
    prefix: str | None = None,
    heads: int | None = None,
    positions: int | None = None,
    progress: Callable[[str, int], None] = lambda name, size: None,
) -> Imported:
    """An attention layer of a checkpoint.

    layer: its index, from the end if it is negative; None for a checkpoint that is one module
    family: a name of FAMILIES; by default that of config.json
    prefix: how the names of its tensors begin, where several modules fit
    heads: where the checkpoint does not say it; positions: rows of rotary tables, where a base is not enough

    Errors: BadFile with the reason, OSError.
    """
    if heads is not None and heads < 1:
        raise BadFile(f"--heads: expected at least 1, got {heads}")
    with Checkpoint(path) as checkpoint:
        whole = checkpoint.configuration or {}
        text = whole.get("text_config")
        configuration = text if isinstance(text, dict) else whole
        kind = FAMILIES[family] if family is not None else family_of(configuration)
        names, where = _names(checkpoint, text), _place_of(kind, layer)
        layer = layer_number(names, *where, layer, prefix)
        place = find_module(names, *where, layer, prefix)
        model = _model_of(configuration, kind)
        if kind.model_types:
            _check_not_quantized(whole, place)
            check_options({**configuration, "quantization_config": None}, model.options)
        module = Module(
            checkpoint,
            place,
            layer,
            model=model,
            options=configuration,
            heads=heads,
            positions=_positions(positions, configuration.get("max_position_embeddings")),
            progress=progress,
        )
        options = kind.fields(module)
    at = printable(f"{place.rstrip('.') or 'the module'} of {path.resolve().name}")
    rows = module.arrays.get("rotary.cos")
    tables = "" if rows is None else f" Rotary tables for {len(rows)} positions."
    return Imported(module.arrays, nested(options), f"{kind.title}: {at}. What enters: {kind.enters}.{tables}")


def _names(checkpoint: Checkpoint, text: Any) -> list[str]:
    """The names of the tensors; of a model with a configuration for text, without those of what sees or hears."""
    return [name for name in checkpoint.names if not (isinstance(text, dict) and OTHER_SENSES.search(name))]


def _place_of(family: Family, layer: int | None) -> tuple[str, str]:
    """The place of a module, and a tensor in it. A module of torch may be one of several layers, or alone."""
    alone = not family.module and layer is not None
    return ("layers.{layer}.self_attn" if alone else family.module), family.first


def family_of(configuration: Mapping[str, Any]) -> Family:
    """The family of a configuration. Errors: BadFile for none that is known."""
    given = configuration.get("model_type")
    for family in FAMILIES.values():
        if given in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.model_types)
    got = "none" if given is None else quote(str(given))
    raise BadFile(f"config.json: model_type {got} is not known; say --family, or import one of {known}")


def _model_of(configuration: Mapping[str, Any], family: Family) -> Model:
    """What the configuration can say; if it is of another family than it is imported as, what the first of that can."""
    given = configuration.get("model_type")
    return MODELS[given if given in family.model_types else family.model_types[0]] if family.model_types else Model({})


def _positions(given: int | None, most: Any) -> int:
    """The rows of rotary tables. given: by the command; most: of the model. Errors: BadFile."""
    if given is None:
        return min(POSITIONS, most if isinstance(most, int) and most > 0 else POSITIONS)
    if not 0 < given <= MAX_POSITIONS:
        raise BadFile(f"--positions: expected 1 to {MAX_POSITIONS}, got {quote(str(given))}")
    return given


def _check_not_quantized(configuration: Mapping[str, Any], place: str) -> None:
    """Errors: BadFile for a quantized checkpoint, unless it says that the module is left as it is."""
    for key in ("quantization_config", "compression_config"):
        given = configuration.get(key)
        left = given.get("modules_to_not_convert") if isinstance(given, dict) else None
        if given and not any(fnmatch(place.rstrip("."), str(name)) for name in left or ()):
            raise BadFile(f"config.json: {key}: quantized weights cannot be imported")
