"""What all models of requests have in common: no unknown fields, no conversion of types, plain values."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from attention_service.attention import spec
from attention_service.attention.arrays import MAX_TEXT, is_number
from attention_service.errors import child, describe
from attention_service.schemas.arrays import invalid_array


def too_long(at: str = "") -> PydanticCustomError:
    """The error for a text of more than MAX_TEXT characters, at a place in the value."""
    texts = {"expected": f"text of at most {MAX_TEXT} characters", "got": "more", "at": at, "hint": ""}
    return PydanticCustomError("invalid_value", "{expected}", texts)


def shortened(schema: dict[str, Any]) -> None:
    """Leave the first sentence of the descriptions of fields in a schema, and of their defaults but none.

    docs/ and the functions of the library have the whole descriptions. Of a gradient the name says enough.
    """
    for name, field in schema.get("properties", {}).items():
        if "description" in field:  # a reference to a model has none yet
            meaning, _, default = " ".join(field["description"].split()).partition(" Default: ")
            sentences = [meaning, f"Default: {default}"] if default and not default.startswith("none") else [meaning]
            field["description"] = " ".join(f"{text.partition('. ')[0].rstrip('.')}." for text in sentences)
            if field["description"] == f"Gradient of {name.removeprefix('grad_')}.":
                del field["description"]


def _kinds(annotation: Any) -> set[Any]:
    """The types that a field takes beside None; Literal for a choice of names."""
    types = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = (get_args(one)[0] if get_origin(one) is Annotated else one for one in types)
    return {get_origin(one) or one for one in plain if one is not NoneType}


class Closed(BaseModel):
    """A model that refuses unknown fields and converts no types: a number is not a string.

    elsewhere: names of fields that other operations have, each with a hint that says so
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra=shortened,
    )

    elsewhere: ClassVar[dict[str, str]] = {}
    # The fields that take one value, and those of them that take an integer.
    _single: ClassVar[frozenset[str]] = frozenset()
    _whole: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        kinds = {name: _kinds(field.annotation) for name, field in cls.model_fields.items()}
        cls._single = frozenset(name for name, found in kinds.items() if found <= {bool, int, float, str, Literal})
        cls._whole = frozenset(name for name in cls._single if kinds[name] == {int})

    @model_validator(mode="before")
    @classmethod
    def _unwrap_single_values(cls, fields: Any) -> Any:
        """The fields with plain values where arrays or lists of one value stand for these, and integers for 1.0.

        npz and safetensors have no other numbers than arrays, R writes each as a list, and to JSON Schema 1.0 is an
        integer. Errors: PydanticCustomError for a code, which float() makes a number of.
        """
        if not isinstance(fields, dict):
            return fields
        unwrapped: dict[str, Any] = {}
        for name, value in fields.items():
            plain = value
            if isinstance(value, np.ndarray) and value.size == 1 and (name in cls._single or not value.ndim):
                if value.dtype != bool and not is_number(value.dtype):
                    raise invalid_array("a number", describe(value), child("", name))
                plain = value.item() if name in cls._single else value
            elif isinstance(value, list) and len(value) == 1 and name in cls._single:
                plain = value[0]
            if isinstance(plain, str) and len(plain) > MAX_TEXT:
                raise too_long(child("", name))
            if name in cls._whole and isinstance(plain, float) and plain.is_integer() and abs(plain) < 2**63:
                plain = int(plain)
            unwrapped[name[:MAX_TEXT]] = plain  # no field has a longer name
        return unwrapped

    def given(self) -> dict[str, object]:
        """The fields that were sent and are not null, by name; nested models as values of `spec`."""
        fields = self.__dict__
        return {
            name: value.to_spec() if isinstance(value, Part) else value
            for name in self.model_fields_set
            if (value := fields[name]) is not None
        }


class Part(Closed):
    """An object within a request."""

    def to_spec(self) -> object:
        """This object as the class of the same name in `spec`, which has the same fields."""
        return getattr(spec, type(self).__name__)(**self.given())
