"""The error tree: the status and code of each class, and how an error quotes what a client sent."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from attention_service import errors
from attention_service.errors import Fault, InvalidValue, ServiceError, error_classes, invalid_request

# Part of the API: clients may switch on a code.
CODES = {
    400: "bad_request invalid_json duplicate_key too_deep invalid_tensors",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "too_slow",
    413: "too_large body_too_large memory_limit",
    415: "unsupported_media_type unsupported_encoding",
    431: "head_too_large",
    422: "invalid_request missing_field unknown_field field_conflict invalid_value invalid_array shape_mismatch "
    "overflow unknown_backend unknown_layer",
    500: "internal_error",
    503: "busy layer_unavailable",
    504: "time_limit",
}


def test_each_code_has_its_status() -> None:
    expected = {code: status for status, codes in CODES.items() for code in codes.split()}
    assert {code: kind.status for code, kind in error_classes().items()} == expected


def test_the_tree_that_is_drawn_is_that_of_the_classes() -> None:
    def drawn(base: type[ServiceError], depth: int) -> list[tuple[int, str, int]]:
        children = [(kind, depth + 1) for kind in base.__subclasses__()]
        return [row for kind, at in children for row in ((at, kind.__name__, kind.status), *drawn(kind, at))]

    lines = re.findall(r"^([│ ]*)[├└]── (\w+) +(\d{3})", errors.__doc__ or "", re.MULTILINE)
    assert [(len(indent) // 4 + 1, name, int(status)) for indent, name, status in lines] == drawn(ServiceError, 0)


def test_every_class_has_a_title_and_a_description_of_its_own() -> None:
    kinds = error_classes().values()
    assert len({kind.title for kind in kinds}) == len({kind.description() for kind in kinds}) == len(kinds)


def test_faults_of_one_code_are_an_error_of_its_class() -> None:
    wrong = Fault("/scale", "a number", "null", code="invalid_value")
    unknown = Fault("/a", "b", "c", code="unknown_field")
    assert type(invalid_request(wrong, wrong)) is InvalidValue
    mixed = invalid_request(wrong, unknown)
    assert (mixed.status, mixed.code) == (422, "invalid_request")
    assert [fault.code for fault in mixed.faults] == ["invalid_value", "unknown_field"]
    assert str(mixed) == "/scale: expected a number, got null; /a: expected b, got c"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "boolean true"),
        (7, "number 7"),
        (-(2**70), "an integer of 71 bits"),
        (0.5, "number 0.5"),
        ("a\n", r"string 'a\n'"),
        ("x" * 100, "string '" + "x" * 39 + "…"),
        ([1, 2], "array of 2"),
        ({"a": 1}, "object with 1 key"),
        (np.ones((2, 3)), "numbers of shape (2, 3)"),
        (np.ones(3, bool), "booleans of shape (3,)"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_is_described_in_a_few_characters(value: Any, text: str) -> None:
    assert InvalidValue.of("/x", "another", value).faults == (Fault("/x", "another", text, "", "invalid_value"),)


def test_pointers_are_escaped_and_short() -> None:
    """RFC 6901, section 3: ~ is ~0, and / is ~1."""
    assert errors.child(errors.child("", "a/b~c"), 0) == "/a~1b~0c/0"
    assert errors.child("", "x" * 1000) == "/" + "x" * 40 + "…"
